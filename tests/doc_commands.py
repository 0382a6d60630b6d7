"""Command lines of Markdown pages: their programs exist, and take their arguments, without being run."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.doc_blocks import PEERS, ROOT, Block, blocks

_SEPARATORS = {";", "&&", "||", "|", "&"}
_REDIRECTS = {"<", ">", ">>", "2>"}
_PLAIN = {"cd", "echo", "export", "git", "source", "cat", "curl", "mkdir", "printf"}
_TOOLS = {"build", "mkdocs", "pre-commit", "ruff", "codespell", "pyright"}
"""What only the extra `dev` installs: nothing of it is asked here, so that the tests need the extra `test` alone."""


class Parsed(Exception):
    """A parser has taken its arguments: stop before anything is done."""


def simple_commands(text: str) -> Iterator[list[str]]:
    """The simple commands of a piece of shell: loops are unrolled, functions are called, redirects are left out."""
    functions: dict[str, list[list[str]]] = {}
    loop: tuple[str, list[str]] | None = None
    for words in _split(_words(text)):
        if words[0] == "for":
            loop = words[1], words[3:]
            continue
        if words == ["done"]:
            loop = None
            continue
        if len(words) > 3 and words[1] == "()":
            functions[words[0]] = [words[3:]]
            continue
        words = [word for word in words if word not in ("do", "}")]
        for values in [{}] if loop is None else [{loop[0]: value} for value in loop[1]]:
            call = [_fill(word, values) for word in words]
            yield from _expand(call, functions)


def _expand(call: list[str], functions: dict[str, list[list[str]]]) -> Iterator[list[str]]:
    if not call or call[0] not in functions:
        if call:
            yield call
        return
    given = {str(place): word for place, word in enumerate(call[1:], 1)}
    for words in functions[call[0]]:
        yield [other for word in words for other in (call[2:] if word == "${@:2}" else [_fill(word, given)])]


def _fill(word: str, values: dict[str, str]) -> str:
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: values.get(found[1] or found[2], found[1] or found[2]), word)


def _words(text: str) -> list[str]:
    words: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        parts = shlex.shlex(line, posix=True, punctuation_chars=";&|<>()")
        parts.whitespace_split = True
        words += [*parts, ";"]
    return words


def _split(words: list[str]) -> Iterator[list[str]]:
    command: list[str] = []
    skip = False
    for word in words:
        if word in _SEPARATORS:
            if command:
                yield command
            command = []
        elif word in _REDIRECTS:
            skip = True
        elif skip:
            skip = False
        elif command or not re.match(r"^[A-Z_]+=", word):  # not a variable for one command
            command.append(word)


def check(words: list[str], block: Block) -> None:
    """Fail where a command's program is unknown, or would not take the arguments."""
    program = words[0]
    rest = words[1:]
    if program in _PLAIN:
        return
    if program in _TOOLS:
        _tool(program)
        return
    assert program in CHECKS, f"{block.place}: nothing is known of the program {program!r}"
    try:
        CHECKS[program](rest, block)
    except SystemExit as stop:
        assert not stop.code, f"{block.place}: {shlex.join(words)}: its parser refuses it (exit code {stop.code})"


def _extras() -> str:
    """The table of extras in pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]


def _tool(name: str) -> None:
    assert re.search(rf'"{name}(-material)?[>\[]', _extras()), f"{name} is in no extra"


def _pip(words: list[str], block: Block) -> None:
    assert words[0] in ("install", "uninstall"), words
    extras = set(re.findall(r"^([\w-]+) = ", _extras(), re.MULTILINE))
    if "-c" in words:
        assert (ROOT / words[words.index("-c") + 1]).is_file()
    for name, wanted in (re.fullmatch(r"([\w.-]+)\[(.+)\]", word).groups() for word in words if word.endswith("]")):  # pyright: ignore[reportOptionalMemberAccess]
        unknown = set(wanted.split(",")) - extras
        assert name not in (".", "kvpolicy") or not unknown, f"{block.place}: there is no extra {unknown}"


def _python(words: list[str], block: Block) -> None:
    if words[0] == "-m":
        _module(words[1], words[2:])
    elif words[0] != "-c":
        _script(words[0], block)


def _script(name: str, block: Block) -> None:
    shown = any(other.title == name for other in blocks(block.page))
    assert shown or (ROOT / name).is_file() or (block.page.parent / name).is_file(), f"{block.place}: no file {name}"


def _module(name: str, words: list[str]) -> None:
    if name in _TOOLS:
        return _tool(name)
    if name in CHECKS and name != "pytest":
        return CHECKS[name](words, NOWHERE)
    if name.partition(".")[0] in PEERS:
        for word in words:
            if word.startswith("kvpolicy"):  # what a peer loads of this package by its path
                module, _, attribute = word.rpartition(".")
                assert hasattr(importlib.import_module(module), attribute), f"there is no {word}"
        return
    spec = find_spec(name)
    assert spec is not None, f"there is no module {name}"
    if not name.startswith("kvpolicy"):
        return
    module = importlib.import_module(f"{name}.__main__" if spec.submodule_search_locations else name)
    parse(module.main, name, words)


def parse(run: Callable[[], Any], name: str, words: list[str]) -> None:
    """Call a program's main function, which must read its arguments before all else, and stop it there."""
    taken = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        taken(self, *args, **kwargs)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Parsed):
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(sys, "argv", [name, *words])
        run()


