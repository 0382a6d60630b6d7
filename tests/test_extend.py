"""What the pages of docs/extend show are packages: installed by their entry points, tested, and used by their names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doc_blocks import DOCS, blocks
from tests.doc_commands import simple_commands

if not DOCS.is_dir():
    pytest.skip("the docs are not installed", allow_module_level=True)

ENTRY_POINTS = re.compile(r'^\[project\.entry-points\."(.+)"\]\n(\w+) = "(.+)"$', re.MULTILINE)
KINDS = {"allocator": "lottery", "selector": "fizzbuzz", "merger": "firstborn", "codec": "half", "reader": "loud"}


SCRIPT = """
import pytest
from kvpolicy.cli import main

{steps}
"""
STEP = """
print("package: {kind}", flush=True)
print("ended with", int(pytest.main({tests!r})) or main({words!r}))
"""


def install(kind: str, folder: Path) -> None:
    """Make the page's files, and the metadata that an installer makes."""
    name = KINDS[kind]
    titled = [block for block in blocks(DOCS / "extend" / f"{kind}.md") if block.title]
    files = {block.title: block.text for block in titled if block.language in ("python", "toml")}
    assert set(files) == {f"kvpolicy_{name}.py", "pyproject.toml", f"test_{name}.py"}
    for title, text in files.items():
        (folder / title).write_text(text, encoding="utf-8")
    (folder / "pyproject.toml").unlink()  # of three, which one would count for pytest?
    ((group, own, target),) = ENTRY_POINTS.findall(files["pyproject.toml"])
    assert (group, own) == (f"kvpolicy.{kind}s", name)
    info = folder / f"kvpolicy_{name}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvpolicy-{name}\nVersion: 0.1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n", encoding="utf-8")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the packages of all pages are installed."""
    folder = tmp_path_factory.mktemp("packages")
    for kind in KINDS:
        install(kind, folder)
    return folder


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    paths = {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    environment = os.environ | paths | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # some import for seconds
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)


def commands(kind: str) -> dict[str, list[str]]:
    """What the page's block of commands runs, by program."""
    (block,) = (block for block in blocks(DOCS / "extend" / f"{kind}.md") if block.language == "bash")
    return {words[0]: words for words in simple_commands(block.text)}


@pytest.fixture(scope="module")
def printed(installed: Path) -> dict[str, str]:
    """What each page's tests and its command print, in one process: it is importing torch that takes long."""
    steps: list[str] = []
    for kind, name in KINDS.items():
        tests = ["-q", "-p", "no:cacheprovider", "--rootdir", str(installed), f"test_{name}.py"]
        steps.append(STEP.format(kind=kind, tests=tests, words=commands(kind)["kvpolicy"][1:]))
    done = python(installed, "-c", SCRIPT.format(steps="".join(steps)))
    assert done.returncode == 0, done.stdout + done.stderr
    parts = [part.partition("\n") for part in done.stdout.split("package: ")]
    return {kind: said for kind, _, said in parts[1:]}


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_is_a_package_that_keeps_the_rules_and_has_a_name(kind: str, printed: dict[str, str]) -> None:
    assert printed[kind].endswith("ended with 0\n"), printed[kind]
    passed, _, said = printed[kind].partition(" passed")
    assert int(passed.split()[-1]) >= 3
    assert KINDS[kind] in said


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_lm_eval_knows_its_name(kind: str, installed: Path) -> None:
    words = commands(kind)["kvpolicy-lm-eval"]
    done = python(
        installed, "-c", f"import sys; sys.argv = {words!r}; from kvpolicy_lm_eval.startup import main; main()"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert KINDS[kind] in done.stdout
