"""Rule 3: a budget for everything and the plain codec give the stock cache's logits, for every family."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

import kvpolicy
from kvpolicy import PolicyCache
from tests.conformance.models import FAMILIES, UNNAMED, build
from tests.conformance.play import ROWS, TURNS, make_batch, talk
from tests.conformance.policies import ALLOCATORS, SELECTORS, words
from tests.sampling import each_once, product

SHORT = [TURNS[0], 1, 1, 1]


WHOLE = (["full", "snapkv@40"], [*FAMILIES, *UNNAMED], [*ROWS])


@product("policy,family,rows", *WHOLE, sample=each_once(*WHOLE))
def test_equals_the_stock_cache(policy: str, family: str, rows: str) -> None:
    model = build(family)
    ids, mask = make_batch(ROWS[rows])
    stock = talk(model, ids, mask, TURNS, DynamicCache(config=model.config))
    with kvpolicy.attach(model, policy):
        ours = talk(model, ids, mask, TURNS, PolicyCache(model))
    assert (ours - stock)[mask.bool()].abs().max() < 3e-5


@product("allocator,selector", ALLOCATORS, SELECTORS, sample=zip(ALLOCATORS, SELECTORS, strict=False))
def test_every_method(allocator: str, selector: str) -> None:
    model = build("llama", layers=2)
    ids, mask = make_batch([26, 11])
    stock = talk(model, ids, mask, TURNS, DynamicCache())
    with kvpolicy.attach(model, words(allocator, selector, budget="40")):
        ours = talk(model, ids, mask, TURNS, PolicyCache(model, new=sum(TURNS[1:])))
    assert (ours - stock)[mask.bool()].abs().max() < 3e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    model = build("llama", dtype)
    ids, mask = make_batch([26, 11])
    stock = talk(model, ids, mask, TURNS, DynamicCache())
    with kvpolicy.attach(model, "h2o@40"):
        ours = talk(model, ids, mask, TURNS, PolicyCache(model))
    error = (ours - stock)[mask.bool()].abs().max()
    assert error < (0.08 if dtype == torch.bfloat16 else 0.01) * stock.abs().max()


def test_share_of_one_keeps_the_prompt_and_then_evicts() -> None:
    """A share is of the prompt: with 1.0 the prompt is whole, and generated tokens compete from there on."""
    model = build("llama")
    ids, mask = make_batch([26])
    stock = talk(model, ids, mask, SHORT, DynamicCache())
    with kvpolicy.attach(model, "window@1.0"):
        cache = PolicyCache(model)
        ours = talk(model, ids, mask, SHORT, cache)
    assert torch.allclose(ours[:, :26], stock[:, :26], atol=3e-5)
    assert cache.policy_layers[0].positions.sort().values.tolist() == [[list(range(3, 29))] * 2]


@pytest.mark.parametrize("policy", ["full", "h2o@100", "tova@20", "window+tokenwise:residual_length=8@100"])
def test_large_products_stay_finite_in_fp16(policy: str) -> None:
    """A channel of large queries and keys, as Qwen-2's biases make: stock SDPA scales before it multiplies."""
    model = copy.deepcopy(build("qwen2"))
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.bias", "k_proj.bias")):
            parameter.data.normal_().view(-1, 8)[:, [3, 7]] = 110.0 if "q_proj" in name else 330.0
    model.half()
    ids, mask = make_batch(ROWS["padded"])
    stock = talk(model, ids, mask, TURNS, DynamicCache())
    with kvpolicy.attach(model, policy):
        ours = talk(model, ids, mask, TURNS, PolicyCache(model))
    assert bool(stock[mask.bool()].isfinite().all()) and bool(ours[mask.bool()].isfinite().all())
