"""Tokens that are removed, and those behind them at other positions, against caches of the edited text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import KVPolicyError, PolicyCache
from kvpolicy.engine.editing import check_movable
from kvpolicy.text.errors import KVPolicyStateError, KVPolicyTypeError
from tests.conformance.access import kept_positions
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch
from tests.conformance.policies import words
from tests.engine.parts import slots_of

LENGTHS = [26, 17]
STEPS = 6
FIRST = 5
LAST = 9
"""The tokens that are removed, counted without padding."""


def edited(ids: Tensor, mask: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """The batch without the tokens `first` to `last` of each row, padded on the left as before."""
    counted = (mask.cumsum(-1) - 1).where(mask.bool(), -1)
    rows = [(row[(at >= 0) & ((at < first) | (at >= last))]) for row, at in zip(ids, counted, strict=True)]
    width = ids.shape[1] - (last - first)
    filled = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    return filled, torch.stack([torch.arange(width) >= width - len(row) for row in rows]).long()


def steps(model: Any, cache: PolicyCache, ids: Tensor, mask: Tensor, seen: int, new: Tensor) -> Tensor:
    """The logits of further tokens."""
    found: list[Tensor] = []
    ids = torch.cat([ids[:, :seen], new], 1)
    mask = torch.cat([mask[:, :seen], torch.ones_like(new)], 1)
    for column in range(seen, ids.shape[1]):
        found.append(forward(model, ids, mask, column, column + 1, cache))
    return torch.cat(found, 1)


INDEXED = "labels:read=8:channels=8:dense=0"


@pytest.mark.parametrize("policy", ["full", "window@20", "uniform/even+streaming:sinks=2@20", "exact:read=8", INDEXED])
def test_a_removed_span_was_never_there(policy: str) -> None:
    """With one layer keys depend on the token and its position alone, so that the edited text gives the same logits."""
    model = build("llama", layers=1)
    ids, mask = make_batch(LENGTHS, [26, STEPS])
    new = ids[:, 26:]
    want_ids, want_mask = edited(ids[:, :26], mask[:, :26], FIRST, LAST)
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model)
        fresh = PolicyCache(model)
        forward(model, ids, mask, 0, 26, cache)
        cache.shift(LAST, FIRST - LAST)
        forward(model, want_ids, want_mask, 0, want_ids.shape[1], fresh)
        if policy in ("full", "exact:read=8", INDEXED):  # the others have evicted before the edit
            assert kept_positions(cache.policy_layers[0]) == kept_positions(fresh.policy_layers[0])
            got = steps(model, cache, want_ids, want_mask, want_ids.shape[1], new)
            want = steps(model, fresh, want_ids, want_mask, want_ids.shape[1], new)
            assert torch.allclose(got, want, atol=1e-4)
            return
        steps(model, cache, want_ids, want_mask, want_ids.shape[1], new)
        held = keys_by_position(cache)
        steps(model, fresh, want_ids, want_mask, want_ids.shape[1], new)
        same = [(held[at], key) for at, key in keys_by_position(fresh).items() if at in held]
        assert len(same) > 20 and all(torch.allclose(one, other, atol=1e-5) for one, other in same)


def keys_by_position(cache: PolicyCache) -> dict[tuple[int, int, int], Tensor]:
    """The key of each row, head and position in the first layer."""
    past: Any = cache.policy_layers[0].store.past()
    positions = cache.policy_layers[0].head_positions
    return {(b, h, int(p)): past.keys[b, h, s] for (b, h, s), p in _each(positions) if p >= 0}


def _each(positions: Tensor) -> list[tuple[tuple[int, int, int], int]]:
    places = torch.cartesian_prod(*(torch.arange(size) for size in positions.shape)).tolist()
    return [((b, h, s), int(positions[b, h, s])) for b, h, s in places]


@pytest.mark.parametrize("codec", ["plain", "csr", "kvquant"])
def test_behind_a_longer_text(codec: str) -> None:
    """The keys of the first layer are those of the same tokens behind a longer beginning."""
    model = build("llama", layers=1)
    ids, mask = make_batch([26])
    with kvpolicy.attach(model, words("full", codec, budget="1.0")):
        cache = PolicyCache(model)
        longer = PolicyCache(model)
        forward(model, ids, mask, 0, 26, cache)
        codes = [t.clone() for t in cache.policy_layers[0].store.tensors.codes[0]] if codec != "plain" else []
        before = keys_by_position(cache)
        cache.shift(FIRST, 4)
        assert codec == "plain" or all(map(torch.equal, codes, cache.policy_layers[0].store.tensors.codes[0]))
        after = keys_by_position(cache)
        assert sorted(after) == sorted((b, h, p if p < FIRST else p + 4) for b, h, p in before)
        if codec == "plain":
            more = torch.cat([ids[:, :FIRST], torch.full((1, 4), 7), ids[:, FIRST:26]], 1)
            forward(model, more, torch.ones_like(more), 0, 30, longer)
            want = keys_by_position(longer)
            assert all(torch.allclose(key, want[at], atol=1e-5) for at, key in after.items())
        cache.shift(FIRST + 4, -4)
        again = keys_by_position(cache)
        assert all(torch.allclose(again[at], key, atol=1e-5) for at, key in before.items())
        assert forward(model, ids, mask, 26, 27, cache).isfinite().all()


@pytest.mark.parametrize(("start", "by"), [(FIRST, 4), (LAST, FIRST - LAST), (25, 3), (25, -2)])
def test_codes_outlast_the_tokens_that_they_refer_to(start: int, by: int) -> None:
    """Codes are read with the unrotated keys of dictionary slots, which stay after their tokens were evicted."""
    model = build("llama", layers=1)
    ids, mask = make_batch([26])
    with kvpolicy.attach(model, words("full", "csr", budget="1.0")):
        cache = PolicyCache(model)
        forward(model, ids, mask, 0, 26, cache)
        store = cache.policy_layers[0].store
        assert store.tensors.positions[0, 0, : store.contents.reserved].tolist() == [25, 24]
        before = slots_of(store).codes.atoms()
        first = torch.zeros(*store.tensors.positions.shape[:2], 1, dtype=torch.int64)
        slots_of(store).writer.write(first, None, None)
        cache.shift(start, by)
        after = slots_of(store).codes.atoms()
        assert before is not None and after is not None
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(before, after, strict=True))


REFUSED = {
    "snapkv+kivi@0.5": "codec must store unrotated keys",
    "keydiff@0.5": "selector must rank tokens by attention or position",
    "compactor@0.5": "selector must rank tokens by attention or position",
    "h2o+merge@0.5": "must not be merged",
    "h2o@0.5": "from_position must be between 0 and 17",
}


@pytest.mark.parametrize("policy", REFUSED)
def test_what_cannot_be_moved(policy: str) -> None:
    model = build("llama", layers=1)
    ids, mask = make_batch(LENGTHS)
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model)
        with pytest.raises(KVPolicyError, match="must have compressed its prompt"):
            cache.shift(3, 1)
        forward(model, ids, mask, 0, 26, cache)
        before = cache.policy_layers[0].positions.clone()
        with pytest.raises(KVPolicyError, match=REFUSED[policy]):
            cache.shift(18, 1)
        if policy != "h2o@0.5":
            with pytest.raises(KVPolicyError, match=REFUSED[policy]):
                check_movable(cache.policy_layers[0].store)
        if policy == "h2o@0.5":
            with pytest.raises(KVPolicyError, match="by must be at least -3 for the position 3, got -4"):
                cache.shift(3, -4)
        assert torch.equal(before, cache.policy_layers[0].positions)


def test_a_fork_goes_on_by_itself() -> None:
    model = build("llama")
    ids, mask = make_batch(LENGTHS)
    with kvpolicy.attach(model, words("h2o", "kivi")):
        cache = PolicyCache(model)
        forward(model, ids, mask, 0, 26, cache)
        picked = torch.tensor([1, 0, 1])
        fork = cache.fork([1, 0, 1])
        whole = cache.fork()
        want = forward(model, ids, mask, 26, 27, cache)
        assert torch.equal(forward(model, ids, mask, 26, 27, whole), want)
        assert torch.allclose(forward(model, ids[picked], mask[picked], 26, 27, fork), want[picked], atol=1e-5)
        assert cache.batch_size == 2 and fork.batch_size == 3
        wrong: list[Any] = [[], [2], [-1], "0", ["a"]]
        for rows in wrong:
            with pytest.raises(KVPolicyError, match="rows must be a list of numbers from 0 to 1"):
                cache.fork(rows)


def test_positions_are_integers() -> None:
    model = build("llama", layers=2)
    ids, mask = make_batch(LENGTHS)
    wrong: Any
    with torch.no_grad(), kvpolicy.attach(model, "window@9"):
        cache = PolicyCache(model)
        model(ids, attention_mask=mask, cache=cache)
        for wrong in (("a", 1), (3, "a"), (1.5, 1), (3, None)):
            with pytest.raises(KVPolicyTypeError, match=r"must be an integer, got .*; try shift"):
                cache.shift(*wrong)
        with pytest.raises(KVPolicyStateError, match="got none; try the allocator squeeze, and run a prompt"):
            cache.cosines()
