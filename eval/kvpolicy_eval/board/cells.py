"""Results of the board: each cell is measured once and kept in a file, a line each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import kvpolicy
from kvpolicy.text.embedded_names import EmbeddedName
from kvpolicy.text.errors import KVPolicyError
from kvpolicy_eval.board.peers import PeerEvaluator
from kvpolicy_eval.board.policies import Entry
from kvpolicy_eval.board.times import Times
from kvpolicy_eval.common.accuracy import TaskEvaluator
from kvpolicy_eval.common.intervals import Interval, interval
from kvpolicy_eval.common.results import keep_result, read_results
from kvpolicy_eval.peers.process import Failed, Process
from kvpolicy_lm_eval.data.modes import BEYOND, MODES

DOCS = {512: 8, 1024: 8, 4096: 4}
"""Prompts per task, by length."""
SHARES = [0.1, 0.2, 0.05, 0.02]
"""Budgets, in the order in which they are measured."""

CHANCE = "random"
"""Policy that chooses by chance, below which no other one should be."""
MARK = "†"
"""Behind right answers that are fewer than those of `CHANCE`."""
MARKED = f"{MARK}: fewer right answers than `{CHANCE}`."
"""What the mark means."""

HELD_TOLERANCE = 1.01
"""Factor by which a method of another library may exceed its budget: it rounds tokens."""

Result = dict[str, Any]
"""`right` and `docs`, numbers by task; `held` and `moved`, over the full cache's; or `refused`, a message."""


class Cell(NamedTuple):
    """A policy at a budget, a place of the question and a length.

    Attributes:
        entry: The policy.
        share: Fraction of the full cache's bytes that it may hold, or that a reader may read.
        mode: Place of the question.
        length: Rough prompt length in tokens.
    """

    entry: Entry
    share: float
    mode: str
    length: int

    def key(self, docs: int, model: str) -> str:
        """Key of the result in the file. The full cache has no budget, so that its result serves all."""
        share = "" if self.entry.kind == "all tokens" else f" at {self.share:g}"
        return f"{self.entry.name}{share} {self.mode} {self.length} n={docs} {model}"


class Board:
    """Measures cells, and remembers what it has measured.

    Args:
        results: File of results.
        docs: Prompts per task, by length.
        model: `tiny` or `tiny-4k`.
        peer: Answers for the methods of other libraries.
    """

    def __init__(self, results: Path, docs: dict[int, int], model: EmbeddedName, peer: Process | None = None) -> None:
        """Read earlier results; a model is loaded when it is needed."""
        self.results = results
        self.docs = docs
        self.model: EmbeddedName = model
        self.peer = peer
        self.known = read_results(results)
        self._evaluators: dict[int, TaskEvaluator] = {}
        self._peer_evaluators: dict[int, PeerEvaluator] = {}
        self._times: Times | None = None

    def known_cell(self, cell: Cell) -> Result | None:
        """The result of a cell, if it has been measured."""
        return self.known.get(cell.key(self.docs[cell.length], self.model))

    def cell(self, cell: Cell) -> Result:
        """The result of a cell, measured now unless it is known."""
        key = cell.key(self.docs[cell.length], self.model)
        if key not in self.known:
            self._keep(key, self._measure(cell))
        return self.known[key]

    def known_time(self, entry: Entry, share: float) -> Result | None:
        """Time of a decode step over the full cache's, if it has been measured."""
        return self.known.get(_time_key(entry, share))

    def time(self, entry: Entry, share: float) -> Result:
        """Time of a decode step over the full cache's, measured now unless it is known."""
        key = _time_key(entry, share)
        if key not in self.known:
            if self._times is None:
                self._times = Times()
            self._keep(key, self._times.measure(entry, share))
        return self.known[key]

    def _measure(self, cell: Cell) -> Result:
        return self._measure_peer(cell) if cell.entry.is_peer else self._measure_policy(cell)

    def _measure_peer(self, cell: Cell) -> Result:
        if self.peer is None:
            raise ValueError(f"A peer must run to measure {cell.entry.spec}, got none; try --peers.")
        docs = self.docs[cell.length]
        if cell.length not in self._peer_evaluators:
            self._peer_evaluators[cell.length] = PeerEvaluator(self.peer, docs, cell.length, self.model)
        try:
            accuracy, held = self._peer_evaluators[cell.length].accuracy(cell.entry.spec, cell.share, cell.mode)
        except Failed as error:
            return {"refused": str(error)}
        if held > cell.share * HELD_TOLERANCE:
            return {"refused": f"It holds {held:.1%} of the full cache's bytes."}
        return {"right": _counts(accuracy, docs), "docs": docs, "held": round(held, 4)}

    def _measure_policy(self, cell: Cell) -> Result:
        docs = self.docs[cell.length]
        if cell.length not in self._evaluators:
            self._evaluators[cell.length] = TaskEvaluator(docs, cell.length, torch.float32, self.model)
        evaluator = self._evaluators[cell.length]
        byte_share = cell.share if cell.entry.by_bytes else None
        policy = cell.entry.at(cell.share)
        try:
            accuracy, held = evaluator.accuracy(policy, byte_share, cell.mode, hold=cell.entry.hold)
        except KVPolicyError as error:
            return {"refused": str(error)}
        counts = _counts(accuracy, docs)
        return {"right": counts, "docs": docs, "held": round(held, 4), "moved": _moved(cell, evaluator.model)}

    def _keep(self, key: str, result: Result) -> None:
        keep_result(self.results, self.known, key, result)


