"""Attention masks and rows: odd ones give what the stock model gives, impossible ones a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy.registry import lookup
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch, talk
from tests.conformance.policies import CODECS, words
from tests.robust.hostile import FEW, GREEDY, SOME, each, exact, prompt, refused, roomy

SIZES = [26, 1, 1, 6, 1]


def masks() -> dict[str, Tensor]:
    every = torch.ones(2, sum(SIZES), dtype=torch.int64)
    holes = every.clone()
    right = every.clone()
    holes[0, 5:9] = holes[1, 12] = holes[1, 29:31] = 0
    right[1, 18:26] = 0
    return {"ones": every, "holes": holes, "right": right, "float": holes.float(), "bool": holes.bool()}


@each("kind", ["holes", *(kind for kind in masks() if kind != "holes")], often=FEW)
def test_odd_masks(policy: str, kind: str) -> None:
    """Where nothing is dropped, the stock model's logits; else those of the row alone."""
    model = build("llama")
    mask = masks()[kind]
    ids, _ = make_batch([26, 26], SIZES)
    stock = talk(model, ids, mask, SIZES, DynamicCache())
    seen = mask.bool()
    with kvpolicy.attach(model, roomy(policy)):
        ours = talk(model, ids, mask, SIZES, PolicyCache(model, new=9))
        assert not exact(policy) or (ours - stock)[seen].abs().max() < 3e-5
    with kvpolicy.attach(model, policy):
        ours = talk(model, ids, mask, SIZES, PolicyCache(model, new=9))
        alone = talk(model, ids[:1], mask[:1], SIZES, PolicyCache(model, new=9))
    assert (ours[:1] - alone)[seen[:1]].abs().max() < (5e-5 if exact(policy) else 0.1)


IMPOSSIBLE: dict[str, tuple[Any, str]] = {
    "dict": ({"full_attention": None}, "2-D tensor, got dict"),
    "list": ([[1] * 26] * 2, "2-D tensor, got list"),
    "one dimension": (torch.ones(26), "shape"),
    "three dimensions": (torch.ones(2, 26, 26), "shape"),
    "too few rows": (torch.ones(1, 26), "shape"),
    "too many rows": (torch.ones(3, 26), "shape"),
    "added": (torch.zeros(2, 26).index_fill(1, torch.arange(5), -1e9), "other numbers"),
    "causal": (torch.ones(2, 1, 26, 26, dtype=torch.bool).tril(), "2-D"),
    "too few columns": (torch.ones(2, 9, dtype=torch.int64), "columns"),
}


@each("kind", [*IMPOSSIBLE], often=FEW)
def test_impossible_masks(policy: str, kind: str) -> None:
    mask, match = IMPOSSIBLE[kind]
    model = build("llama")
    with kvpolicy.attach(model, policy), torch.no_grad():
        with refused(match):
            model(prompt().expand(2, -1), attention_mask=mask, use_cache=True)
        with refused(match):
            model(prompt().expand(2, -1), attention_mask=mask, cache=PolicyCache(model))


@each("columns", [31, 20], often=FEW)
def test_a_mask_of_other_columns_without_a_cache(policy: str, columns: int) -> None:
    """Its last columns are not those of the tokens."""
    mask = torch.ones(1, columns, dtype=torch.int64)
    mask[:, 26:] = 0
    with kvpolicy.attach(build("llama"), policy), torch.no_grad(), refused("must have 26 columns"):
        build("llama")(prompt(), attention_mask=mask, use_cache=False)


@each("kind", ["float", "fp16", "bool", "twos"], often=FEW)
def test_generate_counts_tokens_in_any_mask(policy: str, kind: str) -> None:
    """A token is what is not 0: the budget of a row is that of as many tokens as it has."""
    ids, mask = make_batch([24, 15], [24])
    other = {"float": mask.float(), "fp16": mask.half(), "bool": mask.bool(), "twos": mask * 2}[kind]
    budgets: list[list[int]] = []
    for one in (mask, other):
        with kvpolicy.attach(build("llama"), policy) as handle:
            build("llama").generate(ids, attention_mask=one, **GREEDY)
        assert handle.cache is not None and handle.cache.prompt is not None
        assert handle.cache.prompt.tolist() == [24, 15]
        budgets.append(handle.cache.policy_layers[0].budget.tolist())
    assert budgets[0] == budgets[1]


@each("cached", [True, False], often=FEW)
def test_generate_needs_a_token_at_the_end_of_a_row(policy: str, cached: bool) -> None:
    """The first token would be predicted from padding, which attends to nothing."""
    ids, mask = make_batch([24, 15], [24])
    with kvpolicy.attach(build("llama"), policy):
        with refused("1 of 2 row"):
            build("llama").generate(ids.flip(1), attention_mask=mask.flip(1), use_cache=cached, **GREEDY)
        build("llama").generate(ids, attention_mask=mask, use_cache=cached, **GREEDY)


@each("new", [1, 6], often=FEW)
def test_a_mask_that_hides_what_was_seen(policy: str, new: int) -> None:
    """The stock model would hide it; slots cannot."""
    model = build("llama")
    ids, mask = make_batch([26, 17], [26, new])
    hides = mask.clone()
    hides[0, 3:20] = 0
    with kvpolicy.attach(model, policy), torch.no_grad():
        cache = PolicyCache(model)
        model(ids[:, :26], attention_mask=mask[:, :26], cache=cache)
        with refused("earlier tokens"):
            model(ids[:, 26:], attention_mask=hides, cache=cache)
        model(ids[:, 26:], attention_mask=mask, cache=cache)


