"""What a cache was told of a text, and what it measured, through edits, turns and selected rows.

Budgets of a growing cache tell what it expects: a share of the prompt so far, and room up to the announced end.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

import kvpolicy
from kvpolicy import KVPolicyError, KVPolicyWarning, PolicyCache
from tests.conformance.access import kept_positions
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch
from tests.engine.filled import attached, prompted
from tests.sampling import each_once, product, star

GROWING = "h2o:decode=grow@0.5"


def budget(cache: PolicyCache) -> list[int]:
    """The budget of each row, which all layers have."""
    found = [layer.budget.tolist() for layer in cache.policy_layers]
    assert all(rows == found[0] for rows in found)
    return found[0]


@pytest.mark.parametrize("by", [4, -4])
def test_a_shift_moves_the_announced_end(by: int) -> None:
    with attached(GROWING, [20], [20, 20], layers=2) as (model, ids, mask):
        cache = prompted(model, ids, mask, 20, new=8)
        assert budget(cache) == [10 + 8]
        cache.shift(10, by)
        seen = 20 + by
        forward(model, ids, mask, seen, seen + 3, cache)
        assert budget(cache) == [(seen + 3) // 2 + 5]


def test_a_shift_counts_in_the_trained_length() -> None:
    """Tokens that are moved behind the last trained position are remarked on at the next one."""
    model = build("llama", layers=2)
    limit = model.config.max_position_embeddings
    ids, mask = make_batch([20], [20])
    with kvpolicy.attach(model, "window@0.5"):
        cache = prompted(model, ids, mask, 20)
        cache.shift(10, limit - 20)
        assert cache.get_seq_length() == limit
        with torch.no_grad(), pytest.warns(KVPolicyWarning, match="was trained for"):
            model(ids[:, :1], cache=cache)


@pytest.mark.parametrize("rows", [[1], [1, 0, 1], [0, 0, 1, 1]])
def test_the_announced_end_of_selected_rows(rows: list[int]) -> None:
    with attached(GROWING, [20, 9], [20, 3], layers=2) as (model, ids, mask):
        cache = prompted(model, ids, mask, 20, new=8)
        assert budget(cache) == [10 + 8, 4 + 8]
        if rows == [0, 0, 1, 1]:
            cache.batch_repeat_interleave(2)
        else:
            cache.batch_select_indices(torch.tensor(rows))
        forward(model, ids[rows], mask[rows], 20, 23, cache)
        assert budget(cache) == [(11 + 5, 6 + 5)[row] for row in rows]


def test_what_was_measured_of_selected_rows() -> None:
    with attached("squeeze+window@0.5", [20, 9], [20, 3], layers=4) as (model, ids, mask):
        cache = prompted(model, ids, mask, 20)
        before = cache.cosines()
        cache.batch_select_indices(torch.tensor([1, 0, 1]))
        assert torch.equal(cache.cosines(), before[[1, 0, 1]])
        cache.batch_repeat_interleave(2)
        assert torch.equal(cache.cosines(), before[[1, 1, 0, 0, 1, 1]])


def test_a_later_turn_does_not_move_the_announced_end() -> None:
    with attached(GROWING, [20], [20, 1, 1, 4], layers=2) as (model, ids, mask):
        cache = PolicyCache(model, new=8)
        for start, stop in ((0, 20), (20, 21), (21, 22), (22, 26)):
            forward(model, ids, mask, start, stop, cache)
        assert budget(cache) == [13 + 2]


@pytest.mark.parametrize(("policy", "wanted"), [(GROWING, 15), ("window@0.9", 27), ("pyramid+window@0.9", 27)])
def test_a_text_that_is_longer_than_announced(policy: str, wanted: int) -> None:
    """The announcement counts for nothing then, in the mean layer and in the one with the most."""
    with attached(policy, [20], [20, 10], layers=2) as (model, ids, mask):
        cache = prompted(model, ids, mask, 20, new=2)
        forward(model, ids, mask, 20, 30, cache)
        budgets = [int(layer.budget) for layer in cache.policy_layers]
        assert sum(budgets) == 2 * wanted and all(
            layer.store.contents.capacity >= most for layer, most in zip(cache.policy_layers, budgets, strict=True)
        )
        assert policy != "pyramid+window@0.9" or max(budgets) == 30


@pytest.mark.parametrize("rows", [None, [1], [1, 0, 1]])
def test_massive_tokens_of_a_prompt_that_waits_in_chunks(rows: list[int] | None) -> None:
    """A row's are found in its first chunk; later chunks have none, and selected rows have their own."""
    with attached("kvzip:chunk=9:sinks=2+rotate@0.7", [20, 12], [20], layers=2) as (model, ids, mask):
        cache = prompted(model, ids, mask, 11, prompt=[20, 12])
        flags = [layer.massive for layer in cache.policy_layers]
        assert all(some is not None and some.shape == (2, 11) and bool(some.any(1).all()) for some in flags)
        picked = [0, 1] if rows is None else rows
        if rows is not None:
            cache.batch_select_indices(torch.tensor(rows))
        forward(model, ids[picked], mask[picked], 11, 17, cache)
        for layer, some in zip(cache.policy_layers, flags, strict=True):
            assert some is not None and layer.massive is not None
            assert torch.equal(layer.massive, torch.nn.functional.pad(some[picked], (0, 6)))
        forward(model, ids[picked], mask[picked], 17, 20, cache)
        assert cache.plan is not None and cache.nbytes == cache.plan.nbytes


