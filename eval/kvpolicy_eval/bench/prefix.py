"""Rows that share the slots of a text, over as many copies of it.

Each row has a question behind the text and generates an answer. Both sides keep the same tokens. What was expected was
written down before anything was measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import torch

import kvpolicy
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy.text.tables import format_bytes
from kvpolicy_eval.bench.decode import STEPS, filled, steps
from kvpolicy_eval.bench.models import llama
from kvpolicy_eval.bench.timing import Ratio, compare, verdict_of
from kvpolicy_eval.common.table import Grid, Option, Section, Table, collect, rounds, threads, torch_note

LAYERS = 2
HEADS = 8
WIDTH = 512
PREFIX = 4096
ROWS = 16
QUESTION = 32

BYTES_BAR = 0.15
TIME_BAR = 0.5
COLUMNS = [
    "policy",
    "copies",
    "shared",
    "bytes, expected",
    "bytes",
    "target",
    "step of copies, ms",
    "step, ms",
    "time, expected",
    "time, median (quartiles)",
    "target",
]


class Expected(NamedTuple):
    """Expectations, as fractions of what copies take.

    Attributes:
        nbytes: Of the bytes of the cache: those of one text and of the rows' own slots, which are not encoded.
        seconds: Of the time of a step: the text is read once, and the weights as before.
    """

    nbytes: float
    seconds: float


POLICIES = {
    "full": Expected(0.08, 0.15),
    "snapkv:decode=grow@0.25": Expected(0.12, 0.35),
    "full+kivi:bits=4": Expected(0.13, 0.15),
    "snapkv:decode=grow+kivi:bits=4@0.25": Expected(0.3, 0.3),
}


class Measured(NamedTuple):
    """Rows that share a text, over copies.

    Attributes:
        policy: The policy of the text.
        copies: Bytes of the cache of copies.
        shared: Bytes of the cache whose rows share the text.
        ratio: The time of a step.
    """

    policy: str
    copies: int
    shared: int
    ratio: Ratio


def measure_caches(policy: str, prefix: int, rows: int, rounds: int) -> Measured:
    """Measure the bytes and the eager steps of both caches, after the question."""
    model = llama(LAYERS, WIDTH, HEADS)
    dice = torch.Generator().manual_seed(1)
    question = torch.randint(1, 1024, (rows, QUESTION), generator=dice)
    token = torch.randint(1, 1024, (rows, 1), generator=dice)
    with torch.inference_mode(), kvpolicy.attach(model, policy):
        text = filled(model, prefix)
        copies = text.fork([0] * rows)
        copies.hold_next()
        shared = text.fork([0] * rows, shared=True)
        for cache in (copies, shared):
            cache.expect(prefix + QUESTION, STEPS * (rounds + 1))
            model(question, **cache_argument(model, cache))
        ratio = compare(lambda: steps(model, token, copies), lambda: steps(model, token, shared), rounds)
        seconds = ratio._replace(base=ratio.base / STEPS, ours=ratio.ours / STEPS)
        return Measured(policy, copies.nbytes, shared.nbytes, seconds)


def lines(prefix: int, rows: int, rounds: int) -> Iterator[list[str]]:
    """The rows of the table."""
    for policy, expected in POLICIES.items():
        _, copies, shared, ratio = measure_caches(policy, prefix, rows, rounds)
        part = shared / copies
        yield [
            f"`{policy}`",
            format_bytes(copies),
            format_bytes(shared),
            f"{expected.nbytes:.2f}x",
            f"{part:.3f}x",
            f"<= {BYTES_BAR}x: {verdict_of(part, BYTES_BAR)}",
            f"{1000 * ratio.base:.2f}",
            f"{1000 * ratio.ours:.2f}",
            f"{expected.seconds:.2f}x",
            str(ratio),
            f"<= {TIME_BAR}x: {verdict_of(ratio.median, TIME_BAR)}",
        ]


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """The table."""
    prefix, repeats = (256, 2) if args.quick else (args.prefix, args.rounds)
    rows = collect(lines(prefix, args.rows, repeats))
    note = (
        f"A Llama of {LAYERS} layers, hidden size {WIDTH}, {HEADS} KV heads, fp32, eager: {args.rows} rows after "
        f"{prefix:,} tokens, each with a question of {QUESTION}; {torch_note()}."
    )
    yield Section("prefix", [Grid(COLUMNS, rows)], note)


TABLE = Table(
    measure=measure,
    places={"prefix": ["docs/benchmarks.md"]},
    options=[
        Option("--prefix", type=int, default=PREFIX, help="tokens of the text"),
        Option("--rows", type=int, default=ROWS, help="rows of the batch"),
        rounds(7),
        Option("--quick", action="store_true", help="a short text and few rounds, to see that it runs"),
        threads(),
    ],
)
