"""Rule 2: fixed slots, overwritten in place, through many steps."""

from __future__ import annotations

import pytest
import torch

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy.engine.decode import assert_async
from kvpolicy.engine.selection import eviction_scores
from kvpolicy.protocols import View
from tests.conformance.access import addresses, kept_positions
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch
from tests.conformance.policies import CODECS, RANKED, SELECTORS, words
from tests.engine.parts import Ranking, Worth, generator, shuffled
from tests.sampling import each_once, product

PROMPT = 30
STEPS = [18, 90]
"""Enough that every codec writes several blocks; and so many that all slots were overwritten many times."""
GROWING = ["window:decode=grow", "h2o:decode=grow", "full"]
SINKS = ["streaming:sinks=4", "kvcrush/streaming:sinks=4"]


def run(policy: str, rows: list[int], steps: int, layers: int = 2) -> tuple[PolicyCache, list[list[int]]]:
    """A long conversation; returns the cache and where its buffers were after each step."""
    model = build("llama", layers=layers)
    ids, mask = make_batch(rows, [PROMPT] + [1] * steps)
    places: list[list[int]] = []
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model, new=steps)
        forward(model, ids, mask, 0, PROMPT, cache)
        for column in range(PROMPT, PROMPT + steps):
            places.append(addresses(cache))
            forward(model, ids, mask, column, column + 1, cache)
    return cache, [*places, addresses(cache)]


MANY = [(*row, STEPS[0]) for row in each_once(SELECTORS, CODECS)]


@product("selector,codec,steps", SELECTORS, CODECS, STEPS, sample=[*MANY, ("h2o", "kivi", STEPS[1])])
def test_nothing_is_allocated_again(selector: str, codec: str, steps: int) -> None:
    cache, places = run(words(selector, codec), [PROMPT, 21], steps)
    assert all(place == places[0] for place in places)
    for layer in cache.policy_layers:
        assert layer.length.tolist() == [PROMPT + steps, 21 + steps]
        ends = zip(kept_positions(layer), layer.budget.tolist(), layer.length.tolist(), strict=True)
        for row, budget, length in ends:
            assert all(len(head) == budget and head[-1] == length - 1 for head in row)


@product("selector,codec", GROWING, CODECS, sample=each_once(GROWING, ["plain", "kivi", "mikv", "csr"]))
def test_room_for_what_was_announced(selector: str, codec: str) -> None:
    """A growing cache, too, is allocated once where it knows how many tokens will come."""
    budget = "1.0" if selector == "full" else "0.5"
    ranking = "window" if selector == "full" and codec in RANKED else selector
    cache, places = run(words(ranking, codec, budget=budget), [PROMPT, 21], steps=18)
    assert all(place == places[0] for place in places)
    held = (cache.policy_layers[0].positions >= 0).sum(-1)[:, 0].tolist()
    assert held == ([48, 39] if selector == "full" else [33, 28])


SUNK = [(SINKS[0], "kivi", STEPS[1]), (SINKS[0], "tokenwise", STEPS[0]), (SINKS[1], "plain", STEPS[0])]


def test_slots_are_ascending_after_a_prompt() -> None:
    """Rule 7."""
    for selector in SELECTORS:
        cache, _ = run(words(selector), [PROMPT, 21], steps=0)
        for layer in cache.policy_layers:
            for row, budget in zip(layer.positions.tolist(), layer.budget.tolist(), strict=True):
                for head in row:
                    assert head[:budget] == sorted(head[:budget]) and min(head[:budget]) >= 0
                    assert set(head[budget:]) <= {-1}


# the functions of a step, head by head

ROWS = 3
HEADS = 2
SLOTS = 7


def slots(levels: int, seed: int) -> tuple[Worth, View]:
    """Slots in any order, some of them empty, with few different priorities."""
    positions = shuffled(SLOTS, rows=ROWS, heads=HEADS, most=30, seed=seed)
    positions = positions.where(torch.rand(positions.shape, generator=generator(seed)) < 0.7, -1)
    # A head without a token, and one that may have one.
    positions[0, 0] = -1
    positions[0, 1, 1:] = -1
    worth = torch.randint(levels, positions.shape, generator=generator(seed + 1)).float()
    length = torch.full((ROWS,), 31)
    budget = torch.full((ROWS,), SLOTS)
    return Worth(worth, positions.long()), View(positions, length, budget, 0)


@pytest.mark.parametrize(("levels", "seed"), [(1, 0), (2, 1), (2, 2), (40, 3), (40, 4)])
def test_the_token_of_lowest_priority_leaves_and_of_equals_the_latest(levels: int, seed: int) -> None:
    state, view = slots(levels, seed)
    victims = eviction_scores(Ranking(), state, view, ~view.valid).argmax(-1)  # pyright: ignore[reportArgumentType]
    for b in range(ROWS):
        for h in range(HEADS):
            held = [slot for slot in range(SLOTS) if view.positions[b, h, slot] >= 0]
            if held:
                worst = min(held, key=lambda slot: (float(state.worth[b, h, slot]), -int(view.positions[b, h, slot])))
                assert int(victims[b, h]) == worst


def test_an_endless_priority_is_evicted_only_if_all_are() -> None:
    positions = torch.tensor([[[3, 1, 2]]], dtype=torch.int32)
    view = View(positions, torch.tensor([4]), torch.tensor([3]), 0)
    for worth, slot in (
        ([torch.inf, torch.inf, 9.0], 2),
        ([torch.inf, torch.inf, torch.nan], 2),
        ([torch.nan, 1.0, torch.nan], 1),
        ([torch.inf] * 3, 0),
        ([-torch.inf, -torch.inf, 0.0], 0),
    ):
        state = Worth(torch.tensor([[worth]]), positions.long())
        assert int(eviction_scores(Ranking(), state, view, ~view.valid).argmax(-1)) == slot, worth  # pyright: ignore[reportArgumentType]


def test_a_condition_that_does_not_hold_is_told() -> None:
    assert_async(torch.tensor(True), "fine")
    with pytest.raises(RuntimeError, match="no slot is free"):
        assert_async(torch.tensor(False), "no slot is free")
