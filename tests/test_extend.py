"""What the pages of docs/extend show are packages: installed by their entry points, tested, and used by their names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.doc_blocks import DOCS, blocks
from tests.doc_commands import simple_commands

if not DOCS.is_dir():
    pytest.skip("the docs are not installed", allow_module_level=True)

ENTRY_POINTS = re.compile(r'^\[project\.entry-points\."(.+)"\]\n(\w+) = "(.+)"$', re.MULTILINE)
KINDS = {"allocator": "lottery", "selector": "fizzbuzz", "codec": "half"}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The kind of part whose page was installed in `tmp_path`: its files, and the metadata that an installer makes."""
    which, name = request.param, KINDS[request.param]
    titled = [block for block in blocks(DOCS / "extend" / f"{which}.md") if block.title]
    files = {block.title: block.text for block in titled if block.language in ("python", "toml")}
    assert set(files) == {f"kvpolicy_{name}.py", "pyproject.toml", f"test_{name}.py"}
    for title, text in files.items():
        (tmp_path / title).write_text(text, encoding="utf-8")
    assert ENTRY_POINTS.findall(files["pyproject.toml"])[0][:2] == (f"kvpolicy.{which}s", name)
    ((group, name, target),) = ENTRY_POINTS.findall(files["pyproject.toml"])
    info = tmp_path / f"kvpolicy_{name}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvpolicy-{name}\nVersion: 0.1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n", encoding="utf-8")
    yield which


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)


def commands(kind: str) -> dict[str, list[str]]:
    """What the page's block of commands runs, by program."""
    (block,) = (block for block in blocks(DOCS / "extend" / f"{kind}.md") if block.language == "bash")
    return {words[0]: words for words in simple_commands(block.text)}


def test_the_page_is_a_package_that_keeps_the_rules_and_has_a_name(kind: str, tmp_path: Path) -> None:
    tests = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), f"test_{KINDS[kind]}.py"]
    words = commands(kind)["kvpolicy"][1:]
    code = f"import sys, pytest; from kvpolicy.cli import main; sys.exit(pytest.main({tests!r}) or main({words!r}))"
    done = python(tmp_path, "-c", code)
    assert done.returncode == 0, done.stdout + done.stderr
    passed, _, printed = done.stdout.partition(" passed")
    assert int(passed.split()[-1]) >= 3
    assert KINDS[kind] in printed


@pytest.mark.slow
def test_lm_eval_knows_its_name(kind: str, tmp_path: Path) -> None:
    words = commands(kind)["kvpolicy-lm-eval"]
    done = python(
        tmp_path, "-c", f"import sys; sys.argv = {words!r}; from kvpolicy_lm_eval.startup import main; main()"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert KINDS[kind] in done.stdout
