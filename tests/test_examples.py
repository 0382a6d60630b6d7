"""Every script of docs/examples runs, and its last line is the one that its docstring quotes."""

from __future__ import annotations

import ast
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.parallel.launchers import LIMIT, words

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "docs" / "examples"
QUOTE = "Prints (embedded model, CPU):"
if not EXAMPLES.is_dir():
    pytest.skip("the docs are not installed", allow_module_level=True)
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
OTHERS = {"lm_eval_run.py": "lm_eval", "two_ranks.py": "deepspeed"}


def promised(script: Path) -> str:
    """What a script's docstring says that it prints last, on one line."""
    text = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    _, found, quoted = text.partition(QUOTE)
    assert found, f"{script.name} does not say what it prints: end its docstring with a paragraph '{QUOTE} ...'"
    return " ".join(quoted.split())


def last(text: str) -> str:
    return " ".join(text.strip().splitlines()[-1].split())


@pytest.mark.parametrize(
    "script", [path for path in SCRIPTS if path.name != "two_ranks.py"], ids=lambda path: path.stem
)
def test_it_prints_what_it_says(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if script.name in OTHERS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip(OTHERS[script.name])
    monkeypatch.setattr(sys, "argv", [str(script)])
    with warnings.catch_warnings():
        if script.name == "lm_eval_run.py":
            warnings.simplefilter("ignore")  # lm-eval and its dependencies warn a lot
        runpy.run_path(str(script), run_name="__main__")
    assert last(capsys.readouterr().out) == promised(script)


def output(command: list[str], **variables: str) -> str:
    """What Python prints in a process that is none of several ranks, with the packages of this tree."""
    kept = {name: value for name, value in os.environ.items() if name not in ("LOCAL_SIZE", "RANK", "WORLD_SIZE")}
    folders = [ROOT, ROOT / "integrations", ROOT / "eval", kept.get("PYTHONPATH", "")]
    paths = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, *command]
    done = subprocess.run(line, env=kept | paths | variables, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_two_ranks_print_what_they_say() -> None:
    script = EXAMPLES / "two_ranks.py"
    assert last(output([*words("torchrun"), str(script)], DS_ACCELERATOR="cpu")) == promised(script)


def test_the_page_shows_every_script() -> None:
    page = (EXAMPLES / "index.md").read_text(encoding="utf-8")
    assert SCRIPTS
    assert not [script.name for script in SCRIPTS if f"examples/{script.name}" not in page]


@pytest.mark.slow
def test_two_ranks_run_without_deepspeed() -> None:
    """The extra `all` does not install it, so that transformers shards; one rank prints what two do, but for bytes."""
    script = EXAMPLES / "two_ranks.py"
    hidden = (
        "import importlib.util as util, runpy, sys\n"
        "found = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'deepspeed' else found(name, *more)\n"
        "sys.modules['deepspeed'] = None\n"
        f"sys.argv = [{str(script)!r}]\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')\n"
    )
    expected = promised(script).replace("2 rank(s)", "1 rank(s)").partition("; 627,720")[0]
    assert last(output(["-c", hidden])).startswith(expected)
