"""What a cache was told of a text, and what it measured, through edits, turns and selected rows.

Budgets of a growing cache tell what it expects: a share of the prompt so far, and room up to the announced end. At the
end stand forwards that are added whole, beyond the budget, since `PolicyCache.hold_next` announced them.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import KVPolicyError, KVPolicyWarning, Policy, PolicyCache
from kvpolicy.engine.invariants import check_invariants
from kvpolicy.hf.budgets import BEYOND_BUDGET
from kvpolicy.text.errors import KVPolicyStateError
from tests.conformance.access import kept_positions
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch, talk
from tests.engine.filled import attached, prompted, row_of, steps
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
    with attached("window@0.5", [20], [20], layers=2) as (model, ids, mask):
        limit = model.config.max_position_embeddings
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
    with attached(GROWING, [20], turns := [20, 1, 1, 4], layers=2) as (model, ids, mask):
        cache = PolicyCache(model, new=8)
        talk(model, ids, mask, turns, cache)
        assert budget(cache) == [13 + 2]


@pytest.mark.parametrize(("policy", "wanted"), [(GROWING, 15), ("window@0.9", 27), ("pyramid+window@0.9", 27)])
def test_a_text_that_is_longer_than_announced(policy: str, wanted: int) -> None:
    """The announcement counts for nothing then, in the mean layer and in the one with the most."""
    with attached(policy, [20], [20, 10], layers=2) as (model, ids, mask):
        cache = prompted(model, ids, mask, 20, new=2)
        forward(model, ids, mask, 20, 30, cache)
        budgets = [int(layer.budget) for layer in cache.policy_layers]
        assert sum(budgets) == 2 * wanted
        assert all(layer.store.contents.capacity >= int(layer.budget) for layer in cache.policy_layers)
        assert policy != "pyramid+window@0.9" or max(budgets) == 30


@pytest.mark.parametrize("rows", [[0, 1], [1], [1, 0, 1]])
def test_massive_tokens_of_a_prompt_that_waits_in_chunks(rows: list[int]) -> None:
    """A row's are found in its first chunk; later chunks have none, and selected rows have their own."""
    with attached("kvzip:chunk=9:sinks=2+rotate@0.7", [20, 12], [20], layers=2) as (model, ids, mask):
        cache = prompted(model, ids, mask, 11, prompt=[20, 12])
        flags = [layer.massive for layer in cache.policy_layers]
        assert all(some is not None and some.shape == (2, 11) and bool(some.any(1).all()) for some in flags)
        if rows != [0, 1]:
            cache.batch_select_indices(torch.tensor(rows))
        forward(model, ids[rows], mask[rows], 11, 17, cache)
        for layer, some in zip(cache.policy_layers, flags, strict=True):
            assert some is not None and layer.massive is not None
            assert torch.equal(layer.massive, torch.nn.functional.pad(some[rows], (0, 6)))
        forward(model, ids[rows], mask[rows], 17, 20, cache)
        assert cache.plan is not None and cache.nbytes == cache.plan.nbytes


def test_massive_tokens_of_a_row_beside_one_that_begins_later() -> None:
    """When another row begins, only that one is looked at, so that the first has the pins that it has alone."""
    found: list[list[torch.Tensor]] = []
    with attached("kvzip:chunk=9:sinks=2+rotate@0.7", [20, 8], [20], layers=2) as (model, ids, mask):
        for rows in (2, 1):
            cache = prompted(model, ids[:rows], mask[:rows], 12, prompt=[20, 8][:rows])
            forward(model, ids[:rows], mask[:rows], 12, 20, cache)
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
    with contextlib.ExitStack() as hooks:
        for at, block in enumerate(model.model.layers):
            note = lambda _, args, at=at: streams.setdefault(at, []).append(args[0][0].double())  # noqa: E731
            for part in (block, block.pre_feedforward_layernorm):
                hooks.enter_context(part.register_forward_pre_hook(note))
        with kvpolicy.attach(model, "squeeze+window@0.5"):
            cache = prompted(model, ids, mask, 26)
    wanted = [torch.cosine_similarity(*streams[layer.layer_idx], dim=-1).mean() for layer in cache.policy_layers]
    torch.testing.assert_close(cache.cosines()[0].double(), torch.stack(wanted), atol=1e-6, rtol=0)


