"""Rule 1: `nbytes` is what `plan` said and what is stored, to the byte."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy.engine.state import bytes_by_kind, tensors
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.kernels import compiled
from kvpolicy.protocols import HeadShape
from kvpolicy.registry import lookup
from kvpolicy.text.budget import bytes_of
from tests.conformance.models import FAMILIES, build
from tests.conformance.play import forward, make_batch
from tests.conformance.policies import ALLOCATORS, CODECS, RANKED, SELECTORS, is_refused, with_profile, words
from tests.engine.filled import attached, prompted
from tests.engine.live import stored_bytes
from tests.sampling import each_once, pairwise, product

PROMPT = 40
NEW = 6
ROWS = {"one": [PROMPT], "padded": [PROMPT, 33, 20]}
BUDGETS = ["0.25", "0.5", "1.0", "12", "14KiB", "30KB"]
GROWING = ["window:decode=grow", "h2o:decode=grow", "kvcrush/snapkv:window=6:decode=grow", "full"]


def run(
    family: str, policy: kvpolicy.Policy | str, rows: list[int], *, hint: int | None = NEW, prompt: Any = None
) -> PolicyCache:
    """A prompt and `NEW` steps; the cache's bytes never change and are always what is stored."""
    with attached(policy, rows, [PROMPT] + [1] * NEW, family=family) as (model, ids, mask):
        cache = prompted(model, ids, mask, PROMPT, prompt=prompt, new=hint)
        first = cache.nbytes
        _check_stored(cache)
        for column in range(PROMPT, PROMPT + NEW):
            forward(model, ids, mask, column, column + 1, cache)
            assert cache.policy_layers[0].store.spec.selector.decode == "grow" or cache.nbytes == first
        _check_stored(cache)
    return cache


def _check_stored(cache: PolicyCache) -> None:
    """A sliding window of transformers is a view of one token more; all else is exact."""
    layers: list[Any] = [layer for layer in cache.layers if not isinstance(layer, PolicyLayer)]
    alone = sum(layer.keys[:, :, :1].nbytes * 2 for layer in layers)
    assert cache.nbytes <= stored_bytes(cache) <= cache.nbytes + alone


def check(family: str, policy: kvpolicy.Policy | str, rows: list[int], *, measured: bool = True) -> None:
    cache = run(family, policy, rows)
    plan = kvpolicy.plan(build(family).config, policy, batch=len(rows), prompt=rows, new=NEW, dtype=torch.float32)
    assert cache.plan is not None and cache.nbytes == cache.plan.nbytes == cache.report().nbytes
    if measured:
        assert cache.nbytes == plan.nbytes and cache.plan.full_nbytes == plan.full_nbytes
        assert [layer.nbytes for layer in plan.layers] == [layer.nbytes for layer in cache.plan.layers]