def test_massive_tokens_of_a_row_beside_one_that_begins_later() -> None:
    """When another row begins, only that one is looked at, so that the first has the pins that it has alone."""
    model = build("llama", layers=2)
    ids, mask = make_batch([20, 8], [20])
    found: list[list[torch.Tensor]] = []
    with kvpolicy.attach(model, "kvzip:chunk=9:sinks=2+rotate@0.7"):
        for rows in (2, 1):
            cache = PolicyCache(model, prompt=[20, 8][:rows])
            for start, stop in ((0, 12), (12, 20)):
                forward(model, ids[:rows], mask[:rows], start, stop, cache)
            limits = [layer.store.tensors.limits for layer in cache.policy_layers]
            found.append([limit.pins[0] for limit in limits if limit is not None])
    assert len(found[0]) == 2 and all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert all(bool((pins < 12).all()) for pins in found[0])


def test_the_first_chunk_plans_the_windows_of_the_whole_prompt() -> None:
    with attached("window@0.5", [9], [9], family="gemma2", layers=2) as (model, ids, mask):
        cache = prompted(model, ids, mask, 2, prompt=9, new=1)
        assert cache.plan is not None
        planned = kvpolicy.plan(model.config, "window@0.5", prompt=9, new=1, dtype=torch.float32)
        assert cache.plan.unmanaged == planned.unmanaged and cache.plan.peak_nbytes == planned.peak_nbytes


@pytest.mark.parametrize("new", [None, 7])
def test_a_whole_prompt_is_kept_by_heads_with_budgets_of_their_own(new: int | None) -> None:
    """Pages are divided for the prompt; those of generated tokens are in addition."""
    with attached("uniform/adakv+h2o:decode=grow@1.0", [30], [30], layers=2) as (model, ids, mask):
        cache = prompted(model, ids, mask, 30, new=new)
        assert all(bool((layer.store.geometry.tokens_by_head() == 30).all()) for layer in cache.policy_layers)


def test_learned_positions_end_where_the_longest_row_does() -> None:
    """Positions are those of a row's own tokens, so that padding takes none."""
    model = build("opt")
    limit = model.config.max_position_embeddings
    ids, mask = make_batch([limit, 5], [limit, 1])
    with kvpolicy.attach(model, "window@8"), torch.no_grad():
        cache = PolicyCache(model)
        model(ids[:, :limit], attention_mask=mask[:, :limit], cache=cache)
        with pytest.raises(KVPolicyError, match=f"must be below {limit}, .* got {limit}"):
            model(ids[:, limit:], attention_mask=mask, cache=cache)
        padded = torch.nn.functional.pad(mask[:1, :limit], (3, 0))
        model(torch.nn.functional.pad(ids[:1, :limit], (3, 0)), attention_mask=padded, cache=PolicyCache(model))


def test_padding_takes_learned_positions_where_the_model_counts_columns() -> None:
    """What is refused here is an index out of range in the model, or a broken device."""
    model = build("gpt2")
    limit = model.config.n_positions
    ids, mask = make_batch([limit - 2, 5], [limit + 1])  # the tokens alone would fit
    with torch.no_grad(), pytest.raises(IndexError):
        model(ids, attention_mask=mask)
    places = (mask.cumsum(-1) - 1).clamp_min(0)
    with kvpolicy.attach(model, "window@8"), torch.no_grad():
        with pytest.raises(KVPolicyError, match=f"must be below {limit}, .* got {limit}"):
            model(ids, attention_mask=mask, cache=PolicyCache(model))
        model(ids, attention_mask=mask, position_ids=places, cache=PolicyCache(model))


def test_what_attention_changes_is_measured_in_full_precision() -> None:
    """The difference of two numbers in half precision is not rounded to half precision again."""
    model = build("gemma2", torch.bfloat16)
    ids, mask = make_batch([26], [26])
    streams: dict[int, list[torch.Tensor]] = {}
    hooks = [
        part.register_forward_pre_hook(
            lambda _, args, at=at: streams.setdefault(at, []).append(args[0][0].double()),
        )
        for at, block in enumerate(model.model.layers)
        for part in (block, block.pre_feedforward_layernorm)
    ]
    with kvpolicy.attach(model, "squeeze+window@0.5"):
        cache = prompted(model, ids, mask, 26)
    for hook in hooks:
        hook.remove()
    wanted = [torch.cosine_similarity(*streams[layer.layer_idx], dim=-1).mean() for layer in cache.policy_layers]
    torch.testing.assert_close(cache.cosines()[0].double(), torch.stack(wanted), atol=1e-6, rtol=0)


def test_generate_announces_all_new_tokens() -> None:
    model = build("llama", layers=2)
    ids, mask = make_batch([12, 7], [12])
    with torch.no_grad(), kvpolicy.attach(model, GROWING) as handle:
        model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None)
        assert handle.cache is not None and handle.cache.new == 6 and budget(handle.cache) == [6 + 6, 3 + 6]


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
