"""Decode steps of `generate`, uncompiled and compiled, beside the stock cache.

The stock side is the dynamic cache uncompiled, and the static cache compiled, as transformers compiles it. All four run
in turn in each round, with the same prompt; a ratio is the median over rounds of the medians of steps. The first step
waits for the compilation: its seconds are a column of their own. Generated code of an earlier line is found on the
disk.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kvpolicy
from kvpolicy.cli.measurement import Times, generation_times, static_times
from kvpolicy_eval.bench.models import llama, tokens
from kvpolicy_eval.common.table import Grid, Option, Section, Table, collect, threads, torch_note

LIMIT = 1.0
"""Goal: our compiled step over that of the static cache, compiled."""
MODELS = ("tiny-4k", "hidden 512")
POLICIES = ("snapkv+tokenwise:bits=4@0.2", "snapkv@0.2")
LENGTHS = (1024, 4096, 16384)
LAYERS = 4
COLUMNS = [
    "model",
    "policy",
    "prompt",
    "stock",
    "static, compiled",
    "eager",
    "compiled",
    "eager over stock",
    "compiled over static",
    "first step",
    "verdict",
]


class Round(NamedTuple):
    """Seconds of a step, each side in turn.

    Attributes:
        stock: Of the dynamic cache.
        static: Of the static cache, compiled.
        eager: Under the policy.
        compiled: Under the policy, compiled.
        first: The first step of `compiled`.
    """

    stock: float
    static: float
    eager: float
    compiled: float
    first: float


def under(model: Any, policy: str, ids: Tensor, steps: int, *, compiled: bool) -> tuple[Times, float]:
    """Generate under a policy, see `generation_times`."""
    with kvpolicy.attach(model, policy, compile=compiled):
        return generation_times(model, ids, steps)


def compare(model: Any, policy: str, ids: Tensor, steps: int, rounds: int) -> list[Round]:
    """The rounds of a policy; the first one compiles.

    What is known of other lengths is forgotten: graphs, which are slower for the second length, and the length of the
    last static cache, which transformers gives to later ones.
    """
    torch.compiler.reset()
    for name in ("_cache", "_previous_max_cache_length"):
        vars(model).pop(name, None)
    found: list[Round] = []
    for _ in range(rounds + 1):
        stock, _ = generation_times(model, ids, steps)
        static = static_times(model, ids, steps)
        eager, _ = under(model, policy, ids, steps, compiled=False)
        compiled, first = under(model, policy, ids, steps, compiled=True)
        found.append(Round(stock.step, static.step, eager.step, compiled.step, first))
    return found


def line(name: str, policy: str, prompt: int, rounds: list[Round]) -> list[str]:
    """A row of the table from the result of `compare`."""
    warm_up, *measured = rounds
    sides = [statistics.median(side) for side in zip(*measured, strict=True)][:4]
    eager = statistics.median(one.eager / one.stock for one in measured)
    compiled = statistics.median(one.compiled / one.static for one in measured)
    return [
        name,
        f"`{policy}`",
        f"{prompt:,}",
        *(f"{1000 * seconds:.2f} ms" for seconds in sides),
        f"{eager:.2f}x",
        f"{compiled:.2f}x",
        f"{warm_up.first:.1f} s",
        "pass" if compiled <= LIMIT else "miss",
    ]


def load(name: str) -> Any:
    """A model of the benchmark by its name."""
    return kvpolicy.tiny(name="tiny-4k")[0] if name == "tiny-4k" else llama(LAYERS)


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """The table."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of texts beyond the trained positions, whose answers do not count here
        rows = collect(_lines(args))
    note = (
        f"{args.steps} steps, {args.rounds} rounds; hidden 512 has {LAYERS} layers of random weights in "
        f"fp32. First step: of the compiled policy, with the compilation, or 0 s where the graph was there. Goal: "
        f"compiled over static <= {LIMIT:g}x. {torch_note()}"
    )
    yield Section("generate", [Grid(COLUMNS, rows)], note)


def _lines(args: argparse.Namespace) -> Iterator[list[str]]:
    for name in args.models:
        model = load(name)
        for policy in args.policies:
            for length in args.lengths:
                times = compare(model, policy, tokens(length) % 700, args.steps, args.rounds)
                yield line(name, policy, length, times)


TABLE = Table(
    measure=measure,
    places={"generate": ["docs/benchmarks.md"]},
    options=[
        Option("--models", nargs="+", default=list(MODELS), choices=MODELS, help="models"),
        Option("--policies", nargs="+", default=list(POLICIES), help="specs of policies"),
        Option("--lengths", nargs="+", type=int, default=list(LENGTHS), help="tokens of a prompt"),
        Option("--steps", type=int, default=32, help="decode steps that count"),
        Option("--rounds", type=int, default=5, help="rounds"),
        threads(1),
    ],
    needs="a C++ compiler",
)
