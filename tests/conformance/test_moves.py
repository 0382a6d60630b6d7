"""How tokens move between the exact part and stages, with codecs that were made for it."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Literal

import pytest
import torch

from kvpolicy import Policy, Uniform
from tests.conformance.bench import Bench, draw, padding
from tests.conformance.fakes import Fake, Roll, apply, undo
from tests.conformance.policies import SELECTORS, WHOLE_HEADS, words
from tests.conformance.replay import Twin, Verdict
from tests.sampling import pairwise, product

ORDERS: list[Literal["age", "priority"]] = ["age", "priority"]
PINNED: list[Literal["none", "first", "massive", "newest"]] = ["none", "first", "massive", "newest"]
CAPS = {"one": (), "two": (8,), "small": (4,), "three": (4, 4)}
PINS = {"none": ("none", 0), "first": ("first", 2), "massive": ("massive", 3), "newest": ("newest", 3)}
AXES: dict[str, list[str]] = {
    "caps": [*CAPS],
    "group_size": ["1", "4"],
    "order": ["age", "priority"],
    "pins": [*PINS],
    "residual": ["0", "3"],
    "recode": ["flush", "recode"],
    "key_space": ["rotated", "unrotated"],
    "decode": ["evict", "grow"],
    "selector": SELECTORS,
}


def fake(caps: str, group_size: str, order: str, pins: str, residual: str, recode: str, key_space: str) -> Fake:
    return Fake(
        caps=CAPS[caps],
        group_size=int(group_size),
        residual=int(residual),
        demote_by=order,  # pyright: ignore[reportArgumentType]
        pins=PINS[pins][0],  # pyright: ignore[reportArgumentType]
        pinned=PINS[pins][1],
        recode_all=recode == "recode" and order == "priority",
        key_space=key_space,  # pyright: ignore[reportArgumentType]
        query_absmax=key_space == "rotated",
    )


def bench_of(codec: Fake, selector: str, decode: str, budgets: list[int], new: int, layer_idx: int = 0) -> Bench:
    """A bench of a codec; where generated tokens are to be kept, so is all that does not compete."""
    if codec.demote_by == "priority" and selector in WHOLE_HEADS:
        selector = "h2o"
    chosen = Policy.parse(words(selector)).selector
    base = getattr(chosen, "base", None)
    if base is None:
        chosen = dataclasses.replace(chosen, decode=decode)  # pyright: ignore[reportArgumentType]
    else:
        chosen = dataclasses.replace(chosen, base=dataclasses.replace(base, decode=decode))  # pyright: ignore
    policy = Policy(allocator=Uniform(), selector=chosen, codec=codec, budget=0.5)
    twin = Twin(codec.slow(), lambda layer: (undo, apply))
    rope = Roll() if policy.undoes_rotation else None
    budgets = [max(budget, chosen.min_tokens) for budget in budgets]
    return Bench(policy, budgets, new=new, layer_idx=layer_idx, rope=rope, twin=twin)


def converse(bench: Bench, seed: int, sizes: list[int], first: torch.Tensor | None) -> Verdict:
    for number, size in enumerate(sizes):
        q, k, v = draw(size, 1000 * seed + number, batch=len(bench.budgets))
        bench.forward(q, k, v, first if number == 0 else None)
    return bench.check()


*TRAITS, _ = AXES.values()
TURNED = [(*row, SELECTORS[number % len(SELECTORS)]) for number, row in enumerate(pairwise(*TRAITS))]
"""Every pair of traits, each with the next selector."""


@pytest.mark.parametrize([*AXES], TURNED)
def test_traits(
    caps: str,
    group_size: str,
    order: str,
    pins: str,
    residual: str,
    recode: str,
    key_space: str,
    decode: str,
    selector: str,
) -> None:
    """A padded prompt, many steps, continuations and steps."""
    codec = fake(caps, group_size, order, pins, residual, recode, key_space)
    sizes = [30, *[1] * 14, 9, *[1] * 6, 2, 1, 1, 1]
    bench = bench_of(codec, selector, decode, [22, 15, 9, 5], sum(sizes))
    done = converse(bench, 0, sizes, padding(30, 30, 17, 12, 6))
    assert done.turns >= 3 * len(sizes)


def draw_fake(dice: Random) -> Fake:
    """A codec of any traits."""
    group_size = dice.choice([1, 1, 2, 4])
    pins = dice.choice(PINNED)
    caps = tuple(group_size * dice.randint(1, 4) for _ in range(dice.randint(0, 2)))
    order = dice.choice(ORDERS)
    return Fake(
        caps=caps,
        block=group_size * dice.randint(1, 3),
        group_size=group_size,
        residual=dice.choice([0, 0, 1, 5]),
        key_space=dice.choice(["rotated", "unrotated"]),
        demote_by=order,
        pins=pins,
        pinned=0 if pins == "none" else dice.randint(1, 4),
        recode_all=dice.random() < 0.25 and order == "priority",
        query_absmax=dice.random() < 0.3,
    )


def random_conversation(seed: int) -> None:
    """Any codec, any selector, rows that are padded anywhere and budgets that rise."""
    dice = Random(seed)
    codec = draw_fake(dice)
    selector = dice.choice(SELECTORS)
    sizes = [dice.randint(2, 40), *(dice.choice([1, 1, 1, 1, dice.randint(2, 14)]) for _ in range(dice.randint(5, 30)))]
    budgets = [dice.randint(1, 26) for _ in range(dice.randint(1, 3))]
    bench = bench_of(codec, selector, dice.choice(["evict", "evict", "grow"]), budgets, sum(sizes), dice.randint(0, 2))
    for number, size in enumerate(sizes):
        valid = torch.ones(len(budgets), size, dtype=torch.bool)
        if number == 0 or dice.random() < 0.3:
            for row in range(len(budgets)):
                valid[row, : dice.randint(0, size - (number == 0))] = False
        if size > 1 and dice.random() < 0.5:
            bench.budgets = [b + dice.randint(0, 5) * bool(valid[r].any()) for r, b in enumerate(bench.budgets)]
        bench.forward(*draw(size, 1000 * seed + number, batch=len(budgets)), None if bool(valid.all()) else valid)
    bench.check()


@product("caps,pins,key_space", ["one", "two"], [*PINS], ["rotated", "unrotated"])
def test_rows_that_begin_later(caps: str, pins: str, key_space: str) -> None:
    """A chunk that is all padding for a row settles none of its pins; rows that began keep theirs."""
    sizes = [10, 10, 10, *[1] * 8, 6, *[1] * 6]
    start = [0, 3, 14, 26]
    bench = bench_of(fake(caps, "4", "age", pins, "3", "flush", key_space), "h2o", "evict", [22, 22, 18, 22], 0)
    valid = torch.arange(sum(sizes)) >= torch.tensor(start)[:, None]
    for number, columns in enumerate(torch.arange(sum(sizes)).split(sizes)):
        own = valid[:, columns]
        bench.forward(*draw(len(columns), number, batch=len(start)), None if bool(own.all()) else own)
    assert bench.check().turns == 4 * len(sizes) - 1 - 2


@product("seed", range(60), sample=[(seed,) for seed in range(12)])
def test_some(seed: int) -> None:
    random_conversation(seed)


@product("seed", range(60, 3000), sample=[])
def test_many(seed: int) -> None:
    random_conversation(seed)