def _kvpolicy(words: list[str], block: Block) -> None:
    from kvpolicy.cli import app as cli

    if not hasattr(cli, "app"):
        return parse(cli.main, "kvpolicy", words)
    if any(word.endswith("-completion") for word in words):
        return None  # reading this option installs something
    from typer.main import get_command

    group: Any = get_command(cli.app)
    context = group.make_context("kvpolicy", list(words))
    while hasattr(group, "resolve_command"):
        name, group, rest = group.resolve_command(context, [*context._protected_args, *context.args])
        context = group.make_context(name, rest, parent=context)
    return None


def _kvpolicy_eval(words: list[str], block: Block) -> None:
    from kvpolicy_eval import cli

    parse(cli.main, "kvpolicy-eval", words)


def _lm_eval(words: list[str], block: Block) -> None:
    pytest.importorskip("lm_eval")
    import lm_eval.__main__ as lm

    from kvpolicy import Policy
    from kvpolicy_lm_eval import startup

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm, "setup_logging", lambda *args: None)
        parse(lm.cli_evaluate, "lm_eval", words)
    for said in re.findall(r"(?:^|,)policy=([^,]+)", words[words.index("--model_args") + 1]):
        Policy.parse(said)
    for task in words[words.index("--tasks") + 1].split(","):
        known = any(Path(startup.tasks_path()).rglob(f"{task}.yaml"))
        assert known or not task.startswith("kvpolicy"), f"there is no task {task}"


def _torchrun(words: list[str], block: Block) -> None:
    from torch.distributed.run import get_args_parser

    args = get_args_parser().parse_args(words)
    _launched(args.training_script, args.training_script_args, args.module, block)


def _deepspeed(words: list[str], block: Block) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from deepspeed.launcher.runner import parse_args

    args: Any = parse_args(words)
    _launched(args.user_script, args.user_args, args.module, block)


def _accelerate(words: list[str], block: Block) -> None:
    from accelerate.commands.launch import launch_command_parser

    assert words[0] == "launch"
    args = launch_command_parser().parse_args(words[1:])
    _launched(args.training_script, args.training_script_args, args.module, block)


def _launched(script: str, words: list[str], module: bool, block: Block) -> None:
    _python(["-m", script, *words] if module else [script, *words], block)


def _pytest(words: list[str], block: Block) -> None:
    markers = re.findall(r'^ +"(\w+): ', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    for before, word in zip(["", *words], words, strict=False):
        assert before != "-m" or word in markers, f"there is no marker {word}"
        assert "/" not in word or (ROOT / word).exists(), f"{block.place}: there are no tests {word}"


def _bash(words: list[str], block: Block) -> None:
    assert (ROOT / words[0]).is_file(), f"{block.place}: there is no file {words[0]}"


NOWHERE = Block(ROOT / "README.md", 0, "bash", "", "")
CHECKS: dict[str, Callable[[list[str], Block], None]] = {
    "pip": _pip,
    "python": _python,
    "kvpolicy": _kvpolicy,
    "kvpolicy-eval": _kvpolicy_eval,
    "kvpolicy_eval.cli": _kvpolicy_eval,
    "lm_eval": _lm_eval,
    "kvpolicy-lm-eval": _lm_eval,
    "torchrun": _torchrun,
    "deepspeed": _deepspeed,
    "accelerate": _accelerate,
    "pytest": _pytest,
    "bash": _bash,
}
"""Each program's own way to read its arguments."""