@each("rows", [(2, 1), (1, 2), (2, 3)], often=FEW)
def test_a_batch_that_changes_between_turns(policy: str, rows: tuple[int, int]) -> None:
    before, after = rows
    model = build("llama")
    ids = prompt()
    with kvpolicy.attach(model, policy), torch.no_grad():
        cache = PolicyCache(model)
        model(ids.expand(before, -1), cache=cache)
        for new in (1, 3):
            with refused(f"must have the {before} row"):
                model(ids[:, :new].expand(after, -1), cache=cache)
        if after < before:
            cache.batch_select_indices(torch.arange(after))
        else:
            cache.batch_select_indices(torch.zeros(after, dtype=torch.int64))
        fresh = PolicyCache(model)
        model(ids.expand(after, -1), cache=fresh)
        got, want = (model(ids[:, :1].expand(after, -1), cache=c).logits for c in (cache, fresh))
    assert torch.allclose(got, want, atol=1e-5)


@SOME
def test_arguments_by_place(policy: str) -> None:
    model = build("llama")
    ids, mask = make_batch([26, 17], [26, 1])
    with kvpolicy.attach(model, policy), torch.no_grad():
        outs: list[Tensor] = []
        for by_name in (True, False):
            cache = PolicyCache(model)
            if by_name:
                model.model(ids[:, :26], attention_mask=mask[:, :26], cache=cache)
            else:
                model.model(ids[:, :26], mask[:, :26], None, cache)
            outs.append(model.model(ids[:, 26:], mask, None, cache)[0])
    assert torch.equal(*outs)


@pytest.mark.parametrize("codec", [name for name in CODECS if lookup(name)[1]().traits.key_space == "unrotated"])
def test_positions_that_jump(codec: str) -> None:
    """Keys of which one shift for the row would undo another rotation; the cache is as it was."""
    model = build("llama")
    ids, _ = make_batch([26], [26])
    jump = torch.arange(26)[None] + 100 * (torch.arange(26) > 12)
    holes = torch.ones(1, 26, dtype=torch.int64).index_fill(1, torch.arange(5, 9), 0)
    counted = (holes.cumsum(-1) - 1).clamp_min(0)
    with kvpolicy.attach(model, words("window", codec)), torch.no_grad():
        cache = PolicyCache(model)
        for wrong in ({"position_ids": jump}, {"attention_mask": holes}):
            with refused("must go on by one"):
                model(ids, cache=cache, **wrong)
        model(ids, cache=cache, attention_mask=holes, position_ids=counted)
        for place in (torch.arange(30, 34), torch.arange(22, 26) + torch.tensor([0, 0, 0, 1])):
            with refused("must go on by one"):
                model(ids[:, :4], cache=cache, position_ids=place[None])
        model(ids[:, :4], cache=cache, position_ids=torch.arange(22, 26)[None])
        assert cache.policy_layers[0].length.tolist() == [26]


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("change", ["other", "swapped"])
def test_a_later_mask_that_hides_other_tokens_is_refused(new: int, change: str) -> None:
    """As many earlier tokens, but not the same ones: the error was due and did not come."""
    model = build("llama")
    ids, mask = make_batch([20, 17], [20, 1, new])
    with kvpolicy.attach(model, "full"):
        cache = PolicyCache(model)
        forward(model, ids, mask, 0, 20, cache)
        forward(model, ids, mask, 20, 21, cache)
        wrong = mask.clone()
        if change == "other":
            wrong[1, :4] = torch.tensor([1, 0, 0, 0])  # row 1 is padded in its first three columns
        else:
            wrong[:, :21] = mask.flip(0)[:, :21]
        with pytest.raises(RuntimeError if new == 1 else kvpolicy.KVPolicyError, match="same earlier tokens"):
            forward(model, ids, wrong, 21, 21 + new, cache)


def test_the_digest_of_a_mask_follows_rows_and_steps() -> None:
    from kvpolicy.hf.seen_text import mask_digest

    model = build("llama")
    ids, mask = make_batch([20, 17], [20, 1, 1, 5])
    with kvpolicy.attach(model, "window@0.5"):
        cache = PolicyCache(model)
        for start, stop in ((0, 20), (20, 21), (21, 22)):
            forward(model, ids, mask, start, stop, cache)
        cache.batch_select_indices(torch.tensor([1, 0, 1]))
        ids = ids[[1, 0, 1]]
        mask = mask[[1, 0, 1]]
        forward(model, ids, mask, 22, 27, cache)
        assert cache.mask_digest is not None
        assert torch.equal(cache.mask_digest, mask_digest(mask))


@pytest.mark.parametrize("pieces", [[1] * 12, [4, 1, 1, 3, 1, 2], [12], [11, 1]])
def test_a_digest_is_that_of_all_columns_however_they_come(pieces: list[int]) -> None:
    """Also of a step in which a row has no token."""
    from kvpolicy.hf.seen_text import extend_digest, mask_digest

    mask = torch.rand(5, 12, generator=torch.Generator().manual_seed(0)) < 0.6
    digest = torch.zeros(5, dtype=torch.int64)
    start = 0
    for size in pieces:
        extend_digest(digest, mask[:, start : start + size], size)
        start += size
        assert torch.equal(digest, mask_digest(mask[:, :start]))
