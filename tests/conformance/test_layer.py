"""Inputs that break caches, for every selector and codec, against the reference."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import Policy
from kvpolicy.registry import name_of
from tests.conformance.bench import Bench, draw, padding
from tests.conformance.policies import CODECS, RANKED, SELECTORS, is_refused, parameters, spec_of, words
from tests.sampling import Row, product

GROWING = [f"{spec_of(name)}:decode=grow" for name in SELECTORS if "decode" in parameters(name)]
EVERYTHING = "full"
"""Keeps all tokens; a selector that ranks them takes its place where the codec needs a ranking."""

WHO = [*SELECTORS, *GROWING, EVERYTHING]
HEADS = [(1, 1), (1, 4), (3, 1)]
SMALLEST = [1, 2, 3]
SIDES = ["left", "right"]
SCENARIOS = [
    "long run",
    "heads",
    "length one",
    "smallest budgets",
    "budget above the prompt",
    "padding",
    "padding in a continuation",
    "budget that rises",
    "ties",
    "constant tokens",
]
"""The tests of this file."""


def used(selector: str, codec: str) -> bool:
    """Whether a test runs a method: those that grow differ in what they drop, which most codecs have no part in."""
    if is_refused(selector, codec):
        return False
    return selector not in GROWING or codec == "kivi" or (selector == "h2o:decode=grow" and codec != "plain")


def method_of(selector: str, codec: str) -> str:
    if selector != EVERYTHING:
        return words(selector, codec)
    return words("snapkv" if codec in RANKED else "full", codec, budget="1.0")


def keeps_all(method: str) -> bool:
    return method.endswith("@1.0")


def dealt(title: str) -> list[Row]:
    """Each selector with the next codec, another one in each scenario; each codec; a third of those that grow."""
    scenario = SCENARIOS.index(title)
    rows: list[Row] = []
    for number, selector in enumerate([*SELECTORS, EVERYTHING], start=scenario):
        turn = number % len(CODECS)
        codecs = [*CODECS[turn:], *CODECS[:turn]]
        rows += [(selector, codec) for codec in codecs if used(selector, codec)][:1]
    for codec in sorted({*CODECS} - {codec for _, codec in rows}):
        rows += [(selector, codec) for selector in SELECTORS if used(selector, codec)][:1]
    return rows + [(growing, "kivi") for growing in GROWING[scenario % 3 :: 3] if used(growing, "kivi")]


def every_method(title: str, *more: tuple[str, Sequence[Any]]) -> pytest.MarkDecorator:
    """Parametrize a scenario by the methods, and by its other argument, whose values they take in turn."""
    methods = [method_of(*row) for row in itertools.product(WHO, CODECS) if used(*row)]
    chosen = [method_of(*row) for row in dealt(title)]
    sample = [(method, *(axis[number % len(axis)] for _, axis in more)) for number, method in enumerate(chosen)]
    return product(["method", *(name for name, _ in more)], methods, *(axis for _, axis in more), sample=sample)


def whole_run(method: str, sizes: list[int], budgets: list[int], valid: Tensor | None = None, **shape: int) -> Bench:
    """A prompt, then steps and continuations, against the reference after each."""
    bench = Bench(method, [sum(sizes)] * len(budgets) if keeps_all(method) else budgets, new=sum(sizes[1:]))
    for number, size in enumerate(sizes):
        bench.forward(*draw(size, 17 + number, batch=len(budgets), **shape), valid if number == 0 else None)
    bench.check()
    return bench


@every_method("long run")
def test_long_run(method: str) -> None:
    """Far more steps than slots, so that every slot is overwritten many times; the budget is used, and holds."""
    bench = whole_run(method, [30] + [1] * 40 + [7] + [1] * 9, [12])
    if not keeps_all(method) and Policy.parse(method).decode == "evict":
        assert all(len({*head}) == len(head) == 12 for turn in bench.turns for head in turn.kept[0])


@every_method("heads", ("shape", HEADS))
def test_heads(method: str, shape: tuple[int, int]) -> None:
    heads, group = shape
    whole_run(method, [24, 1, 1, 1, 6, 1], [11, 7], padding(24, 24, 15), heads=heads, group=group)


@every_method("length one")
def test_length_one(method: str) -> None:
    """A prompt of one token, which then grows beyond the budget."""
    whole_run(method, [1] + [1] * 12 + [5, 1, 1], [6])


@every_method("smallest budgets", ("budget", SMALLEST))
def test_smallest_budgets(method: str, budget: int) -> None:
    whole_run(method, [9, 1, 1, 4, 1, 1], [max(budget, 3) if "streaming" in method else budget])


@every_method("budget above the prompt")
def test_budget_above_the_prompt(method: str) -> None:
    """Slots stay empty after the prompt; nothing is dropped until they are full."""
    bench = whole_run(method, [6] + [1] * 10, [12])
    assert bench.turns[5].kept[0][0] == list(range(11))


@every_method("padding", ("side", SIDES))
def test_padding(method: str, side: str) -> None:
    """Rows of very different lengths, one of a single token, padded on either side."""
    whole_run(method, [20, 1, 1, 1, 1, 1, 8, 1, 1], [10, 7, 5, 4], padding(20, 20, 12, 6, 1, right=side == "right"))


@every_method("padding in a continuation")
def test_padding_in_a_continuation(method: str) -> None:
    """New turns of different lengths, padded in the middle of the whole mask."""
    bench = Bench(method, [99, 99, 99] if keeps_all(method) else [10, 8, 6], new=40)
    some = [(16, (16, 9, 4)), (1, (1, 1, 1)), (7, (2, 7, 0)), (1, (1, 1, 1)), (1, (0, 1, 1)), (1, (1, 0, 1))]
    for number, (size, lengths) in enumerate([*some, (1, (1, 1, 1))]):
        bench.forward(*draw(size, number, batch=3), padding(size, *lengths))
    bench.check()


@every_method("budget that rises")
def test_budget_that_rises(method: str) -> None:
    """A continuation may come with a larger share: slots are added, and what is held stays."""
    bench = Bench(method, [99] if keeps_all(method) else [9], new=30)
    for number, (size, budget) in enumerate([(20, 9), (1, 9), (1, 9), (9, 14), (1, 14), (1, 14), (12, 23), (1, 23)]):
        bench.budgets = [99] if keeps_all(method) else [budget]
        bench.forward(*draw(size, number))
    bench.check()


@every_method("ties")
def test_ties(method: str) -> None:
    """Queries of zeros: every token is looked at alike, and position decides."""
    bench = Bench(method, [99] * 2 if keeps_all(method) else [8, 8], new=20)
    for number, size in enumerate([16, 1, 1, 1, 8, 1]):
        q, k, v = draw(size, number, batch=2)
        bench.forward(torch.zeros_like(q), k, v, padding(16, 16, 11) if number == 0 else None)
    bench.check()


@every_method("constant tokens")
def test_duplicate_and_constant_tokens(method: str) -> None:
    """All keys and values equal: groups of no spread, and nothing to tell tokens apart.

    Codecs that mix channels, or divide them by rounded numbers, or round directions, know a constant vector as well as
    another; `lowrank` only what lies along its directions.
    """
    limits = {"rotate": 0.2, "oscar": 0.2, "kvarn": 1e-3, "zipcache": 1e-3, "minicache": 1e-3, "lowrank": 1.0}
    close = limits.get(name_of(type(Policy.parse(method).codec)), 1e-6)
    bench = Bench(method, [99] if keeps_all(method) else [9], new=20)
    for number, size in enumerate([14, 1, 1, 1, 1, 1, 6, 1]):
        q, k, v = draw(size, number)
        out = bench.forward(q, torch.ones_like(k), torch.full_like(v, 0.5))
        assert torch.allclose(out, torch.full_like(out, 0.5), atol=close)
    # scores that fp64 and fp32 round apart cannot be compared; what counts is that nothing is lost or not finite
    assert all(len(head) == len(bench.turns[-1].kept[0][0]) for head in bench.turns[-1].kept[0])
