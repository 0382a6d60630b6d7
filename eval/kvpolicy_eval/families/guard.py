"""Checks entries in processes of their own, so that a crash or an endless loop ends one of them alone."""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from kvpolicy_eval.common.results import Result
from kvpolicy_eval.families.entries import Entry

Check = Callable[[Entry], Result]


class _Running(NamedTuple):
    """A process that checks an entry.

    Attributes:
        entry: The entry.
        process: The process.
        ends: When it has taken too long, by `time.monotonic`.
    """

    entry: Entry
    process: Any
    ends: float


def guarded(
    entries: Iterable[Entry], check: Check, jobs: int = 1, seconds: float = 300.0
) -> Iterator[tuple[Entry, Result]]:
    """Check entries, each in a process of its own, and yield each result when it is known.

    Args:
        entries: The entries.
        check: What a process runs; a function of a module.
        jobs: Processes at a time.
        seconds: What an entry may take.
    """
    context = _context()
    waiting = deque(entries)
    running = dict[Connection, _Running]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                receiver, started = _start(context, waiting.popleft(), check, seconds)
                running[receiver] = started
            for receiver in _finished(running):
                one = running.pop(receiver)
                yield one.entry, _result(receiver, one, seconds)
    finally:
        for one in running.values():
            one.process.kill()


def _context() -> Any:
    """Processes that begin with the imports of a server process, where the system has them."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvpolicy_eval.families.check"])
    return context


def _start(context: Any, entry: Entry, check: Check, seconds: float) -> tuple[Connection, _Running]:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sender, check, entry), daemon=True)
    process.start()
    sender.close()  # the process has a copy, whose end this one sees
    return receiver, _Running(entry, process, time.monotonic() + seconds)


def _run(sender: Connection, check: Check, entry: Entry) -> None:
    import torch

    torch.set_num_threads(1)  # the models are small
    sender.send(check(entry))


def _finished(running: dict[Connection, _Running]) -> list[Connection]:
    """Processes that have sent a result or ended, or have taken too long."""
    left = min(one.ends for one in running.values()) - time.monotonic()
    ready: list[Any] = wait([*running], timeout=max(left, 0.0))
    return ready or [receiver for receiver, one in running.items() if one.ends <= time.monotonic()]


def _result(receiver: Connection, one: _Running, seconds: float) -> Result:
    """What a process has sent, or an error if it has sent nothing."""
    sentence = ""
    result: Result = {}
    if not receiver.poll():
        one.process.kill()
        sentence = f"It took more than {seconds:.0f} s."
    else:
        try:
            result = receiver.recv()
        except EOFError:
            one.process.join()
            sentence = f"Its process ended with exit code {one.process.exitcode}."
    receiver.close()
    one.process.join()
    return result or {"model": "", "verdict": "error", "sentence": sentence}
