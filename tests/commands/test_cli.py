"""The command as a whole: how soon it helps, what it says of errors, its exit codes, completion, JSON."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import kvpolicy
from kvpolicy.cli import tiny, words
from kvpolicy.cli.app import COMMANDS, main
from kvpolicy.cli.errors import EXTRAS, sentence
from kvpolicy.hf.embedded import SHIPPED

Run = Callable[..., str]

CODE = """
import sys
sys.path[:0] = {path}
from kvpolicy.cli.app import COMMANDS, main
for line in ["", "calibrate", "calibrate csr", *COMMANDS]:
    assert main([*line.split(), "--help"]) == 0
assert main(["--version"]) == 0
assert main(["tiny"]) == 0
print(*{{"torch", "transformers", "matplotlib", "numpy"}} & set(sys.modules), file=sys.stderr)
"""


def test_help_does_not_wait_for_pytorch() -> None:
    code = CODE.format(path=[path for path in sys.path if path])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.split() == []
    assert done.stdout.count("Usage: kvpolicy") == 3 + len(COMMANDS)


def test_version(run: Run) -> None:
    assert run("--version") == f"kvpolicy {kvpolicy.__version__}\n"


def test_no_words_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Usage: kvpolicy" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["--what", "plant", "list a b", "bench --length 1", "tiny x", "explain --json=no"])
def test_a_wrong_line_is_told_in_one(line: str, run: Run) -> None:
    assert run(line, 2).endswith("--help.\n")


@pytest.mark.parametrize("line", ["list", "explain", "plan", "tiny", "bench full --length 64 --steps 1 --rounds 1"])
def test_reading_commands_print_json(line: str, facts: Callable[..., dict[str, Any]]) -> None:
    assert len(facts(line)) > 3


@pytest.mark.parametrize("columns", [60, 120])
@pytest.mark.parametrize("line", ["list", "list codecs", "explain", "plan mixtral-8x7b", "tiny", "--help"])
def test_lines_fit_the_terminal(line: str, columns: int, run: Run) -> None:
    lines = run(line, columns=columns).splitlines()
    assert max(len(line) for line in lines if "/" not in line) <= columns  # a path cannot be broken


def test_nothing_is_coloured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in run("list") + run("--help") + run("plan --what", 2)


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*args: object) -> Any:
        raise error

    return call


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("two\nlines"), "two lines"),
        (FileNotFoundError(2, "No such file or directory", "text.txt"), "text.txt: No such file or directory."),
        (PermissionError(13, "Permission denied", "a.txt"), "a.txt: Permission denied."),
        (ModuleNotFoundError("No module named 'sklearn'", name="sklearn"), "pip install 'kvpolicy[calib]'"),
        (ModuleNotFoundError("No module named 'transformers.x'", name="transformers.x"), "'kvpolicy[hf]'"),
        (MemoryError(), "not enough memory"),
        (RuntimeError("CUDA out of memory."), "not enough memory"),
    ],
)
def test_what_the_user_can_put_right(error: Exception, told: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "card", raising(error))
    assert told in run("tiny", 2)
    monkeypatch.setenv("KVPOLICY_TRACEBACK", "1")
    with pytest.raises(type(error)):
        main(["tiny"])


@pytest.mark.parametrize("error", [TypeError("a bug"), RuntimeError("a bug"), KeyError("a"), ImportError("a bug")])
def test_a_bug_shows_where_it_is(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "card", raising(error))
    with pytest.raises(type(error)):
        main(["tiny"])


def test_a_type_error_that_kvpolicy_thought_of_is_told() -> None:
    with pytest.raises(TypeError) as caught:
        kvpolicy.Policy(selector=kvpolicy.H2O)  # pyright: ignore[reportArgumentType]
    assert "give an instance" in sentence(caught.value)


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tiny, "card", raising(KeyboardInterrupt()))
    assert main(["tiny"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("script", "said", "told"),
    [
        ("| true; echo ${PIPESTATUS[0]}", ("1", "0"), ""),  # 0 where all was written before the pipe broke
        ("> /dev/full; echo $?", ("2",), "No space left on device."),
        (">&-; echo $?", ("0",), ""),
    ],
)
def test_output_that_nobody_takes(script: str, said: tuple[str, ...], told: str) -> None:
    path = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m kvpolicy.cli tiny {script}"],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.stderr == (f"kvpolicy: {told}\n" if told else "")
    assert done.stdout.strip() in said


def test_every_extra_is_one_of_the_package() -> None:
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        known = metadata("kvpolicy").get_all("Provides-Extra") or []
    except PackageNotFoundError:
        pytest.skip("the package is not installed")
    assert set(EXTRAS.values()) <= {*known, "plots"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_has_a_script(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_KVPOLICY_COMPLETE", f"source_{shell}")
    assert main([]) == 0
    assert f"_KVPOLICY_COMPLETE=complete_{shell}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("explain squeeze+kvc", ["squeeze+kvcrush"]),
        ("explain kvcrush/sn", ["kvcrush/snapkv"]),
        ("explain kvcrush:split=0.5/k", ["kvcrush:split=0.5/kvcrush"]),
        ("explain squeeze+h2o+s", ["squeeze+h2o+staircase"]),
        ("explain h2o pl", []),
        ("plan llama", ["llama-2-70b", "llama-3-70b"]),
        ("list code", ["codecs"]),
        ("bench full h2", ["h2o"]),
        ("bench --model ti", ["tiny"]),
        ("generate --compare h2", ["h2o"]),
        ("ex", ["explain"]),
    ],
)
def test_words_are_completed(
    line: str, wanted: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_KVPOLICY_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"kvpolicy {line}")
    monkeypatch.setenv("COMP_CWORD", str(len(line.split())))
    assert main([]) == 0
    assert capsys.readouterr().out.split() == wanted


def test_models_are_completed_without_pytorch_and_yet_all() -> None:
    assert words.shipped() == sorted(SHIPPED)


def test_it_runs_as_a_module() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, "-m", "kvpolicy", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.startswith("kvpolicy ")


def test_pytorch_says_nothing_of_numpy() -> None:
    assert main(["--version"]) == 0
    warnings.warn("Failed to initialize NumPy: No module named 'numpy'", UserWarning, stacklevel=1)  # would raise


@pytest.mark.parametrize("columns", [50, 60])
@pytest.mark.parametrize("line", ["list", "explain llama-3-70b", "plan llama-3-70b", "tiny"])
def test_lines_fit_a_narrow_terminal(line: str, columns: int, run: Callable[..., str]) -> None:
    if line.startswith(("explain", "plan")):
        pytest.importorskip("transformers")
        line = line.replace("explain ", "explain h2o@0.2 ")
    lines = run(line, columns=columns).splitlines()
    assert [text for text in lines if len(text) > columns and "/" not in text] == []  # but for paths
