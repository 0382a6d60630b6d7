"""Bounds of layers that were measured, whatever the others will measure: every division to come lies within them."""

from __future__ import annotations

import math
import random
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kvpolicy.allocators.skipped import SkippedLayers
from kvpolicy.protocols import Allocator, BoundsBudgets
from kvpolicy.registry import names
from kvpolicy.text.grammar import parse

WINDOW = 4
QUERIES = 6  # heads
SPECS = [
    "squeeze",
    "squeeze:keep_share=0.05",
    "squeeze:groups=2",
    "squeeze:groups=5",
    f"cake:window={WINDOW}",
    f"cake:window={WINDOW}:entropy=0.3:variance=2",
    f"zigzag:window={WINDOW}",
    f"zigzag:window={WINDOW}:bound=0.9",
    f"zigzag:window={WINDOW}:bound=0",
    "mass",
    "lava",
    "d2olayers",
    "simlayer:recent=8",
    "simlayer:recent=60:sinks=0",
]
SKIPPING = ["squeeze:skip=1-1", "zigzag:skip=0-1", "lava:skip=1-0", "uniform:skip=2-1"]
"""The last has no bounds but those of the skipped layers."""


def allocator_of(spec: str) -> Any:
    return parse(spec)[0]["allocator"]


def drawn_metrics(rng: random.Random, spec: str, layers: int, tokens: int) -> Tensor:
    """Metrics that the allocator may measure: alike, far apart, and at the ends of their range."""
    name = spec.partition(":")[0]
    if name == "cake":
        most_entropy = math.log(QUERIES * WINDOW * math.log(tokens))
        most_variance = math.log(QUERIES * WINDOW / (WINDOW - 1))
        low = math.log(1e-6) + math.log(1e-12)
        high = most_entropy + most_variance
        if "entropy" in spec:
            low = math.log(1e-6) / 0.3 + math.log(1e-12) / 2
            high = most_entropy / 0.3 + most_variance / 2
    else:
        low, high = {"zigzag": (1, tokens), "mass": (1, tokens), "squeeze": (-1, 1)}.get(name, (0, 1))
    center = rng.uniform(low, high)
    kinds = {
        "even": lambda: center,
        "near": lambda: min(max(center + rng.gauss(0, 0.01) * (high - low), low), high),
        "wide": lambda: rng.uniform(low, high),
        "ends": lambda: rng.choice((low, high)),
        "one": lambda: low,
    }
    kind = rng.choice(list(kinds))
    metrics = [kinds[kind]() for _ in range(layers)]
    if kind == "one":
        metrics[rng.randrange(layers)] = high
    return torch.tensor([metrics], dtype=torch.float32)


@pytest.mark.parametrize("spec", [*SPECS, *SKIPPING])
def test_division_to_come_is_within_every_bound(spec: str) -> None:
    """At the floor, at the ceiling and between; the guarantees hold too."""
    rng = random.Random(spec)
    allocator = cast("Allocator", allocator_of(spec))
    assert isinstance(allocator, BoundsBudgets)
    skipped = allocator.first + allocator.last if isinstance(allocator, SkippedLayers) else 0
    tight = 0
    for _ in range(150):
        layers = rng.choice([number for number in (1, 2, 3, 5, 9, 32) if number > skipped])
        tokens = rng.choice((2, 40, 1000))
        floor = rng.choice((1, 1, min(5, tokens)))
        even = rng.choice((floor, tokens, tokens + 3, rng.randint(floor, tokens)))
        least = skipped * tokens + floor * (layers - skipped)
        total = torch.tensor([max(even * layers + rng.randrange(layers), least)])
        ceiling = torch.tensor([tokens])
        metrics = drawn_metrics(rng, spec, layers, tokens)
        final = allocator.budgets(metrics, total, floor, ceiling, layers)
        guarantee = allocator.guarantee(total, floor, ceiling, layers)
        assert (final >= guarantee.least[:, None]).all()
        # The first layers, where least is known, some that are drawn, and all.
        for seen in sorted({1, min(2, layers), rng.randint(1, layers), rng.randint(1, layers), layers}):
            bounds = allocator.bounds(metrics[:, :seen], total, floor, ceiling, layers, QUERIES)
            note = f"{layers} layers, {seen} seen, {total.tolist()} of {tokens}, floor {floor}: {metrics.tolist()}"
            assert (bounds.least <= final[:, :seen]).all(), note
            assert (final[:, :seen] <= bounds.most).all(), note
            assert (bounds.least >= guarantee.least[:, None]).all(), note
            assert bounds.most.sum() <= guarantee.together, note
            tight += seen == layers and bool((bounds.most < torch.maximum(ceiling, total)).any())
    assert tight > 15 or spec == SKIPPING[-1], "the bounds say nothing"


def test_every_allocator_of_one_number_has_bounds() -> None:
    """Those whose metric is a curve, or many numbers of a layer, do not."""
    have = {name for name in names("allocator") if isinstance(parse(name)[0]["allocator"], BoundsBudgets)}
    assert have == {spec.partition(":")[0] for spec in SPECS}


def test_bounds_of_a_row_do_not_depend_on_the_others() -> None:
    for spec in SPECS:
        allocator = allocator_of(spec)
        rng = random.Random(spec)
        metrics = torch.cat([drawn_metrics(rng, spec, 4, 50) for _ in range(3)])
        total = torch.tensor([60, 150, 40])
        ceiling = torch.tensor([50, 45, 50])
        together = allocator.bounds(metrics, total, 2, ceiling, 9, QUERIES)
        for row in range(3):
            one = slice(row, row + 1)
            alone = allocator.bounds(metrics[one], total[one], 2, ceiling[one], 9, QUERIES)
            assert together.least[one].equal(alone.least) and together.most[one].equal(alone.most), spec
