"""The line of a terminal that says what the server does."""

from __future__ import annotations

import io
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from kvpolicy.serving.metrics import Metrics
from kvpolicy.serving.server import log_to_terminal
from kvpolicy.serving.status import SPAN, Status, show_status


def metrics_of(*answers: int, rows: int = 4, waiting: int = 0) -> tuple[Metrics, list[Any]]:
    """The counters of a server with answers of so many tokens in flight, and its rows."""
    held: list[Any] = [SimpleNamespace(tokens=[0] * tokens) for tokens in answers]
    held += [None] * (rows - len(answers))
    metrics = Metrics()
    metrics.watch(SimpleNamespace(rows=held, running=len(answers), waiting=waiting))
    return metrics, held


def test_rows_and_the_speed_of_the_last_seconds() -> None:
    now = 100.0
    metrics, rows = metrics_of(5, 7, waiting=3)
    status = Status(metrics, lambda: now)
    assert status.line() == "2 of 4 rows, 3 waiting, 0.0 tokens/s, 0 answered, cache 0 B"
    for _ in range(10):
        now += 1
        rows[0].tokens += [0] * 20
    assert "20.0 tokens/s" in status.line()
    metrics.generated_tokens += len(rows[0].tokens)  # the answer ends, and is still counted
    rows[0] = None
    now += 1
    assert "18.2 tokens/s" in status.line(), "200 tokens in 11 seconds"
    for _ in range(2 * int(SPAN)):
        now += 1
        status.line()
    assert ", 0.0 tokens/s" in status.line(), "what is long ago does not count"


def test_an_answer_that_ends_between_two_reads_is_no_negative_speed() -> None:
    now = 0.0
    metrics, rows = metrics_of(50)
    status = Status(metrics, lambda: now)
    status.line()
    now, rows[0] = 1.0, None
    assert "0.0 tokens/s" in status.line()


def test_the_log_stands_above_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=40, _environ={})
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with show_status(metrics_of(1)[0], console), log_to_terminal():
        logging.getLogger("kvpolicy.serving").info("an answer")
    shown = stream.getvalue()
    assert "INFO: an answer\n" in shown
    lines = [line for line in shown.split("\n") if "1 of 4 rows" in line]
    assert lines and all("…" in line for line in lines), "it is cut at the width of the terminal"
    assert sys.stderr.getvalue() == ""  # pyright: ignore[reportAttributeAccessIssue]


def test_nothing_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with show_status(metrics_of(1)[0]):
        print("an answer", file=sys.stderr)
    assert capsys.readouterr().err == "an answer\n"
