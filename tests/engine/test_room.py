"""Room for tokens that were not announced: each row gets it as if it were alone, and a budget of bytes still holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

import kvpolicy
from kvpolicy import PolicyCache
from tests.conformance.access import kept_positions
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch
from tests.sampling import each_once, product, star

STEPS = 16
POLICIES = [
    "streaming:sinks=2@20",
    "streaming:sinks=2+tokenwise:residual_length=4:block_size=4@20",
    "h2o+tokenwise:residual_length=8:block_size=8@40",
    "h2o+kivi:bits=4:residual_length=8:group_size=8@40",
    "pyramid+window+mikv:residual_length=4:block_size=4@24",
    "full+tokenwise:residual_length=4:block_size=4",
    "window:decode=grow+tokenwise:residual_length=4:block_size=4@12",
]


def run(policy: str, rows: list[int], row: int | None, **known: Any) -> tuple[PolicyCache, torch.Tensor]:
    """A prompt and more steps than the cache was told of, for all rows or for one alone; the last logits."""
    model = build("llama")
    columns = max(rows)
    ids, mask = make_batch(rows, [columns] + [1] * STEPS)
    if row is not None:
        start = columns - rows[row]
        ids = ids[row : row + 1, start:]
        mask = mask[row : row + 1, start:]
        columns = rows[row]
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model, **known)
        logits = forward(model, ids, mask, 0, columns, cache)
        for column in range(columns, columns + STEPS):
            logits = forward(model, ids, mask, column, column + 1, cache)
    return cache, logits


ROWS = [[14, 17], [9, 40], [30, 8]]
ANNOUNCED = [None, 1, 5]
ALL_EXACT = [
    "window+tokenwise:residual_length=8:block_size=4@7",
    "h2o+kivi:residual_length=8:group_size=4@7",
    "snapkv:window=2+merge+tokenwise:residual_length=8:block_size=4@7",
]
"""Codecs whose full-precision buffer holds the whole budget, so that no slot is coded."""


@pytest.mark.parametrize("policy", ALL_EXACT)
def test_a_full_row_evicts_in_place_beside_a_short_one(policy: str) -> None:
    """A full buffer was taken for the end of the slots where another row may still need more of them."""
    for new in (1, 2, None):
        both, logits = run(policy, [1, 13], None, new=new)
        assert not any(sum(layer.layout.coded) for layer in both.policy_layers)
        for row in range(2):
            alone, expected = run(policy, [1, 13], row, new=new)
            for mine, its in zip(both.policy_layers, alone.policy_layers, strict=True):
                assert kept_positions(mine)[row] == kept_positions(its)[0]
            assert torch.allclose(logits[row], expected[0], atol=1e-4)


@product("policy,rows,new", POLICIES, ROWS, ANNOUNCED, sample=each_once(POLICIES, ROWS[::-1], [None, *ANNOUNCED]))
def test_rows_go_on_as_alone(policy: str, rows: list[int], new: int | None) -> None:
    """A row whose neighbor has reached its budget was never given room, and then lost its oldest tokens."""
    both, logits = run(policy, rows, None, new=new)
    for row in range(len(rows)):
        alone, expected = run(policy, rows, row, new=new)
        for mine, its in zip(both.policy_layers, alone.policy_layers, strict=True):
            assert kept_positions(mine)[row] == kept_positions(its)[0]
        assert torch.allclose(logits[row], expected[0], atol=1e-4)


UNEVEN = [["uniform", "pyramid:beta=2", "squeeze"], ["24", "20KB", "14KB"]]


@product("allocator,budget", *UNEVEN, sample=[*each_once(*UNEVEN), ("squeeze", "24")])
def test_ragged_rows_in_uneven_layers_stay_within_the_plan(allocator: str, budget: str) -> None:
    """A short row's budget beyond its own tokens is nobody's slots."""
    cache, _ = run(f"{allocator}+h2o@{budget}", [5, 40], None, new=STEPS)
    assert cache.plan is not None and cache.nbytes == cache.plan.nbytes
    if budget.endswith("KB"):
        assert cache.nbytes <= int(budget[:-2]) * 1000


def hybrid() -> Any:
    torch.manual_seed(0)
    return Gemma2ForCausalLM(
        Gemma2Config(
            num_hidden_layers=4,
            hidden_size=32,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=32,
            vocab_size=48,
            sliding_window=32,
        )
    ).eval()


KNOWN: list[dict[str, Any]] = [{}, {"prompt": 100, "new": 0}, {"prompt": 100, "new": 7}]
SIZES = [[100], [10] * 10, [10] + [1] * 90]


@product("sizes,known", SIZES, KNOWN, sample=star(SIZES, KNOWN, centers=[([], KNOWN[0]), (SIZES[1], {})]))
def test_windows_that_fill_later_count_in_a_budget_of_bytes(sizes: list[int], known: dict[str, Any]) -> None:
    model = hybrid()
    ids = torch.randint(3, 48, (1, 100), generator=torch.Generator().manual_seed(0))
    limit = 32_000
    with torch.no_grad(), kvpolicy.attach(model, f"h2o@{limit}B"):
        cache = PolicyCache(model, **known)
        start = 0
        for size in sizes:
            model(ids[:, start : start + size], cache=cache)
            start += size
            assert cache.nbytes <= limit
    assert cache.nbytes > 0.9 * limit
    if known:
        assert cache.plan is not None and cache.nbytes <= cache.plan.nbytes


def test_windows_that_alone_are_too_much_are_refused() -> None:
    model = hybrid()
    with (
        torch.no_grad(),
        kvpolicy.attach(model, "h2o@16KB"),
        pytest.raises(ValueError, match=r"must be at least [0-9]+B"),
    ):
        model(torch.ones(1, 10, dtype=torch.int64), cache=PolicyCache(model))


def test_bytes_are_a_limit_and_no_other_where_the_end_is_unknown() -> None:
    """It was that of the prompt and 256 tokens, however many bytes were left."""
    model = build("llama")
    with kvpolicy.attach(model, "window@1GiB"):
        cache = PolicyCache(model)
        forward(model, *make_batch([10], [10]), 0, 10, cache)
        assert int(cache.policy_layers[0].budget.amin()) > 10**6 and cache.nbytes < 2**24
    per_token = cache.nbytes // cache.policy_layers[0].store.contents.capacity
    assert int(cache.policy_layers[0].budget.amin()) * per_token <= 2**30
