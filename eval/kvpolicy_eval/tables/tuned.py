"""A policy found by tuning beside the best ordinary one of the same bytes.

One policy by layer is tuned for each place of the question, on documents of one seed, and compared on those of another
with the ordinary policy that does best on the former: over all tasks, and task by task.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import kvpolicy
from kvpolicy.tuning.comparison import Comparison, Difference, compare
from kvpolicy.tuning.evidence import Score, reference_logits, score
from kvpolicy.tuning.ordinary import rivals
from kvpolicy.tuning.rivals import best_rival
from kvpolicy.tuning.tune import tune
from kvpolicy.tuning.windows import Window, read_windows
from kvpolicy_eval.common.table import Grid, Option, Section, Table, byte_shares, collect, results_folder
from kvpolicy_eval.data.tasks import tasks
from kvpolicy_eval.data.windows import windows
from kvpolicy_lm_eval.data.modes import MODES

LENGTH = 1000
"""Rough length of the prompts, in tokens."""

SHARES = (0.05, 0.1, 0.2)
"""Shares of the full cache's bytes."""

TUNED_ON = 1
HELD_OUT = 2
"""Seeds of the documents."""


class Cell(NamedTuple):
    """A tuned and an ordinary policy on the windows of one mode.

    Attributes:
        mode: The place of the question.
        share: Bytes, as a share of the full cache's.
        rival: The ordinary policy.
        tuned: How the tuned one did.
        ordinary: How the ordinary one did.
        tasks: The task of each window.
    """

    mode: str
    share: float
    rival: str
    tuned: Score
    ordinary: Score
    tasks: tuple[str, ...]

    @property
    def comparison(self) -> Comparison:
        """Over all windows."""
        return compare(self.tuned, self.ordinary)

    def worse(self) -> Iterator[str]:
        """Tasks in which the tuned policy answers less, beyond the interval."""
        for name in dict.fromkeys(self.tasks):
            own = [number for number, task in enumerate(self.tasks) if task == name]
            if compare(_some(self.tuned, own), _some(self.ordinary, own)).correct.sign < 0:
                yield name


def made(tokenizer: Any, mode: str, n: int, seed: int) -> tuple[list[Window], tuple[str, ...]]:
    """Windows of all tasks that can have the question in this place, and their tasks."""
    lines: list[dict[str, str]] = []
    for name in tasks(LENGTH):
        if mode != "second" or name != "passkey":  # it has nothing else to ask for
            lines += windows([name], mode, n, seed, LENGTH)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "windows.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        found = read_windows(tokenizer, file, limit=len(lines))
    return found, tuple(line["task"] for line in lines)


def cells(
    model: nn.Module, tokenizer: Any, mode: str, shares: Sequence[float], n: tuple[int, int], folder: Path, measure: Any
) -> Iterator[Cell]:
    """Tune for one place of the question, and compare at each share.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        mode: The place of the question.
        shares: Shares of the full cache's bytes.
        n: Prompts per task to tune on, and held out.
        folder: Where the tuning is kept, so that an interrupted run continues.
        measure: What a distortion is; see `kvpolicy.tuning.tune`.
    """
    known, _ = made(tokenizer, mode, n[0], TUNED_ON)
    others, names = made(tokenizer, mode, n[1], HELD_OUT)
    file = folder / f"{mode}-{measure}-{n[0]}.json"
    if not file.exists():
        tune(model, known, file, measure=measure)
    before = reference_logits(model, known)
    behind = reference_logits(model, others)
    for share in shares:
        rival = best_rival(model, known, share, reference=before).spec
        tuned = score(model, others, f"tuned:file={file}@{share}", reference=behind)
        yield Cell(mode, share, rival, tuned, score(model, others, rival, share=share, reference=behind), names)


def line(cell: Cell) -> list[str]:
    """The row of a cell."""
    found = cell.comparison
    means = [f"{float(one.correct.mean()):.2f}" for one in (cell.tuned, cell.ordinary)]
    kls = [f"{float(one.kl.mean()):.4f}" for one in (cell.tuned, cell.ordinary)]
    worse = ", ".join(cell.worse()) or "none"
    rival = f"`{cell.rival}`"
    differences = _interval(found.correct, 2), _interval(found.kl, 4)
    return [f"{cell.share:.0%}", cell.mode, rival, *means, differences[0], *kls, differences[1], worse]


COLUMNS = (
    "bytes",
    "question",
    "best ordinary policy",
    "answered, tuned",
    "ordinary",
    "difference",
    "KL, tuned",
    "ordinary",
    "difference",
    "tasks where it answers less",
)


def note(found: Sequence[Cell], n: tuple[int, int]) -> str:
    """How the cells were measured, and their mean difference at each share."""
    gains = {share: [cell.comparison.correct.mean for cell in found if cell.share == share] for share in SHARES}
    means = ", ".join(f"{sum(some) / len(some):+.3f} at {share:.0%}" for share, some in gains.items() if some)
    return (
        f"Six tasks of about {LENGTH} tokens (five for a second question): {n[0]} prompts of each for tuning, {n[1]} "
        f"others for the comparison. The ordinary policy is the best of {len(rivals())} at the same bytes on the "
        "tuning prompts. Differences have 95 % intervals by the bootstrap over prompts; a task is named if the "
        "interval of its own difference is below zero. "
        f"Mean difference of answers: {means}. torch {torch.__version__}, fp32, greedy."
    )


def _interval(difference: Difference, digits: int) -> str:
    return f"{difference.mean:+.{digits}f} ({difference.low:+.{digits}f} to {difference.high:+.{digits}f})"


def _some(found: Score, numbers: Sequence[int]) -> Score:
    return Score(*(values[list(numbers)] for values in found[:3]), nbytes=found.nbytes)


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """The table."""
    args.cache.mkdir(parents=True, exist_ok=True)
    model, tokenizer = kvpolicy.tiny(torch.float32)
    found: list[Cell] = []
    for mode in args.modes:
        for cell in cells(model, tokenizer, mode, args.shares, tuple(args.n), args.cache, args.measure):
            found.append(cell)
            collect([line(cell)])
    found.sort(key=lambda cell: cell.share)
    yield Section("tuned", [Grid(COLUMNS, map(line, found))], note(found, tuple(args.n)))


TABLE = Table(
    measure=measure,
    places={"tuned": ["docs/guide/tuning.md"]},
    options=[
        Option("--modes", nargs="+", choices=MODES, default=[*MODES], help="places of the question"),
        byte_shares(SHARES),
        Option("--n", nargs=2, type=int, default=[3, 6], help="prompts per task to tune on, and held out"),
        Option("--measure", default="joint", help="what a distortion is; joint by default"),
        results_folder(Path("results")),
    ],
    needs="the embedded model",
)