def _counts(accuracy: dict[str, float], docs: int) -> dict[str, int]:
    """Right answers of each task."""
    return {task: round(share * docs) for task, share in accuracy.items()}


def _moved(cell: Cell, model: Any) -> float:
    """Bytes that a step reads of the cache, over those of the full cache's, as planned."""
    full = kvpolicy.plan(model, "full", prompt=cell.length)
    policy = cell.entry.at(cell.share)
    sized = f"{policy}@{int(cell.share * full.full_nbytes)}B" if cell.entry.by_bytes else policy
    return round(kvpolicy.plan(model, sized, prompt=cell.length).moved / full.moved, 4)


def _time_key(entry: Entry, share: float) -> str:
    return f"time {entry.name} at {share:g}"


def cells(listed: list[Entry], shares: list[float], lengths: list[int]) -> Iterator[Cell]:
    """All cells, in the order in which they are measured: short prompts and the middle budgets first."""
    for length in lengths:
        for share in shares:
            for mode in MODES:
                for entry in listed:
                    yield Cell(entry, share, mode, length)
            for entry in listed:
                if has_beyond(entry):
                    yield Cell(entry, share, BEYOND, length)


def has_beyond(entry: Entry) -> bool:
    """Whether a question may be added whole where it would compete otherwise.

    Presses of other libraries always do so, and the full cache and readers evict nothing.

    >>> has_beyond(Entry("h2o", "selector")), has_beyond(Entry("full", "all tokens"))
    (True, False)
    """
    return entry.by_bytes and not entry.is_peer


def is_below_chance(board: Board, cell: Cell) -> bool:
    """Whether a policy has fewer right answers than `random` with the same bytes, of what both have results for."""
    if not cell.entry.by_bytes:
        return False
    found, chance = (
        accuracy([board.known_cell(each) or {}]) for each in (cell, cell._replace(entry=Entry(CHANCE, "selector")))
    )
    return found is not None and chance is not None and found.mean < chance.mean


def accuracy(results: list[Result]) -> Interval | None:
    """Right answers of all tasks, of some results together; None if one is missing or refused."""
    if not results or any("right" not in result for result in results):
        return None
    right = sum(sum(result["right"].values()) for result in results)
    docs = sum(result["docs"] * len(result["right"]) for result in results)
    return interval(right, docs)
