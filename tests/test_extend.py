"""The selector of docs/extend, as a package with an entry point, passes its own test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
PAGE = Path(__file__).parent.parent / "docs" / "extend" / "selector.md"
FILES = re.compile(r'^```(?:python|toml) title="(.+?)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
ENTRY_POINTS = re.compile(r'^\[project\.entry-points\."(.+)"\]\n(\w+) = "(.+)"$', re.MULTILINE)

if not PAGE.exists():
    pytest.skip("the docs are not installed", allow_module_level=True)


def _install(folder: Path) -> None:
    """Write the page's files, and the metadata that an installer would make of them."""
    files = dict(FILES.findall(PAGE.read_text(encoding="utf-8")))
    assert set(files) == {"kvpolicy_fizzbuzz.py", "pyproject.toml", "test_fizzbuzz.py"}
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    ((group, name, target),) = ENTRY_POINTS.findall(files["pyproject.toml"])
    info = folder / "kvpolicy_fizzbuzz-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvpolicy-fizzbuzz\nVersion: 0.1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n", encoding="utf-8")


def test_the_page_is_a_working_package(tmp_path: Path) -> None:
    _install(tmp_path)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run([*command, "test_fizzbuzz.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
