"""Decode steps are undone bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import KVPolicyError, KVPolicyStateError, Policy, PolicyCache
from kvpolicy.engine.invariants import check_invariants
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch
from tests.conformance.policies import CODECS, MERGERS, RANKED, SELECTORS, is_refused, words
from tests.engine.filled import attached, prompted, steps
from tests.engine.live import stored_bytes, tensors_of
from tests.sampling import Row, each_once, product, star

PROMPT = 26
STEPS = 24
BEFORE = 3
"""Steps before the mark."""
AFTER = 5
"""Steps after the rollback."""
CUTS = [(0, 0), (1, 0), (5, 0), (5, 2), (5, 4), (8, 8)]
"""Tokens fed under the mark, and how many of them are accepted."""


def same(one: PolicyCache, other: PolicyCache) -> None:
    """Two caches hold the same tensors, bit for bit."""
    first = dict(tensors_of(one))
    second = dict(tensors_of(other))
    assert first.keys() == second.keys()
    differ = [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]
    assert not differ, differ
    assert one.nbytes == other.nbytes and str(one.report()) == str(other.report())


def undone(
    family: str, policy: str | Policy, lengths: list[int], fed: int, accepted: int, new: int | None = STEPS
) -> None:
    """A cache that took tokens back is as one that never saw them, and goes on alike."""
    model = build(family)
    ids, mask = make_batch(lengths, [PROMPT, STEPS])
    drafts, _ = make_batch(lengths, [PROMPT, STEPS], seed=1)
    middle = PROMPT + BEFORE
    with kvpolicy.attach(model, policy):
        cache, twin = caches = [prompted(model, ids, mask, PROMPT, new=new) for _ in range(2)]
        for each in caches:
            steps(model, ids, mask, PROMPT, middle, each)
        before = cache.nbytes
        cache.mark(most=max(fed, 1))
        assert cache.nbytes > before
        given = torch.cat([ids[:, : middle + accepted], drafts[:, middle + accepted :]], 1)
        for column in range(middle, middle + fed):
            forward(model, given, mask, column, column + 1, cache)
        cache.rollback(accepted)
        for layer in cache.policy_layers:
            check_invariants(layer.store)
        assert int(cache.policy_layers[0].store.tensors.columns) == cache.get_seq_length(), "the host's count"
        for column in range(middle, middle + accepted):
            forward(model, ids, mask, column, column + 1, twin)
        same(cache, twin)
        start = middle + accepted
        assert torch.equal(*(steps(model, ids, mask, start, start + AFTER, each) for each in caches))
        same(cache, twin)


CHOOSING = [*SELECTORS, "full"]
LENGTHS = [[PROMPT, 17, 11], [PROMPT]]
OTHERS = [
    *(words("h2o" if number % 2 else "snapkv", merger) for number, merger in enumerate(MERGERS)),
    *(f"full+{reader}:read=8" for reader in ("exact", "reuse/exact")),
    "window+quest:read=8:page=4@0.5",
    "h2o+labels:read=8:dense=0:host=true@0.7",
    words("full", "kivi", "labels:read=8", budget="1.0"),
    words("h2o", "tokenwise", "sparq:read=8", budget="0.7"),
    "h2o+centroids:read=8:page=4@0.7",
    words("h2o", "tokenwise", "centroids:page=1:read=8", budget="0.7"),
    "h2o+retrieval:recent=1:read=8:cluster=4:rebuild=3@0.7",
    "window+shadowkv:joint=true:read=8:page=2:rank=3:recent=2:rebuild=3@0.7",
    "h2o+shadowkv:read=8:page=2:rank=3:recent=2:rebuild=3:host=true@0.7",
    "uniform/even+h2o@0.7",
    "uniform/adakv+h2o+compensate@0.7",
    words("uniform/adakv", "h2o", "compensate", "tokenwise", budget="0.7"),
    "uniform/adakv+snapkv:decode=grow@0.7",
    "uniform/adakv+expected:sinks=2:horizon=6:decode=grow@0.7",
    "pyramid+h2o@12",
]


def combine(row: Row) -> bool:
    """Whether a selector and a codec are combined; `full` has no ranking for those that need one."""
    selector, codec, *_ = row
    return not is_refused(selector, codec) and (selector != "full" or codec not in RANKED)


@product(
    "selector,codec,cut,lengths",
    CHOOSING,
    CODECS,
    CUTS,
    LENGTHS,
    sample=filter(
        combine, [*each_once(CHOOSING, CODECS, CUTS[::-1], LENGTHS), *each_once(["h2o"], CODECS, CUTS, LENGTHS)]
    ),
    allowed=combine,
    drawn=(2, 3),
)
def test_a_rejected_draft_leaves_no_trace(selector: str, codec: str, cut: tuple[int, int], lengths: list[int]) -> None:
    undone("llama", words(selector, codec, budget="1.0" if selector == "full" else "0.6"), lengths, *cut)


@product("policy,cut,lengths", OTHERS, CUTS, LENGTHS, sample=each_once(OTHERS, [(5, 2), (8, 8), (5, 0)], LENGTHS))
def test_of_mergers_readers_and_head_budgets(policy: str, cut: tuple[int, int], lengths: list[int]) -> None:
    undone("llama", policy, lengths, *cut)


ADDING = [["full", "full+quest:read=8:page=4", "uniform/adakv+snapkv:decode=grow@0.7"], [13, 2, 12, 14]]


@pytest.mark.parametrize("policy", ["h2o+tokenwise:bits=4:block_size=4:residual_length=4@24", "uniform/even+h2o@24"])
def test_a_cache_that_was_filled_under_the_mark_has_room_again(policy: str) -> None:
    """The host notes that every head is full when it encodes a block."""
    undone("llama", policy, [20], 12, 0, new=40)


@product("policy,accepted", *ADDING, sample=star(*ADDING, centers=[("", 13), ("full", 0)]))
def test_slots_that_were_added_for_a_rejected_draft_are_taken_back(policy: str, accepted: int) -> None:
    """Nobody said how many tokens will come, so that the cache grows by 16 before the 14th step under the mark."""
    undone("llama", policy, [PROMPT, 17], 17, accepted, None)


@pytest.mark.parametrize(("fed", "accepted"), [(8, 0), (6, 5)])
def test_sliding_windows_take_tokens_back(fed: int, accepted: int) -> None:
    """Layers that the policy does not manage had pushed tokens out of their windows."""
    undone("gemma2", "h2o@0.5", [PROMPT, 9], fed, accepted)


def test_estimates_of_what_is_not_read_have_the_tokens_back() -> None:
    """In blocks that are not the first one."""
    with attached("h2o+tokenwise+sparq:read=8@64", [100], [100, 6]) as (model, ids, mask):
        cache = prompted(model, ids, mask, 100, new=20)
        cache.mark(most=6)
        steps(model, ids, mask, 100, 106, cache)
        cache.rollback(0)
        for layer in cache.policy_layers:
            check_invariants(layer.store)


@contextmanager
def marking(policy: str, family: str = "llama", lengths: tuple[int, ...] = (PROMPT,)) -> Generator[Any]:
    """A function that feeds steps to a cache, the model, and a cache that has the prompt."""
    with attached(policy, [*lengths], [PROMPT, STEPS], family=family) as (model, ids, mask):

        def feed(cache: PolicyCache, start: int, stop: int) -> Tensor:
            return steps(model, ids, mask, PROMPT + start, PROMPT + stop, cache)

        yield feed, model, prompted(model, ids, mask, PROMPT, new=STEPS)


@pytest.mark.parametrize("accepted", [0, 2])
def test_windows_that_record_their_past_lose_nothing_to_put_back(accepted: int) -> None:
    """They push nothing out before a crop."""
    with attached("h2o@0.5", [PROMPT], [PROMPT, STEPS], family="gemma2") as (model, ids, mask):
        cache, twin = (PolicyCache(model, new=STEPS) for _ in range(2))
        for each in (cache, twin):
            each.activate_past_recording()
            forward(model, ids, mask, 0, PROMPT, each)
        cache.mark(most=4)
        steps(model, ids, mask, PROMPT, PROMPT + 4, cache)
        cache.rollback(accepted)
        for column in range(PROMPT, PROMPT + accepted):
            forward(model, ids, mask, column, column + 1, twin)
        same(cache, twin)


def test_every_byte_of_a_log_is_counted() -> None:
    """Also that of copies before a demotion, and of windows."""
    policy = words("full", "kivi", "labels:read=8", budget="1.0")
    with marking(policy, "gemma2", lengths=(PROMPT, 17)) as (feed, _, cache):
        cache.mark(most=10)
        feed(cache, 0, 9)
        assert len(cache.policy_layers[0].store.journal.entries) > 2, "blocks were encoded"
        # Each sliding layer of transformers holds the width of its window as a tensor of 8 bytes.
        assert stored_bytes(cache) == cache.nbytes + 8 * 3
        assert cache.report().nbytes == cache.nbytes
        assert all("undo log" in layer.held() for layer in cache.policy_layers)


def test_misuse_is_refused_in_one_sentence() -> None:
    model = build("llama")
    ids, mask = make_batch([PROMPT], [PROMPT, STEPS])

    def refused(part: str, kind: type[KVPolicyError] = KVPolicyStateError) -> Any:
        return pytest.raises(kind, match=rf"^[^.]*{part}[^;]*(; try [^.]*)?[^.]*\.?[^.]*\.$")

    with kvpolicy.attach(model, "h2o@0.5"):
        cache = PolicyCache(model, new=STEPS)
        with refused("whole prompt before a mark"):
            cache.mark()
        with refused("must follow a mark"):
            cache.rollback(0)
        forward(model, ids, mask, 0, PROMPT, cache)
        for most in (0, -1, True, 1.5, "8"):
            with refused("most must be (an integer|between 1)", KVPolicyError):
                cache.mark(most)  # pyright: ignore[reportArgumentType]
        cache.mark(most=1)
        before = copy.deepcopy(cache)
        for change in (
            lambda: forward(model, ids, mask, PROMPT, PROMPT + 2, cache),
            lambda: cache.expect(None, 3),
            lambda: cache.reorder_cache(torch.tensor([0])),
            lambda: cache.batch_repeat_interleave(2),
        ):
            with refused("under a mark|without a mark"):
                change()
        same(cache, before)
        forward(model, ids, mask, PROMPT, PROMPT + 1, cache)
        with refused("At most 1 tokens"):
            forward(model, ids, mask, PROMPT + 1, PROMPT + 2, cache)
        for accepted in (-1, 2, True, 0.5):
            with refused("accepted must be an integer from 0 to 1", KVPolicyError):
                cache.rollback(accepted)  # pyright: ignore[reportArgumentType]
        cache.mark(most=np.int64(2))  # pyright: ignore[reportArgumentType]  # replaces the mark, and keeps the token
        cache.rollback(np.int64(0))  # pyright: ignore[reportArgumentType]
        assert cache.policy_layers[0].length.tolist() == [PROMPT + 1]
        cache.mark()
        cache.reset()
        forward(model, ids, mask, 0, PROMPT, cache)


def test_a_copy_of_a_marked_cache_goes_its_own_way() -> None:
    with marking("h2o@0.5") as (feed, _, cache):
        before = copy.deepcopy(cache)
        cache.mark(most=4)
        feed(cache, 0, 1)
        other = copy.deepcopy(cache)
        feed(other, 1, 2)
        other.rollback(0)
        assert cache.policy_layers[0].length.tolist() == [PROMPT + 1]
        cache.rollback(0)
        same(cache, before)
        same(other, before)


def test_a_loaded_cache_is_rolled_back(tmp_path: Path) -> None:
    with marking(words("h2o", "kivi"), lengths=(PROMPT, 17)) as (feed, model, cache):
        cache.save(tmp_path / "prompt.safetensors")
        loaded = PolicyCache.load(model, tmp_path / "prompt.safetensors")
        loaded.mark(most=4)
        with pytest.raises(KVPolicyStateError, match="must be called without a mark"):
            loaded.save(tmp_path / "other.safetensors")
        feed(loaded, 0, 4)
        loaded.rollback(0)
        assert str(loaded.report()) == str(cache.report())
        assert torch.equal(feed(cache, 0, 4), feed(loaded, 0, 4))


@pytest.mark.parametrize("codec", ["kivi", "rotate"])
def test_rolled_back_in_another_mode(codec: str) -> None:
    """Only inference mode may change what was made in it, also tensors without rows: limits that a codec lacks."""
    with attached(words("h2o", codec), [PROMPT], [PROMPT, STEPS], layers=1) as (model, ids, mask), torch.no_grad():
        cache, twin = (PolicyCache(model, new=STEPS) for _ in range(2))
        for each in (cache, twin):
            with torch.inference_mode():
                model(ids[:, :PROMPT], cache=each)
        cache.mark(most=9)
        steps(model, ids, mask, PROMPT, PROMPT + 9, cache)
        cache.rollback(1)
        cache.mark(most=9)
        with torch.inference_mode():
            model(ids[:, PROMPT : PROMPT + 1], cache=twin)
            steps(model, ids, mask, PROMPT + 1, PROMPT + 10, cache)
        cache.rollback(0)
        same(cache, twin)


def test_marked_steps_compile_to_one_graph() -> None:
    """The position in the log is a tensor, so that no step has a graph of its own."""
    from torch._dynamo.testing import CompileCounterWithBackend

    model = build("llama", layers=1)  # the time to compile grows with the layers
    ids, mask = make_batch([PROMPT], [PROMPT, STEPS])
    with kvpolicy.attach(model, "h2o+merge@0.5"):
        cache, twin = (prompted(model, ids, mask, PROMPT, new=STEPS) for _ in range(2))
        counter = CompileCounterWithBackend("eager")
        step = torch.compile(model, backend=counter, fullgraph=True)
        column = PROMPT
        for accepted in (1, 0, 3):
            cache.mark(most=4)
            for fed in range(4):
                forward(step, ids, mask, column + fed, column + fed + 1, cache)
                cache.tick()
            cache.rollback(accepted)
            for _ in range(accepted):
                forward(model, ids, mask, column, column + 1, twin)
                column += 1
            same(cache, twin)
        assert counter.frame_count == 1
        cache.mark(most=1)
        forward(step, ids, mask, column, column + 1, cache)
        with pytest.raises(RuntimeError, match="more steps than the mark allows"):
            forward(step, ids, mask, column + 1, column + 2, cache)
    torch.compiler.reset()
