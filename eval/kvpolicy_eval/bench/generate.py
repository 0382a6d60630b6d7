"""Decode steps of `generate`, uncompiled and compiled, beside the stock cache.

The stock side is the dynamic cache uncompiled, and the static cache compiled, as transformers compiles it. All four run
in turn in each round, with the same prompt; a ratio is the median over rounds of the medians of steps. The first step
of a process waits for the compilation: its seconds are a column of their own.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import CompileConfig

import kvpolicy
from kvpolicy.cli.generation import TimedStreamer
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


class Times(NamedTuple):
    """A call of `generate`.

    Attributes:
        first: Seconds of the first step.
        step: Median seconds of the others.
    """

    first: float
    step: float


def generate(model: Any, ids: Tensor, new: int, **how: Any) -> Times:
    """Generate `new` tokens greedily, and time the steps.

    Args:
        model: The model, with a policy attached or without.
        ids: The prompt, [1, P].
        new: Tokens to generate, at least 3.
        **how: Further arguments of `generate`.
    """
    timed = TimedStreamer()
    ended: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    model.generate(ids, attention_mask=torch.ones_like(ids), streamer=timed, **ended, **how)
    first, *steps = [after - before for before, after in itertools.pairwise(timed.times)]
    return Times(first, statistics.median(steps))


def static(model: Any, ids: Tensor, new: int) -> Times:
    """Generate on the static cache, compiled on any device."""
    config = CompileConfig()
    config._compile_all_devices = True  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
    return generate(model, ids, new, cache_implementation="static", compile_config=config)


def under(model: Any, policy: str, ids: Tensor, new: int, *, compiled: bool) -> Times:
    """Generate under a policy."""
    with kvpolicy.attach(model, policy, compile=compiled):
        return generate(model, ids, new)


def compare(model: Any, policy: str, ids: Tensor, new: int, rounds: int) -> list[list[Times]]:
    """Times of the dynamic cache, the static one, and of the policy uncompiled and compiled, by round.

    The first round compiles.
    """
    return [
        [
            generate(model, ids, new),
            static(model, ids, new),
            under(model, policy, ids, new, compiled=False),
            under(model, policy, ids, new, compiled=True),
        ]
        for _ in range(rounds + 1)
    ]


def line(name: str, policy: str, prompt: int, times: list[list[Times]]) -> list[str]:
    """A row of the table from the result of `compare`."""
    warm_up, *measured = times
    sides = [statistics.median(side.step for side in each) for each in zip(*measured, strict=True)]
    eager = statistics.median(ours.step / stock.step for stock, _, ours, _ in measured)
    compiled = statistics.median(ours.step / stock.step for _, stock, _, ours in measured)
    return [
        name,
        f"`{policy}`",
        f"{prompt:,}",
        *(f"{1000 * seconds:.2f} ms" for seconds in sides),
        f"{eager:.2f}x",
        f"{compiled:.2f}x",
        f"{warm_up[3].first:.1f} s",
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
        f"Steps of {args.new} new tokens, {args.rounds} rounds; hidden 512 has {LAYERS} layers of random weights in "
        f"fp32. First step: of the compiled policy, with the compilation, or 0 s where the graph was there. Goal: "
        f"compiled over static <= {LIMIT:g}x. {torch_note()}"
    )
    yield Section("generate", [Grid(COLUMNS, rows)], note)


def _lines(args: argparse.Namespace) -> Iterator[list[str]]:
    for name in args.models:
        model = load(name)
        for policy in args.policies:
            for length in args.lengths:
                times = compare(model, policy, tokens(length) % 700, args.new, args.rounds)
                yield line(name, policy, length, times)


TABLE = Table(
    measure=measure,
    places={"generate": []},
    options=[
        Option("--models", nargs="+", default=list(MODELS), choices=MODELS, help="models"),
        Option("--policies", nargs="+", default=list(POLICIES), help="specs of policies"),
        Option("--lengths", nargs="+", type=int, default=list(LENGTHS), help="tokens of a prompt"),
        Option("--new", type=int, default=32, help="new tokens, at least 3"),
        Option("--rounds", type=int, default=5, help="rounds"),
        threads(1),
    ],
    needs="a C++ compiler",
)