def test_generate_announces_all_new_tokens() -> None:
    with attached(GROWING, [12, 7], [12], layers=2) as (model, ids, mask):
        cache = PolicyCache(model)
        model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=6, do_sample=False, eos_token_id=None)
        assert cache.new == 6 and budget(cache) == [6 + 6, 3 + 6]


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
    with attached(policy, rows, [max(rows)] + [1] * STEPS) as (model, ids, mask):
        ids, mask = (ids, mask) if row is None else row_of(ids, mask, row)
        prompt = ids.shape[1] - STEPS
        cache = prompted(model, ids, mask, prompt, **known)
        return cache, steps(model, ids, mask, prompt, ids.shape[1], cache)[:, -1]


ALL_EXACT = [
    "window+tokenwise:residual_length=8:block_size=4@7",
    "h2o+kivi:residual_length=8:group_size=4@7",
    "snapkv:window=2+merge+tokenwise:residual_length=8:block_size=4@7",
]
"""Codecs whose full-precision buffer holds the whole budget, so that no slot is coded: a full buffer was taken for the
end of the slots where another row may still need more of them."""
ROWS = [[1, 13], [14, 17], [9, 40], [30, 8]]
ANNOUNCED = [None, 1, 5]
SAMPLE = [
    *each_once(POLICIES, ROWS[:0:-1], [None, *ANNOUNCED]),
    *((policy, ROWS[0], new) for policy in ALL_EXACT for new in ANNOUNCED),
]


@product("policy,rows,new", [*POLICIES, *ALL_EXACT], ROWS, ANNOUNCED, sample=SAMPLE)
def test_rows_go_on_as_alone(policy: str, rows: list[int], new: int | None) -> None:
    """A row whose neighbor has reached its budget was never given room, and then lost its oldest tokens."""
    both, logits = run(policy, rows, None, new=new)
    assert policy not in ALL_EXACT or not any(sum(layer.layout.coded) for layer in both.policy_layers)
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


KNOWN: list[dict[str, Any]] = [{}, {"prompt": 100, "new": 0}, {"prompt": 100, "new": 7}]
SIZES = [[100], [5] * 20, [5] + [1] * 95]
"""The first piece is shorter than the window."""


@product("sizes,known", SIZES, KNOWN, sample=star(SIZES, KNOWN, centers=[([], KNOWN[0]), (SIZES[1], {})]))
def test_windows_that_fill_later_count_in_a_budget_of_bytes(sizes: list[int], known: dict[str, Any]) -> None:
    limit = 18_000
    with attached(f"h2o@{limit}B", [100], [100], family="gemma2") as (model, ids, mask):
        cache = PolicyCache(model, **known)
        start = 0
        for size in sizes:
            forward(model, ids, mask, start, start + size, cache)
            start += size
            assert cache.nbytes <= limit
    assert cache.nbytes > 0.9 * limit
    if known:
        assert cache.plan is not None and cache.nbytes <= cache.plan.nbytes


def test_windows_that_alone_are_too_much_are_refused() -> None:
    refused = pytest.raises(ValueError, match=r"must be at least [0-9]+B")
    with attached("h2o@4KB", [10], [10], family="gemma2") as (model, ids, mask), refused:
        forward(model, ids, mask, 0, 10, PolicyCache(model))


def test_bytes_are_a_limit_and_no_other_where_the_end_is_unknown() -> None:
    """It was that of the prompt and 256 tokens, however many bytes were left."""
    with attached("window@1GiB", [10], [10]) as (model, ids, mask):
        cache = prompted(model, ids, mask, 10)
        assert int(cache.policy_layers[0].budget.amin()) > 10**6 and cache.nbytes < 2**24
    per_token = cache.nbytes // cache.policy_layers[0].store.contents.capacity
    assert int(cache.policy_layers[0].budget.amin()) * per_token <= 2**30


