"""Readers at equal bytes that a step moves, and at equal tokens.

A reader gets as many tokens to read as fit into a fraction of the bytes that a step of the full cache reads, its index
counted. One whose index alone takes more has no answers. At equal tokens, what it predicts of held-out text is compared
with what the full cache predicts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import torch

import kvpolicy
from kvpolicy_eval.common.accuracy import mean
from kvpolicy_eval.common.heldout import FOLLOWING, ROWS, HeldOutText
from kvpolicy_eval.common.measure import Bench
from kvpolicy_eval.common.table import Grid, Section, Table, byte_shares, only, prompts, results_folder

READERS = [
    "exact",
    "quest:dense=0:page=16",
    "quest:dense=0",
    "labels:dense=0:channels=8",
    "labels:dense=0",
    "loki",
    "loki:channels=16",
    "sparq:channels=4",
    "sparq",
    "sparq:correct=false",
    "centroids:page=16",
    "centroids",
    "centroids:estimate=false",
    "retrieval:cluster=16",
    "retrieval",
    "retrieval:estimate=false",
]
"""Readers that choose in every layer, without what they read."""
SHARES = [0.6, 0.4, 0.3, 0.25, 0.2]
"""Fractions of the bytes that a step of the full cache reads."""
READS = [0.2, 0.1, 0.05]
"""Fractions of the slots."""
LENGTH = 512
"""Rough prompt length in tokens, of the tasks and of the plans."""


def read_for(reader: str, share: float) -> int:
    """The most tokens that a reader can read, so that a step moves at most a fraction of the full cache's bytes.

    Returns:
        0 if a step moves more whatever is read.

    Examples:
        >>> read_for("exact", 0.6), read_for("exact", 0.4)
        (44, 0)
    """
    allowed = share * kvpolicy.plan("tiny", "full", prompt=LENGTH).moved
    low = 0
    high = LENGTH
    while low + 1 < high:  # `low` fits, or is 0, and `high` does not
        tokens = (low + high) // 2
        if kvpolicy.plan("tiny", f"{reader}:read={tokens}", prompt=LENGTH).moved <= allowed:
            low = tokens
        else:
            high = tokens
    return low


def line(bench: Bench, reader: str, shares: Sequence[float]) -> list[str]:
    """The row of a reader: answers and tokens read at each fraction of the bytes."""
    cells = [f"`{reader}`"]
    for share in shares:
        tokens = read_for(reader, share)
        right = f"{mean(bench.result(f'{reader}:read={tokens}')['tasks']):.2f} ({tokens})" if tokens else ""
        cells.append(right)
    return cells


def divergences(text: HeldOutText, reader: str) -> list[str]:
    """The cells of held-out text."""
    return [f"{text.divergence(f'{reader}:read={read}'):.4f}" for read in READS]


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """The table of answers and of held-out text."""
    bench = Bench(args.n, torch.float32, args.cache)
    text = HeldOutText(*kvpolicy.tiny())
    columns = ["bytes read, of the full cache", *(f"{share:.0%}" for share in args.shares)]
    columns += [f"divergence, {read:.0%} read" for read in READS]
    rows = [[*line(bench, reader, args.shares), *divergences(text, reader)] for reader in args.only]
    note = (
        f"Fraction of correct answers, mean of six tasks, {bench.docs} prompts of about {LENGTH} tokens each; in "
        "brackets the tokens that each KV head reads. Divergence of the predictions from the full cache's in nats, "
        f"mean of {ROWS * (FOLLOWING - 1)} tokens. {str(bench.dtype).removeprefix('torch.')}."
    )
    yield Section("moved", [Grid(columns, rows)], note)


TABLE = Table(
    measure=measure,
    places={"moved": ["docs/model-card.md"]},
    options=[prompts(8), only("READER", READERS), byte_shares(SHARES), results_folder()],
    needs="the embedded model",
)
