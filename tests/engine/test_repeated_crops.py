"""Crops behind crops, and of turns with announcements of their own."""

from __future__ import annotations

import pytest
import torch

import kvpolicy
from kvpolicy import PolicyCache
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch
from tests.engine.filled import attached, prompted

PROMPT = 12


@pytest.mark.parametrize("policy", ["full", "snapkv@64"])
def test_a_crop_behind_a_turn_that_was_cropped(policy: str) -> None:
    """What follows a shortened turn is no part of it, also where the turn had padding behind a row's tokens."""
    model = build("llama", layers=2)
    ids, mask = make_batch([PROMPT, PROMPT], [PROMPT, 8])
    mask[1, 8:PROMPT] = 0
    later, _ = make_batch([PROMPT, PROMPT], [PROMPT, 8], seed=1)
    shown = torch.ones_like(mask)
    start = 7 if policy == "full" else PROMPT  # statistics of a prompt cannot be taken back
    with kvpolicy.attach(model, policy):
        cache, twin = (PolicyCache(model) for _ in range(2))
        for each in (cache, twin):
            forward(model, ids, mask, 0, PROMPT, each)
            each.crop(start - PROMPT)
        if start == PROMPT:
            shown[:, :PROMPT] = mask[:, :PROMPT]
        stop = start + 4
        for column in range(start, stop):
            forward(model, later, shown, column, column + 1, cache)
            if column < start + 2:
                forward(model, later, shown, column, column + 1, twin)
        cache.crop(-1)
        cache.crop(-1)
        assert torch.equal(cache.mask_digest, twin.mask_digest)  # pyright: ignore[reportArgumentType]
        for layer, other in zip(cache.policy_layers, twin.policy_layers, strict=True):
            assert torch.equal(layer.positions, other.positions) and torch.equal(layer.length, other.length)
            assert torch.equal(layer.keys, other.keys) and torch.equal(layer.budget, other.budget)
        logits = [forward(model, ids, shown, start + 2, stop, each) for each in (cache, twin)]
        assert torch.equal(*logits)


def test_the_end_that_a_cropped_turn_was_told() -> None:
    """A growing cache has room up to the end of the turn that takes its place."""
    with attached("streaming:decode=grow@1.0", [PROMPT], [PROMPT, 8], layers=2) as (model, ids, mask):
        cache = prompted(model, ids, mask, PROMPT, new=8)
        assert cache.policy_layers[0].budget.tolist() == [PROMPT + 8]
        cache.expect(None, 5)
        forward(model, ids, mask, PROMPT, PROMPT + 4, cache)
        assert cache.policy_layers[0].budget.tolist() == [PROMPT + 4 + 5]
        cache.crop(-4)
        forward(model, ids, mask, PROMPT, PROMPT + 2, cache)
        assert cache.policy_layers[0].budget.tolist() == [PROMPT + 2 + 5]


@pytest.mark.parametrize("policy", ["full", "window@64", "streaming:decode=grow@1.0"])
def test_a_whole_turn_leaves_the_plan_and_the_budget_from_before(policy: str) -> None:
    """They are of the prompt, and not of the steps behind it, with which the turn would be divided again."""
    with attached(policy, [PROMPT, 7], [PROMPT, 8], layers=2) as (model, ids, mask):
        cache = PolicyCache(model)
        for start, stop in ((0, PROMPT), (PROMPT, PROMPT + 1), (PROMPT + 1, PROMPT + 2)):
            forward(model, ids, mask, start, stop, cache)
        plan = cache.plan
        budgets = [layer.budget.clone() for layer in cache.policy_layers]
        forward(model, ids, mask, PROMPT + 2, PROMPT + 7, cache)
        cache.crop(-5)
        assert cache.plan == plan and len(cache.journal.prompts) == 1
        assert all(torch.equal(layer.budget, own) for layer, own in zip(cache.policy_layers, budgets, strict=True))