HOLD_TURNS = [40, 7, 1, 1, 6, 1, 9, 1]
"""A prompt, a question, an answer, more questions, one of a single token, a prompt that competes, and a step."""

HOLDS = {1, 4, 5}
"""The turns that are added whole."""

PLANNED = ["snapkv:window=4@0.3", "snapkv:window=4:decode=grow@0.3", "full+kivi:bits=4:group_size=4:residual_length=4"]

LAYERED = ["h2o@0.3", "uniform/adakv+snapkv:window=4@0.4"]
HOLDING = [
    Policy.by_layer(LAYERED, budget=0.5),
    "window@0.3",
    "snapkv:window=4@0.3",
    "snapkv:window=4:decode=grow@0.3",
    "keydiff:every=2@0.3",
    "kvzip:chunk=9@0.3",
    "full",
    "squeeze+h2o@0.3",
    "kvcompose+kvzip:chunk=9@0.3",
    "uniform/adakv+snapkv:window=4@0.4",
    "uniform/adakv+snapkv:window=4:decode=grow@0.4",
    "uniform/adakv+h2o+tokenwise@0.4",
    "snapkv:window=4+kivi:bits=4:group_size=4:residual_length=4@0.4",
    "h2o+mikv@0.4",
    "snapkv:window=4+merge@0.3",
    "h2o@4096",
    "full+quest:page=4:read=8",
]


def held(cache: PolicyCache, layer: int, row: int) -> list[set[int]]:
    return [set(head) for head in kept_positions(cache.policy_layers[layer])[row]]


def hold_and_talk(model: Any, cache: PolicyCache, ids: Tensor, mask: Tensor) -> list[Tensor]:
    """Logits of each turn, without padding before a single row."""
    rows = len(ids)
    logits: list[Tensor] = []
    stop = ids.shape[1] - sum(HOLD_TURNS)
    for number, size in enumerate(HOLD_TURNS):
        before = [[held(cache, layer, row) for row in range(rows)] for layer in range(2)] if number else []
        if number in HOLDS:
            cache.hold_next()
        start = max(stop, 0)
        stop += size
        logits.append(forward(model, ids, mask, start, stop, cache))
        for layer in cache.policy_layers:
            check_invariants(layer.store)
        # A prompt that competes again evicts tokens, but no slot goes away.
        assert cache.plan is not None and cache.plan.nbytes == cache.nbytes, number
        assert number not in HOLDS or BEYOND_BUDGET in cache.plan.note
        for layer, heads_of in enumerate(before):
            for row, heads in enumerate(heads_of):
                last = int(cache.policy_layers[layer].length[row])
                for was, now in zip(heads, held(cache, layer, row), strict=True):
                    if number in HOLDS:
                        assert now == was | set(range(last - size, last))
                    assert size > 1 or len(now) >= len(was), "steps evict no more than they add"
    return logits


@pytest.mark.parametrize("policy", HOLDING, ids=str)
def test_everything_is_kept_until_the_next_prompt(policy: str | Policy) -> None:
    """Of padded rows, with one token and several, and answers in between; a row is as alone."""
    lengths = [40, 23]
    with attached(policy, lengths, HOLD_TURNS, layers=2) as (model, ids, mask):
        both = PolicyCache(model, new=sum(HOLD_TURNS[1:]))
        logits = hold_and_talk(model, both, ids, mask)
        assert both.plan is not None and BEYOND_BUDGET not in both.plan.note
        for row in range(len(lengths)):
            alone = PolicyCache(model, new=sum(HOLD_TURNS[1:]))
            for mine, its in zip(logits, hold_and_talk(model, alone, *row_of(ids, mask, row)), strict=True):
                torch.testing.assert_close(mine[row, -its.shape[1] :], its[0], atol=2e-4, rtol=1e-3)


