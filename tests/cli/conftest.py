"""Fixtures that run the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import kvpolicy
from kvpolicy.cli.app import main

Run = Callable[..., str]
Facts = Callable[..., dict[str, Any]]
Tiny = tuple[Any, Any]


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    """The embedded model and its tokenizer."""
    return kvpolicy.tiny()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a line or its words in a terminal of the given width; returns the output, or the one line of the error."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def call(line: str | list[str], code: int = 0, columns: int = 80) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        capsys.readouterr()  # what the test itself has printed
        assert main(line.split() if isinstance(line, str) else line) == code
        out, err = capsys.readouterr()
        if code == 2:
            assert not out and err.startswith("kvpolicy: ") and err.count("\n") == 1
        return err if code == 2 else out

    return call


@pytest.fixture
def facts(run: Run) -> Facts:
    """Run a command with `--json`; returns its facts, after checking the versions."""

    def call(line: str | list[str]) -> dict[str, Any]:
        words = line.split() if isinstance(line, str) else line
        found: dict[str, Any] = json.loads(run([*words, "--json"]))
        command = words[: 2 if words[0] == "cache" else 1]
        assert (found["kvpolicy"], found["command"].split()) == (kvpolicy.__version__, command)
        assert found["format"] == 1 or command[0] == "cache"  # which has the format of the file
        return found

    return call
