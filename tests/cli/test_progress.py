"""Progress of a long command, on a terminal and in a log."""

from __future__ import annotations

import io

from kvpolicy.cli.formatting import Progress


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(stream: io.StringIO) -> str:
    """Two parts of ten texts, ten seconds each."""
    clock = Clock()
    progress = Progress(2, stream, clock)
    for name in ("full", "snapkv@0.2"):
        done = progress.part(name)
        for text in range(10):
            clock.now += 10
            done(text + 1, 10)
    return stream.getvalue()


def test_a_log_gets_a_line_now_and_then() -> None:
    lines = run(io.StringIO()).splitlines()
    assert lines[0] == "full ..." and lines[1] == "full: 3 of 10 texts, about 3 min left in all"
    assert lines[2] == "full: 6 of 10 texts, about 2 min left in all"
    assert "snapkv@0.2 ..." in lines and lines[-1] == "snapkv@0.2: 8 of 10 texts, about 20 s left in all"
    assert len(lines) == 8


def test_a_terminal_gets_one_line_for_each_part() -> None:
    shown = run(Terminal())
    assert shown.count("\n") == 2 and shown.endswith("\n")
    states = [state.strip() for state in shown.split("\r")]
    assert "full: 1 of 10 texts, about 3 min left in all" in states and "full: 10 texts" in states
    assert states[-1] == "snapkv@0.2: 10 texts"
    assert len({len(state.rstrip("\n")) for state in shown.split("\r")[1:]}) == 1, "nothing of a longer line is left"
