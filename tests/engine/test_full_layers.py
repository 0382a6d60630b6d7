"""A layer that is known to be full takes a shorter way to the same results, and is known to be full only if it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import kvpolicy
from tests.conformance.models import build

NEW = 6
CODES = "tokenwise:bits=4:block_size=4:residual_length=4"
POLICIES = (
    *("snapkv@0.3", "h2o@24", "h2o+merge@24", "uniform/adakv+h2o@32", "window@16"),
    *(f"snapkv+{CODES}@24", f"h2o+merge+{CODES}@24", f"uniform/adakv+snapkv+{CODES}@32"),
    *("snapkv+kivi:bits=4:group_size=4:residual_length=4@24", f"uniform/adakv+h2o+merge+{CODES}@32"),
)
"""Of slots and of pages, with and without weights of attention and merges, exact and in codes, of which steps make one
block."""


def _ids(tokens: int) -> torch.Tensor:
    return torch.randint(3, 24, (1, tokens), generator=torch.Generator().manual_seed(tokens))


def _evict(cache: kvpolicy.PolicyCache) -> list[bool]:
    """Of each layer, whether each of its steps is known to evict; without a codec, all slots are full then."""
    layers = [layer.store.contents for layer in cache.policy_layers]
    assert all(layer.is_full == (layer.evicts and not sum(layer.layout.coded)) for layer in layers)
    return [layer.evicts for layer in layers]


def _never_full(cache: kvpolicy.PolicyCache) -> None:
    for layer in cache.policy_layers:
        layer.store.contents._evicts = False


def _steps(
    policy: str, ids: torch.Tensor, mask: torch.Tensor | None, before: Callable[[kvpolicy.PolicyCache], None]
) -> list[torch.Tensor]:
    model = build("llama", layers=2)
    start = ids.shape[1] - NEW
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = kvpolicy.PolicyCache(model, new=NEW)
        model(ids[:, :start], attention_mask=None if mask is None else mask[:, :start], cache=cache)
        before(cache)
        logits = [
            model(ids[:, n, None], attention_mask=None if mask is None else mask[:, : n + 1], cache=cache).logits
            for n in range(start, ids.shape[1])
        ]
        held = [t for layer in cache.policy_layers for t in (layer.positions, layer.keys, layer.values)]
        return logits + held


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_shorter_way_leads_to_the_same_bits(policy: str, idle: bool) -> None:
    """Also where a row has no token in some steps, and evicts none."""
    ids = _ids(80).expand(1 + idle, -1)
    mask = torch.ones_like(ids) if idle else None
    if mask is not None:
        mask[0, -3:] = 0
    known: list[bool] = []
    short = _steps(policy, ids, mask, lambda cache: known.extend(_evict(cache)))
    assert all(known) and known
    for ours, theirs in zip(short, _steps(policy, ids, mask, _never_full), strict=True):
        assert torch.equal(ours, theirs)


def test_only_rows_that_are_all_full_are() -> None:
    ids = _ids(80).expand(2, -1)
    mask = torch.ones_like(ids)
    mask[0, :70] = 0
    known: list[bool] = []
    _steps("h2o@24", ids, mask, lambda cache: known.extend(_evict(cache)))
    assert known == [False, False]


@pytest.mark.parametrize("policy", ["h2o@24", f"h2o+{CODES}@24", f"uniform/adakv+h2o+{CODES}@24"])
def test_a_prompt_one_token_shorter_than_its_budget_leaves_room(policy: str) -> None:
    known: list[bool] = []
    ids = _ids(23 + NEW)
    short = _steps(policy, ids, None, lambda cache: known.extend(_evict(cache)))
    assert known == [False, False]
    for ours, theirs in zip(short, _steps(policy, ids, None, _never_full), strict=True):
        assert torch.equal(ours, theirs)


def test_removed_tokens_leave_room() -> None:
    model = build("llama", layers=2)
    with torch.no_grad(), kvpolicy.attach(model, "snapkv@24"):
        cache = kvpolicy.PolicyCache(model, new=NEW)
        model(_ids(80), cache=cache)
        assert all(_evict(cache))
        cache.mark(2)
        model(_ids(1), cache=cache)
        cache.rollback(0)
        assert all(_evict(cache))
        cache.shift(75, -5)
        assert not any(_evict(cache))