def test_a_plan_counts_a_held_turn() -> None:
    model = build("llama", layers=2)
    for policy in PLANNED:
        planned = kvpolicy.plan(model, policy, prompt=40, held_next=7, new=1)
        with attached(policy, [40], [40, 7], layers=2) as (_, ids, mask):
            cache = prompted(model, ids, mask, 40, new=8)
            cache.hold_next()
            forward(model, ids, mask, 40, 47, cache)
        assert planned.nbytes == cache.nbytes
        assert planned.full_nbytes > kvpolicy.plan(model, policy, prompt=40).full_nbytes
    with pytest.raises(KVPolicyError, match="held_next must be 0 for a policy with budgets by head"):
        kvpolicy.plan(model, "uniform/adakv+h2o@0.3", prompt=40, held_next=7)


@pytest.mark.parametrize(
    "policy", ["uniform/adakv+kvzip:decode=grow:chunk=9@0.3", "global/adakv+kvzip:decode=grow:chunk=9@0.3"]
)
def test_heads_of_a_growing_cache_get_slots_for_what_is_added(policy: str) -> None:
    """As many pages as the new tokens need, however many tokens the fullest head holds, and none that are free."""
    for announced in (0, 7):
        with attached(policy, [40, 33], [40, 7], layers=2) as (model, ids, mask):
            cache = prompted(model, ids, mask, 40, prompt=mask[:, :40].sum(-1), new=announced)
            before = [layer.store.tensors.positions.shape for layer in cache.policy_layers]
            assert any(len({*map(len, held(cache, layer, 0))}) > 1 for layer in range(2))
            cache.hold_next()
            forward(model, ids, mask, 40, 47, cache)
        for layer, (_, pages, size) in zip(cache.policy_layers, before, strict=True):
            more = -(-(7 - announced) // size) * layer.store.contents.shape.heads
            assert layer.store.tensors.positions.shape[1:] == (pages + more, size)


def test_a_held_turn_must_follow_a_prompt() -> None:
    with attached("kvzip:chunk=9@0.3", [40], [40, 7], layers=2) as (model, ids, mask):
        cache = PolicyCache(model, prompt=47)
        for start, stop in ((0, 40), (40, 47)):  # before the announced prompt, and before its last chunk
            with pytest.raises(KVPolicyStateError, match=r"must hold a whole prompt before hold_next\(\)"):
                cache.hold_next()
            forward(model, ids, mask, start, stop, cache)
        cache.hold_next()
        with pytest.raises(KVPolicyStateError, match=r"save\(\) must not follow hold_next"):
            cache.save("nowhere.safetensors")
        with pytest.raises(KVPolicyStateError, match=r"mark\(\) must not be called between hold_next"):
            cache.mark(2)
        cache.reset()
        assert not cache.holds_next


def test_a_copy_holds_its_next_forward_too_and_a_mark_refuses_to() -> None:
    with attached("window@10", [40], [40, 7], layers=2) as (model, ids, mask):
        cache = prompted(model, ids, mask, 40)
        cache.hold_next()
        other = cache.fork()
        for one in (cache, other):
            forward(model, ids, mask, 40, 47, one)
            assert len(held(one, 1, 0)[0]) == 17
        cache.mark(2)
        with pytest.raises(KVPolicyStateError, match=r"hold_next\(\) must be called without a mark"):
            cache.hold_next()


@pytest.mark.parametrize("policy", ["h2o@8", PLANNED[2], "uniform/adakv+h2o@24"])
def test_a_plan_after_a_file_of_a_held_turn_has_the_slots_that_stay(policy: str, tmp_path: Path) -> None:
    model = build("llama")
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = PolicyCache(model, prompt=25, new=20)
        model(torch.randint(3, 40, (1, 25)), cache=cache)
        cache.hold_next()
        model(torch.randint(3, 40, (1, 8)), cache=cache)
        cache.save(tmp_path / "cache")
        cache = PolicyCache.load(model, tmp_path / "cache")
        for size in (9, 1):
            model(torch.randint(3, 40, (1, size)), cache=cache)
            assert cache.plan is not None and cache.plan.nbytes == cache.nbytes
