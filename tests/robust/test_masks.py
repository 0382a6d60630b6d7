"""What a forward is given: masks, rows and arguments of attention are followed as in the stock model, or refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.utils.generic import TransformersKwargs

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy.hf.attention_interface import KNOWN
from kvpolicy.hf.cache_names import output_cache
from kvpolicy.hf.seen_text import mask_digest
from kvpolicy.registry import lookup
from tests.conformance.models import FAMILIES, UNNAMED, build
from tests.conformance.play import forward, make_batch, talk
from tests.conformance.policies import CODECS, words
from tests.robust.hostile import FEW, GREEDY, SOME, each, exact, own, prompt, refused, roomy

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
        cache.batch_select_indices(torch.zeros(after, dtype=torch.int64))
        fresh = PolicyCache(model)
        model(ids.expand(after, -1), cache=fresh)
        got, want = (model(ids[:, :1].expand(after, -1), cache=c).logits for c in (cache, fresh))
    assert torch.allclose(got, want, atol=1e-5)


@SOME
def test_arguments_by_name_by_place_and_as_embeddings(policy: str) -> None:
    model = build("llama").model
    ids, mask = make_batch([26, 17], [26, 1, 3])
    given = model.get_input_embeddings()(ids)
    ways: list[Callable[[slice, PolicyCache], Any]] = [
        lambda new, cache: model(ids[:, new], attention_mask=mask[:, : new.stop], cache=cache),
        lambda new, cache: model(ids[:, new], mask[:, : new.stop], None, cache),
        lambda new, cache: model(inputs_embeds=given[:, new], attention_mask=mask[:, : new.stop], cache=cache),
    ]
    with kvpolicy.attach(build("llama"), policy), torch.no_grad():
        caches = [PolicyCache(build("llama")) for _ in ways]
        for new in (slice(0, 26), slice(26, 27), slice(27, 30)):
            outs = [way(new, cache)[0] for way, cache in zip(ways, caches, strict=True)]
            assert torch.equal(outs[1], outs[0]) and torch.equal(outs[2], outs[0])


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


@each("change,new", ["hides", "other", "swapped"], [1, 3], often=FEW)
def test_a_later_mask_that_hides_other_tokens_is_refused(policy: str, change: str, new: int) -> None:
    """The stock model would hide them; slots cannot. Also where as many are hidden as before."""
    model = build("llama")
    ids, mask = make_batch([20, 17], [20, 1, new])
    wrong = mask.clone()
    if change == "hides":
        wrong[0, 3:15] = 0
    elif change == "other":
        wrong[1, :4] = torch.tensor([1, 0, 0, 0])  # row 1 is padded in its first three columns
    else:
        wrong[:, :21] = mask.flip(0)[:, :21]
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model)
        forward(model, ids, mask, 0, 20, cache)
        forward(model, ids, mask, 20, 21, cache)
        with refused("same earlier tokens"):
            forward(model, ids, wrong, 21, 21 + new, cache)
        forward(model, ids, mask, 21, 21 + new, cache)


def test_the_digest_of_a_mask_follows_rows_and_steps() -> None:
    """Also where a row has no token in a step."""
    model = build("llama")
    ids, mask = make_batch([20, 17], [20, 1, 1, 5])
    mask[1, 21] = mask[0, 23] = 0
    with kvpolicy.attach(model, "window@0.5"):
        cache = PolicyCache(model)
        for start, stop in ((0, 20), (20, 21), (21, 22)):
            forward(model, ids, mask, start, stop, cache)
        rows = torch.tensor([1, 0, 1])
        cache.batch_select_indices(rows)
        forward(model, ids[rows], mask[rows], 22, 27, cache)
        assert cache.mask_digest is not None
        assert torch.equal(cache.mask_digest, mask_digest(mask[rows]))


def logits(model: Any, **given: Any) -> Tensor:
    ids, _ = make_batch([20], [20])
    with torch.no_grad():
        return model(ids, **({"use_cache": True} | given)).logits


@pytest.mark.parametrize(
    ("name", "cached"),
    [("indices", True), ("indices", False), ("anything", False), ("position_bias", True), ("sinks", True)],
)
def test_unknown_tensors_are_refused(name: str, cached: bool) -> None:
    """Of sparse attention, which chooses tokens, and what stock attention would add: without them it is another one."""
    model = build("llama")
    for value in (torch.zeros(1, 4, 20, 20), [torch.zeros(1)], {"a": torch.zeros(1)}):
        with kvpolicy.attach(model, "full"), refused(f"without '{name}' under a policy"):
            logits(model, **{"use_cache": cached, name: value})


def test_other_arguments_change_nothing() -> None:
    """Stock attention ignores what it does not know, and so is it where nothing could be meant."""
    model = build("llama")
    want = logits(model)
    with kvpolicy.attach(model, "full"):
        others: list[dict[str, Any]] = [
            {"indices": None},
            {"num_items_in_batch": torch.tensor(3)},
            {"purpose": "a word", "level": 3},
        ]
        for given in others:
            assert torch.allclose(logits(model, **given), want, atol=1e-5)


def test_every_argument_of_transformers_is_known() -> None:
    assert TransformersKwargs.__annotations__.keys() <= KNOWN


def test_attention_to_later_tokens_is_refused_behind_a_cache() -> None:
    """Without one, the stock function does what it is told."""
    model = build("llama")
    want = logits(model, use_cache=False, is_causal=False)
    assert (want - logits(model, use_cache=False)).abs().max() > 0.1
    with kvpolicy.attach(model, "full"):
        with refused("causal where a policy keeps a cache, got is_causal=False"):
            logits(model, is_causal=False)
        assert torch.equal(logits(model, use_cache=False, is_causal=False), want)
        assert torch.allclose(logits(model, is_causal=True), logits(model, use_cache=False), atol=1e-5)


def scored(model: Any, mask: Tensor | None, **how: Any) -> Any:
    ids, _ = make_batch([26, 17], [26])
    with torch.no_grad():
        return model(ids, attention_mask=mask, labels=ids, use_cache=False, **how)


@pytest.mark.parametrize("family", [*FAMILIES, *UNNAMED])
def test_scoring(family: str) -> None:
    """Without a cache, the stock model's numbers, those of padding too: a loss may count tokens that are hidden.

    With each attention that a family has; a mask of ones, in one family, is as none.
    """
    model = own(family)
    _, padded = make_batch([26, 17], [26])
    masks = (None, torch.ones_like(padded), padded) if family == "llama" else (None, padded)
    for attention, mask in itertools.product(("sdpa", "eager"), masks):
        try:
            model.set_attn_implementation(attention)
        except ValueError:
            continue
        if attention == "sdpa" and getattr(model.config, "attn_logit_softcapping", None) is not None:
            continue  # transformers 5.18 takes it and leaves the cap out
        stock = scored(model, mask)
        with kvpolicy.attach(model, "h2o@0.5"):
            ours = scored(model, mask)
        assert torch.equal(ours.logits, stock.logits) and torch.equal(ours.loss, stock.loss)
        assert output_cache(ours) is None


def test_attention_matrices() -> None:
    """Where the stock model gives them, so does an attached one; with a cache they are refused, however asked for."""
    model = own()
    ids, padded = make_batch([26, 17], [26])
    model.set_attn_implementation("eager")
    stock = scored(model, padded, output_attentions=True).attentions
    with kvpolicy.attach(model, "h2o@0.5"):
        ours = scored(model, padded, output_attentions=True).attentions
        assert len(ours) == len(stock) > 0 and all(map(torch.equal, ours, stock))
    model.config.output_attentions = True
    with kvpolicy.attach(model, "h2o@0.5"), refused("output_attentions must be False"):
        model(ids, attention_mask=padded)
