"""The command line as a whole: lazy imports, error messages, exit codes, completion and JSON."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy.calibration.calibrators import CALIBRATORS
from kvpolicy.cli import arguments
from kvpolicy.cli.app import COMMANDS, EXTRAS, main, sentence
from kvpolicy.cli.commands import cache, tiny
from kvpolicy.hf.embedded import SHIPPED
from kvpolicy.text.errors import KVPolicyError, KVPolicyStateError, KVPolicyTypeError
from tests.cli.conftest import Run

CODE = """
import sys
sys.path[:0] = {path}
from kvpolicy.cli.app import main
for line in {lines}:
    assert main([*line.split(), "--help"]) == 0
for line in ["--version", "tiny", "list"]:
    assert main([line]) == 0
print(*{{"matplotlib", "numpy"}} & set(sys.modules), file=sys.stderr)
assert main(["cache", "info", {file!r}]) == 0
print(*{{"torch", "transformers"}} & set(sys.modules), file=sys.stderr)
"""


def test_help_lists_and_headers_do_not_import_pytorch(tmp_path: Path) -> None:
    file = str(tmp_path / "cache.safetensors")
    assert main(["cache", "make", "tiger=4821", "--policy", "window@8", "--out", file]) == 0
    lines = ["", "calibrate", *(f"calibrate {name}" for name in CALIBRATORS), *COMMANDS]
    code = CODE.format(path=[path for path in sys.path if path], file=file, lines=lines)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.split() == []
    assert done.stdout.count("Usage: kvpolicy") == len(lines) and "window@8" in done.stdout
    assert f"kvpolicy {kvpolicy.__version__}\n" in done.stdout


def test_without_arguments_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Usage: kvpolicy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        ("kvpolicy", ["--what", "plant"]),
        ("kvpolicy list", ["list a b"]),
        ("kvpolicy bench", ["bench --length 1"]),
        ("kvpolicy tiny", ["tiny x"]),
        ("kvpolicy cache", ["cache"]),
        ("kvpolicy cache info", ["cache info --json=no"]),
        ("kvpolicy explain", ["explain --json=no"]),
        ("kvpolicy plan", ["plan a b c", "plan --what", "plan tiny --batch 0", "plan tiny --tp x", "plan --new -1"]),
        ("kvpolicy calibrate", ["calibrate", "calibrate gear"]),
        ("kvpolicy calibrate csr", ["calibrate csr", "calibrate csr --tokens 0"]),
    ],
)
def test_usage_errors_are_one_line_with_the_help(command: str, lines: list[str], run: Run) -> None:
    for line in lines:
        assert run(line, 2).endswith(f"Try {command} --help.\n"), line


@pytest.mark.parametrize("line", ["list", "explain", "plan", "tiny", "bench full --length 64 --steps 1 --rounds 1"])
def test_commands_print_json(line: str, facts: Callable[..., dict[str, Any]]) -> None:
    assert len(facts(line)) > 3


WIDTHS = ["list", "list codecs", "explain", "explain h2o@0.2 llama-3-70b", "plan llama-3-70b", "tiny", "--help"]


@pytest.mark.parametrize("columns", [50, 60, 120])
def test_lines_fit_the_terminal(columns: int, run: Run) -> None:
    for line in WIDTHS if columns > 50 else WIDTHS[:-1]:  # the help has a least width
        lines = run(line, columns=columns).splitlines()
        assert [text for text in lines if len(text) > columns and "/" not in text] == []  # a path cannot be broken


@pytest.mark.parametrize("group", ["", "cache ", "calibrate "])
def test_the_help_is_as_wide_as_the_terminal_and_cuts_no_summary(group: str, run: Run) -> None:
    for columns in (80, 120, 200):
        shown = run(f"{group}--help", columns=columns)
        assert "..." not in shown.partition("Commands:")[2] and max(map(len, shown.splitlines())) <= min(columns, 120)
    texts = [" ".join(run(f"{each}--help").split()) for each in ("", "cache ", "calibrate ")]
    for command in [*COMMANDS.values(), cache.make, *CALIBRATORS.values()]:
        summary = " ".join((command.__doc__ or "").split("\n\n")[0].split())
        assert any(summary in text for text in texts)
    widest = [max(map(len, run("plan --help", columns=columns).splitlines())) for columns in (80, 120)]
    assert widest[0] <= 80 < widest[1]


def test_nothing_is_colored(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in run("list") + run("--help") + run("plan --what", 2)


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*args: object) -> Any:
        raise error

    return call


@pytest.mark.parametrize(
    ("error", "message"),
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
def test_error_messages(error: Exception, message: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "card", raising(error))
    assert message in run("tiny", 2)
    monkeypatch.setenv("KVPOLICY_TRACEBACK", "1")
    with pytest.raises(type(error)):
        main(["tiny"])


def test_warnings_are_one_line() -> None:
    script = (
        "import warnings; from kvpolicy.cli import app; from kvpolicy import KVPolicyWarning\n"
        "app._run = lambda _: warnings.warn('the text is long', KVPolicyWarning) or 0\n"
        "app.main(['tiny'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == "kvpolicy: the text is long\n"


@pytest.mark.parametrize(
    "error",
    [
        TypeError("a bug"),
        RuntimeError("a bug"),
        KeyError("a"),
        ImportError("a bug"),
        ModuleNotFoundError("No module named 'kvpolicy.nowhere'", name="kvpolicy.nowhere"),
    ],
)
def test_internal_errors_have_a_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "card", raising(error))
    assert sentence(error) == ""
    with pytest.raises(type(error)):
        main(["tiny"])


@pytest.mark.parametrize("kind", [KVPolicyError, KVPolicyTypeError, KVPolicyStateError])
def test_errors_of_kvpolicy_are_one_sentence_wherever_they_are_raised(kind: type[Exception]) -> None:
    """The class decides, not the line that raised it: plug-ins raise it too, and kvpolicy may raise a TypeError."""
    scope: dict[str, Any] = {"__name__": "elsewhere", "error": kind("batch must be positive, got 0; try 1")}
    with pytest.raises(kind) as caught:
        exec("if True: raise error", scope)
    assert sentence(caught.value) == "batch must be positive, got 0; try 1"
    with pytest.raises(TypeError) as internal:
        exec("raise TypeError('a bug')", {"__name__": "kvpolicy.somewhere"})
    assert sentence(internal.value) == ""


def test_a_missing_deepspeed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpolicy_deepspeed import checks

    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with pytest.raises(ImportError) as caught:
        checks.check_backend("deepspeed", "a/folder")
    assert "pip install" in sentence(caught.value)


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tiny, "card", raising(KeyboardInterrupt()))
    assert main(["tiny"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("script", "expected", "message"),
    [
        ("| true; echo ${PIPESTATUS[0]}", ("1", "0"), ""),  # 0 if all was written before the pipe was closed
        ("> /dev/full; echo $?", ("2",), "No space left on device."),
        (">&-; echo $?", ("0",), ""),
    ],
)
def test_closed_or_full_standard_output(script: str, expected: tuple[str, ...], message: str) -> None:
    path = os.pathsep.join(path for path in sys.path if path)
    command = ["bash", "-c", f"{sys.executable} -m kvpolicy tiny {script}"]
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": ""}  # buffered output fails at exit
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stderr == (f"kvpolicy: {message}\n" if message else "")
    assert done.stdout.strip() in expected


def test_every_extra_is_one_of_the_package() -> None:
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        known = metadata("kvpolicy").get_all("Provides-Extra") or []
    except PackageNotFoundError:
        pytest.skip("the package is not installed")
    assert set(EXTRAS.values()) <= {*known, "plots"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_has_a_script(shell: str, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setenv("_KVPOLICY_COMPLETE", f"source_{shell}")
    assert f"_KVPOLICY_COMPLETE=complete_{shell}" in run([])


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("explain squeeze+kvc", ["squeeze+kvcrush"]),
        ("explain kvcrush/sn", ["kvcrush/snapkv"]),
        ("explain kvcrush:split=0.5/kvc", ["kvcrush:split=0.5/kvcrush"]),
        ("explain squeeze+h2o+s", ["squeeze+h2o+shadowkv", "squeeze+h2o+sparq", "squeeze+h2o+staircase"]),
        ("explain h2o pl", []),
        ("plan llama-3", ["llama-3-70b", "llama-3.1-8b", "llama-3.2-1b"]),
        ("list code", ["codecs"]),
        ("bench full h2", ["h2o"]),
        ("bench --model ti", ["tiny", "tiny-4k"]),
        ("generate --compare h2", ["h2o"]),
        ("ex", ["explain"]),
    ],
)
def test_completion(line: str, wanted: list[str], monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setenv("_KVPOLICY_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"kvpolicy {line}")
    monkeypatch.setenv("COMP_CWORD", str(len(line.split())))
    assert run([]).split() == wanted


def test_all_shipped_models_are_completed() -> None:
    assert arguments.shipped() == sorted(SHIPPED)


def test_the_numpy_warning_of_pytorch_is_ignored() -> None:
    assert main(["--version"]) == 0
    warnings.warn("Failed to initialize NumPy: No module named 'numpy'", UserWarning, stacklevel=1)  # would raise


def test_a_policy_is_an_argument_or_an_option() -> None:
    assert arguments.policy_of(arguments.POLICY, "") == arguments.POLICY
    assert arguments.policy_of("h2o@64", "") == arguments.policy_of(arguments.POLICY, "h2o@64") == "h2o@64"
    with pytest.raises(KVPolicyError, match="must be given once, got window and --policy h2o"):
        arguments.policy_of("window", "h2o")


def test_serve_takes_the_policy_as_an_option(run: Run) -> None:
    assert "got 'nonsense'" in run("serve tiny --policy nonsense --rows 8", 2)
