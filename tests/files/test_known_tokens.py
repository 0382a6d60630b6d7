"""What a file says of its tokens is compared with the text that goes on from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import KVPolicyError, PolicyCache
from kvpolicy.hf.cache_names import CACHE
from tests.conformance.models import build

HOW: dict[str, Any] = {"do_sample": False, "max_new_tokens": 3, "eos_token_id": None}
REFUSED = "must begin with the 12 tokens that the cache's file has"


def text(columns: int, rows: int = 2, seed: int = 1) -> Tensor:
    return torch.randint(3, 48, (rows, columns), generator=torch.Generator().manual_seed(seed))


def changed(ids: Tensor, row: int, column: int) -> Tensor:
    other = ids.clone()
    other[row, column] = 3 + (int(other[row, column]) - 2) % 40
    return other


@pytest.fixture(name="saved")
def saved_(path: Path) -> Any:
    """A model with a policy, a file of two rows, the second one padded, and their ids and mask."""
    model = build("llama", layers=2)
    ids = text(12)
    ids[1, :3] = 0
    mask = (ids != 0).int()
    with torch.no_grad(), kvpolicy.attach(model, "h2o@0.5"):
        cache = PolicyCache(model)
        model(ids, attention_mask=mask, **{CACHE: cache})
        cache.save(path, tokens=ids)
        yield model, path, ids, mask


def more(ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """The arguments of `generate` for a text with four tokens behind it."""
    new = text(4, len(ids), seed=9)
    return {"input_ids": torch.cat([ids, new], 1), "attention_mask": torch.cat([mask, torch.ones_like(new)], 1)}


@pytest.mark.parametrize(("row", "column"), [(0, 0), (0, 11), (1, 5)])
def test_another_text_is_refused(saved: Any, row: int, column: int) -> None:
    """But for ids of padding, which do not matter."""
    model, path, ids, mask = saved
    cache = PolicyCache.load(model, path)
    with pytest.raises(KVPolicyError, match=REFUSED) as error:
        model.generate(**more(changed(ids, row, column), mask), **{CACHE: cache}, **HOW)
    assert f"in row {row} and column {column}: " in str(error.value) and str(error.value).endswith(".")
    assert cache.new is None and cache.get_seq_length() == 12
    assert model.generate(**more(changed(ids, 1, 2), mask), **{CACHE: cache}, **HOW).shape == (2, 19)


def test_every_way_of_passing_a_text(saved: Any) -> None:
    model, path, ids, mask = saved
    given = more(changed(ids, 0, 4), mask)
    other = given.pop("input_ids")
    for args, kwargs in (((other,), {}), ((), {"inputs": other}), ((), {"input_ids": other})):
        with pytest.raises(KVPolicyError, match=REFUSED):
            model.generate(*args, **kwargs, **given, **{CACHE: PolicyCache.load(model, path)}, **HOW)
    # The new tokens alone, with the mask of all: there is nothing to compare.
    cache = PolicyCache.load(model, path)
    assert model.generate(other[:, 12:], **given, **{CACHE: cache}, **HOW).shape == (2, 7)


def test_a_later_turn_is_compared_too(saved: Any) -> None:
    model, path, ids, mask = saved
    cache = PolicyCache.load(model, path)
    given = more(ids, mask)
    out = model.generate(**given, **{CACHE: cache}, **HOW)
    seen = torch.cat([given["attention_mask"], torch.ones_like(out[:, 16:])], 1)
    with pytest.raises(KVPolicyError, match=REFUSED):
        model.generate(**more(changed(out, 0, 4), seen), **{CACHE: cache}, **HOW)
    assert model.generate(**more(changed(out, 0, 13), seen), **{CACHE: cache}, **HOW).shape[1] == 26


def test_rows_keep_their_ids(saved: Any) -> None:
    """`generate` repeats the rows of a text after the comparison, for a cache that has its beams already."""
    model, path, ids, mask = saved
    loaded = PolicyCache.load(model, path)
    reordered, repeated, beams, other_beams = (loaded.fork() for _ in range(4))
    reordered.reorder_cache(torch.tensor([1, 0]))
    for cache in (repeated, beams, other_beams):
        cache.batch_repeat_interleave(2)
    shared = loaded.fork([0]).fork([0, 0], shared=True)
    rows = {(1, 0): reordered, (0, 0, 1, 1): repeated, (1,): loaded.fork([1]), (0, 0): shared}
    for order, cache in rows.items():
        own = ids[list(order)]
        seen = mask[list(order)]
        with pytest.raises(KVPolicyError, match=REFUSED):
            model.generate(**more(changed(own, len(order) - 1, 7), seen), **{CACHE: cache}, **HOW)
        model.generate(**more(own, seen), **{CACHE: cache}, **HOW)
    shared.reset()
    with pytest.raises(KVPolicyError, match=REFUSED):
        model.generate(**more(changed(ids[[0, 0]], 1, 7), mask[[0, 0]]), **{CACHE: shared}, **HOW)
    model.generate(**more(ids, mask), **{CACHE: beams}, num_beams=2, **HOW)
    with pytest.raises(KVPolicyError, match=REFUSED):
        model.generate(**more(changed(ids, 1, 7), mask), **{CACHE: other_beams}, num_beams=2, **HOW)


def test_edits_forget_what_they_change_and_files_may_have_no_ids(path: Path) -> None:
    model = build("llama", layers=2)
    ids = text(12, rows=1)
    with torch.no_grad(), kvpolicy.attach(model, "full"):
        cache = PolicyCache(model)
        model(ids, **{CACHE: cache})
        cache.save(path, tokens=ids)
        moved, new = (PolicyCache.load(model, path) for _ in range(2))
        assert new.nbytes == cache.nbytes
        moved.shift(6, -2)
        edited = torch.cat([ids[:, :4], ids[:, 6:], text(4, 1)], 1)
        assert model.generate(edited, **{CACHE: moved}, **HOW).shape == (1, 17)
        new.reset()
        cache.save(path)
        for unknown in (new, PolicyCache.load(model, path)):
            assert model.generate(text(16, 1, seed=3), **{CACHE: unknown}, **HOW).shape == (1, 19)


def test_steps_compare_nothing(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids are compared once for each call of `generate`, before it runs the model."""
    from kvpolicy.hf.seen_text import KnownTokens

    model, path, ids, mask = saved
    calls: list[int] = []
    check = KnownTokens.check
    monkeypatch.setattr(KnownTokens, "check", lambda *args: (calls.append(1), check(*args))[1])
    cache = PolicyCache.load(model, path)
    model.generate(**more(ids, mask), **{CACHE: cache}, **HOW)
    assert calls == [1]
