"""Fixtures that run the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import kvpolicy
from kvpolicy.cli.app import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run a command in a terminal of the given width; returns its output, or the one line of its error."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def call(line: str, code: int = 0, columns: int = 80) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(line.split()) == code
        out, err = capsys.readouterr()
        if code == 2:
            assert not out and err.startswith("kvpolicy: ") and err.count("\n") == 1
        return err if code == 2 else out

    return call


@pytest.fixture
def facts(run: Callable[..., str]) -> Callable[..., dict[str, Any]]:
    """Run a command with `--json`; returns its facts, after checking the versions."""

    def call(line: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(run(f"{line} --json"))
        assert (found["kvpolicy"], found["format"], found["command"]) == (kvpolicy.__version__, 1, line.split()[0])
        return found

    return call