def with_head_state(budget: str, selector: str, batch: int) -> str:
    """A budget of bytes, and on top what the selector holds per head and row however few the tokens are."""
    if not budget.endswith("B"):
        return budget
    config = build("llama").config
    heads = config.num_key_value_heads
    shape = HeadShape(config.num_attention_heads // heads, config.head_dim)
    state = kvpolicy.Policy.parse(words(selector)).selector.alloc(batch, heads, 0, "cpu", shape)
    return f"{bytes_of(budget) + config.num_hidden_layers * sum(t.nbytes for t in tensors(state))}B"


UNMEASURED = [name for name in ALLOCATORS if not lookup(name)[1]().layer_metric]
"""Allocators whose budgets do not depend on the prompt."""
METHODS = (UNMEASURED, SELECTORS, CODECS, BUDGETS, [*ROWS])


def are_combined(row: Sequence[Any]) -> bool:
    """Whether the selector and the codec of a row may be combined."""
    return not is_refused(row[1], row[2])


SAMPLE = pairwise(
    *METHODS[:3], ["0.5", "12", "14KiB"], [*ROWS], allowed=are_combined, apart=[(0, 1), (1, 2), (1, 3), (1, 4)]
)
"""A selector's bytes depend on no other part; codecs meet one budget of each kind."""


@product("allocator,selector,codec,budget,rows", *METHODS, sample=SAMPLE, allowed=are_combined)
def test_plan_is_what_is_stored(allocator: str, selector: str, codec: str, budget: str, rows: str) -> None:
    budget = with_head_state(budget, selector, len(ROWS[rows]))
    check("llama", words(allocator, selector, codec, budget=budget), ROWS[rows])


@product("selector,codec", GROWING, CODECS, sample=each_once(GROWING, CODECS))
def test_growing(selector: str, codec: str) -> None:
    """A cache that grows holds room for exactly the new tokens that it was told of."""
    budget = "1.0" if selector == "full" else "0.5"
    ranking = "window" if selector == "full" and codec in RANKED else selector
    check("llama", words(ranking, codec, budget=budget), [PROMPT, 22])


OFTEN = ["gemma2", "qwen3", "gpt_neox", "opt", "falcon_single"]


@product("family", [*FAMILIES, "gemma4"], sample=[(name,) for name in [*OFTEN, "gemma4"]])
def test_families(family: str) -> None:
    """Also where sliding layers, which are left alone, have other heads than full ones, as in Gemma 4."""
    check(family, words("pyramid" if family in FAMILIES else "uniform", "h2o", "kivi"), [PROMPT, 30])


def test_bytes_of_layers_of_two_sizes() -> None:
    check("gemma4", "h2o@16KiB", [PROMPT])


@pytest.mark.parametrize("budget", ["0.25", "12", "14KiB"])
def test_squeeze(budget: str, tmp_path: Path) -> None:
    """With a profile the plan is exact; without one a plan from a config alone only knows the sum of tokens."""
    check("llama", with_profile(f"squeeze+h2o@{budget}", tmp_path, [0.2, 0.9, 0.4]), [PROMPT, 30])
    check("llama", f"squeeze+h2o@{budget}", [PROMPT, 30], measured=False)


@product("selector", SELECTORS, sample=[("h2o",), ("expected",), ("kvcrush",)])
def test_without_a_hint(selector: str) -> None:
    cache = run("llama", words(selector), [PROMPT, 30], hint=None)
    assert cache.plan is not None and cache.nbytes == cache.plan.nbytes


@pytest.mark.parametrize("policy", ["squeeze+snapkv@64KiB", "h2o+rotate:block_size=4@0.5", "window:decode=grow@0.5"])
def test_what_a_cache_was_told_of_its_rows_is_counted(policy: str) -> None:
    run("llama", policy, [PROMPT, 33], prompt=[PROMPT, 33])


BOUNDED = (ALLOCATORS, SELECTORS, ["11KiB", "16KiB", "20000B"])


@product("allocator,selector,budget", *BOUNDED, sample=each_once(*BOUNDED))
def test_bytes_are_a_bound(allocator: str, selector: str, budget: str) -> None:
    """All parts counted, for the whole batch; and one more token per layer would not fit."""
    budget = with_head_state(budget, selector, 2)
    policy = kvpolicy.Policy.parse(words(allocator, selector, budget=budget))
    cache = run("llama", policy, [PROMPT, 30])
    limit = bytes_of(budget)
    assert cache.nbytes <= limit
    assert cache.plan is not None and cache.plan.nbytes == cache.nbytes
    if allocator == "uniform":
        tokens = cache.plan.layers[0].tokens
        more = kvpolicy.Policy(selector=policy.selector, budget=tokens + 1)
        assert tokens == PROMPT + NEW or run("llama", more, [PROMPT, 30]).nbytes > limit


def test_bytes_are_really_freed() -> None:
    """Not a mask over a full cache: half the budget is half the bytes, beside positions."""
    with attached("window@0.5", [PROMPT], [PROMPT]) as (model, ids, mask):
        cache = prompted(model, ids, mask, PROMPT)
    tokens = PROMPT // 2
    counters = 2 * 8 + 8
    digest = 8  # of the one row's mask, once for the whole cache
    assert stored_bytes(cache) == 3 * (tokens * 2 * (2 * 8 * 4 + 4) + counters) + digest


def test_largest_batch() -> None:
    """As many as fit while they are prefilled, to the byte."""
    plan = kvpolicy.plan(build("llama").config, "window@0.5", batch=10, prompt=100, dtype=torch.float32)
    assert plan.prefill_nbytes > plan.nbytes
    assert plan.largest_batch(plan.prefill_nbytes) == 10
    assert plan.largest_batch(plan.prefill_nbytes - 1) == 9
    assert plan.largest_batch("1GiB") == plan.largest_batch(2**30) > 10
    assert plan.largest_batch("2TiB") == plan.largest_batch(2**41) > plan.largest_batch("1TiB")
    refused: list[tuple[Any, str]] = [
        (24e9, "must be an integer"),
        ("24", "must be an amount"),
        (-1, "must be between 0"),
        (None, "must be"),
    ]
    for wrong, named in refused:
        with pytest.raises(kvpolicy.KVPolicyError, match=named):
            plan.largest_batch(wrong)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    model = build("llama", dtype)
    policy = words("h2o", "kivi")
    with kvpolicy.attach(model, policy):
        cache = prompted(model, *make_batch([PROMPT], [PROMPT]), PROMPT)
    assert stored_bytes(cache) == cache.nbytes
    assert cache.nbytes == kvpolicy.plan(model.config, policy, prompt=PROMPT, dtype=dtype).nbytes


def test_a_loop_without_announced_length_reserves_a_share() -> None:
    """A cache that grows has slots for an eighth more than it holds, where it had 256 more."""
    with attached("full", [200], [200, 1]) as (model, ids, mask):
        cache = prompted(model, ids, mask, 200)
        assert cache.policy_layers[0].layout.slots == 225
        assert cache.nbytes < 1.2 * cache.full_nbytes


@pytest.mark.parametrize("selector", SELECTORS)
def test_a_chunk_that_waits_is_counted(selector: str) -> None:
    """With what its statistics have gathered, and without what they needed for the chunk alone."""
    with attached(words(selector), [PROMPT, 33], [PROMPT, NEW], layers=2, chunks="hold") as (model, ids, mask):
        cache = PolicyCache(model, prompt=[PROMPT, 33], new=NEW)
        for start, stop in ((0, 20), (20, 30)):
            forward(model, ids, mask, start, stop, cache)
            assert cache.policy_layers[0].pending is not None
            assert stored_bytes(cache) == cache.nbytes


class Stage(NamedTuple):
    keys: Tensor
    key_scale: Tensor
    values: Tensor
    zero_of_values: Tensor


def test_kinds_follow_the_names_of_fields() -> None:
    first, second, third, fourth = (torch.zeros(count, dtype=torch.uint8) for count in (1, 10, 100, 1000))
    stage = Stage(first, second, third, fourth)
    more = [torch.zeros(2, dtype=torch.float16), torch.zeros(3)]
    found = bytes_by_kind(more, [stage, stage], first, (third, (fourth,)), [second])
    kinds = {"exact": 4 + 12, "codes": 202, "scales": 2020, "positions": 1, "statistics": 1100}
    assert found == kinds | {"index": 0, "counters": 10}


def test_reason_for_an_even_division_and_another_remark() -> None:
    """Two layers make no three groups."""
    reports: list[Any] = []
    for layers in (2, 3):
        model = build("llama", layers=layers)
        with torch.no_grad(), kvpolicy.attach(model, "squeeze+window+kivi@0.5") as handle:
            model(torch.arange(40)[None], use_cache=True)
            reports.append(handle.report())
    even, uneven = reports
    assert [layer.budget for layer in even.layers] == [(20,), (20,)]
    remarks = [part.split(",")[0] for part in even.note.split("; ")]
    assert remarks == ["row(s) 0: all layers have the same budget", "no token is encoded"]
    assert even.note in str(even) and "the same budget" not in uneven.note
    assert sum(layer.budget[0] for layer in uneven.layers) == 20 * 3
    assert json.loads(json.dumps(uneven.as_dict()))["nbytes"] == uneven.nbytes


@pytest.mark.parametrize(
    ("words", "prompt", "told"),
    [
        ("window@40", 60, ""),
        ("window+kivi:residual_length=128@40", 60, "no token is encoded"),
        ("window+tokenwise:residual_length=0:block_size=4@40", 60, ""),
        (
            "window+tokenwise:residual_length=8:block_size=8@40",
            60,
            "full-precision buffer, whose length its parameters set, takes ",
        ),
        ("window@0.2", 40, "row(s) 0: the budget 0.2 keeps as few as 8 of 40 prompt tokens"),
        ("window@0.5", 40, ""),
        ("window@4", 40, ""),  # a number of tokens was the user's own
        ("window@20", 200, "the budget @20 is 20 tokens per layer; for 20% of the prompt, write @0.2"),
        ("window@20", 100, ""),  # of so many tokens, a percentage is no more
        ("window@5", 200, "for 5% of the prompt, write @0.05"),
        ("window@64", 200, ""),
        ("window@0.3", 200, ""),
        ("window@64KiB", 200, ""),
    ],
)
def test_a_policy_that_may_not_be_meant_is_remarked_on(words: str, prompt: int, told: str) -> None:
    """Codecs that code little, and budgets that keep little or look like percentages.

    The plan says so before anything runs, and the report after it.
    """
    model = build("llama")
    before = kvpolicy.plan(model.config, words, prompt=prompt).note
    with torch.no_grad(), kvpolicy.attach(model, words) as handle:
        model(torch.arange(prompt)[None] % 48, use_cache=True)
        assert handle.report().note == before
    assert (told in before) if told else not before


@pytest.mark.parametrize(
    ("words", "compiler", "told"),
    [
        ("window+tokenwise@4096", "", True),
        ("window+tokenwise@4096", "g++", False),
        ("window+tokenwise@1024", "", False),
        ("window@4096", "", False),
    ],
)
def test_many_codes_without_a_compiler_are_remarked_on(
    words: str, compiler: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_failures", [])
    monkeypatch.setattr(compiled, "_is_on", True)
    monkeypatch.setattr(compiled, "_missing_compiler", lambda device: "" if compiler else "C++ compiler")
    note = kvpolicy.plan(build("llama").config, words, prompt=8192).note
    assert ("codes are decoded before they are read, which is slower, since no C++ compiler was found" in note) == told


@pytest.mark.parametrize(("prompt", "new", "rows"), [([9, 60], 4, ""), ([9, 61], 4, "row(s) 1"), (65, 0, "every row")])
def test_a_text_behind_the_trained_positions_is_remarked_on(prompt: int | list[int], new: int, rows: str) -> None:
    """The plan says so; when it is fed, a warning does."""
    config = LlamaConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, max_position_embeddings=64)
    note = kvpolicy.plan(config, "window@32", batch=2, prompt=prompt, new=new).note
    told = f"{rows}: prompt and new tokens, up to 65, exceed the 64 positions"
    assert note.startswith(told) if rows else not note
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert not kvpolicy.plan(config, "window@32", batch=2, prompt=prompt, new=new).note, "reaches further by itself"
