"""Tokens are cropped bit for bit from caches that evicted nothing."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import KVPolicyError, PolicyCache
from kvpolicy.codecs.plain import Plain
from kvpolicy.engine.attention import ScoreTransform
from kvpolicy.engine.editing import keeps_all
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.hf import cropping
from tests.conformance.access import store_of
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch
from tests.engine.parts import Ranking
from tests.engine.test_rollback import same
from tests.readers.bench import draw
from tests.sampling import each_once, product

PROMPT = 12
TURNS = [(PROMPT, 1, 1, 1), (PROMPT, 1, 1, 5, 1, 1), (PROMPT, 4, 3), (PROMPT, *[1] * 20)]
POLICIES = ["full", "window@64", "snapkv@64", "streaming:decode=grow@1.0"]
ROWS = [[PROMPT], [PROMPT, 7]]


@product(
    "policy,turns,lengths,new",
    POLICIES,
    TURNS,
    ROWS,
    [None, 40],
    sample=each_once(POLICIES, TURNS, [ROWS[1], ROWS[0]], [None, 40]),
)
def test_cropped_tokens_leave_no_trace(
    policy: str, turns: tuple[int, ...], lengths: list[int], new: int | None
) -> None:
    """To the end of each turn, and to its beginning."""
    model = build("llama")
    ids, mask = make_batch(lengths, [PROMPT, 40])
    later, _ = make_batch(lengths, [PROMPT, 40], seed=1)
    ends = [sum(turns[: number + 1]) for number in range(len(turns))]
    stateful = "snapkv" in policy  # its statistics are of prompts, which cannot be taken back
    with kvpolicy.attach(model, policy):
        for end in ends[:-1] if len(turns) < 10 else ends[2:-1:6]:
            cache, twin = (PolicyCache(model, new=new) for _ in range(2))
            for each in (cache, twin):
                start = 0
                for stop in ends if each is cache else ends[: ends.index(end) + 1]:
                    forward(model, ids, mask, start, stop, each)
                    start = stop
            if stateful and max(turns[ends.index(end) + 1 :]) > 1:
                with pytest.raises(KVPolicyError, match="whose statistics"):
                    cache.crop(end - ends[-1])
                continue
            cache.crop(end - ends[-1])
            same(cache, twin)
            for column in range(end, end + 3):
                logits = [forward(model, later, mask, column, column + 1, each) for each in (cache, twin)]
                assert torch.equal(*logits)
            logits = [forward(model, later, mask, end + 3, end + 7, each) for each in (cache, twin)]
            assert torch.equal(*logits)
            same(cache, twin)


@pytest.mark.parametrize("lengths", ROWS)
@pytest.mark.parametrize("keep", [1, 4])
def test_a_part_of_a_turn_is_cropped(lengths: list[int], keep: int) -> None:
    """Its tokens went through the model with the others, so that a twin's last bits differ, and nothing else."""
    model = build("llama")
    ids, mask = make_batch(lengths, [PROMPT, 20])
    with kvpolicy.attach(model, "full"):
        cache, twin = (PolicyCache(model, new=9) for _ in range(2))
        for each, stop in ((cache, PROMPT + 5), (twin, PROMPT + keep)):
            forward(model, ids, mask, 0, PROMPT, each)
            if each is cache or keep > 1:
                forward(model, ids, mask, PROMPT, stop, each)
            else:  # a turn of one token, and no step
                forward(model, ids, mask, PROMPT, PROMPT + 2, each)
                each.crop(-1)
        cache.crop(keep - 5)
        for layer, other in zip(cache.policy_layers, twin.policy_layers, strict=True):
            assert torch.equal(layer.positions, other.positions) and torch.equal(layer.budget, other.budget)
            assert torch.allclose(layer.keys, other.keys, atol=1e-5)
            assert torch.allclose(layer.values, other.values, atol=1e-5)
        assert torch.equal(cache.mask_digest, twin.mask_digest)  # pyright: ignore[reportArgumentType]
        assert cache.nbytes == twin.nbytes and str(cache.report()) == str(twin.report())
        for start, stop in ((PROMPT + keep, PROMPT + keep + 1), (PROMPT + keep + 1, PROMPT + keep + 4)):
            logits = [forward(model, ids, mask, start, stop, each) for each in (cache, twin)]
            assert torch.allclose(logits[0], logits[1], atol=1e-4)


def test_an_unpadded_first_prompt_is_cropped_too() -> None:
    model = build("llama")
    ids, mask = make_batch([PROMPT], [PROMPT, 20])
    with kvpolicy.attach(model, "full"):
        cache = PolicyCache(model)
        forward(model, ids, mask, 0, PROMPT, cache)
        cache.crop(-4)
        cache.crop(-4)
        store = store_of(cache, 0)
        assert keeps_all(store)
        assert cache.get_seq_length() == 4 == int(cache.policy_layers[0].store.tensors.columns)
        fresh = PolicyCache(model)
        forward(model, ids, mask, 0, 4, fresh)
        assert cache.nbytes == fresh.nbytes and torch.equal(store.tensors.budget, store_of(fresh, 0).tensors.budget)
        cache.crop(-4)
        assert cache.get_seq_length() == 0 and not cache.is_initialized
        forward(model, ids, mask, 0, 4, cache)
        same(cache, fresh)


@pytest.mark.parametrize("keep", [3, 7, 10])
def test_a_padded_first_prompt_is_cropped_too(keep: int) -> None:
    """Also within the padding of a row."""
    model = build("llama")
    ids, mask = make_batch([PROMPT, 7], [PROMPT, 20])
    with kvpolicy.attach(model, "full"):
        cache, twin = (PolicyCache(model) for _ in range(2))
        forward(model, ids, mask, 0, PROMPT, cache)
        cache.crop(keep - PROMPT)
        forward(model, ids, mask, 0, keep, twin)
        assert torch.equal(cache.mask_digest, twin.mask_digest)  # pyright: ignore[reportArgumentType]
        for layer, other in zip(cache.policy_layers, twin.policy_layers, strict=True):
            assert torch.equal(layer.positions, other.positions) and torch.equal(layer.length, other.length)
            assert torch.allclose(layer.keys, other.keys, atol=1e-5)
        logits = [forward(model, ids, mask, keep, PROMPT + 2, each) for each in (cache, twin)]
        shown = mask[:, keep : PROMPT + 2].bool()
        assert torch.allclose(logits[0][shown], logits[1][shown], atol=1e-4)


def test_after_rows_were_selected() -> None:
    model = build("llama")
    ids, mask = make_batch([PROMPT, 7], [PROMPT, 20])
    with kvpolicy.attach(model, "full"):
        cache, twin = (PolicyCache(model) for _ in range(2))
        for each in (cache, twin):
            forward(model, ids, mask, 0, PROMPT, each)
            if each is cache:
                forward(model, ids, mask, PROMPT, PROMPT + 3, each)
            each.batch_select_indices(torch.tensor([1, 1, 0]))
        cache.crop(-3)
        same(cache, twin)


@pytest.mark.parametrize(
    ("policy", "part"),
    [
        ("h2o@1.0", "the selector h2o"),
        ("window@4", "after an eviction"),
        ("window+merge@1.0", "the merger"),
        ("full+tokenwise", "the codec"),
        ("full+quest:read=8", "the reader"),
        ("uniform/even+window@1.0", "budgets by head"),
        ("squeeze+window@1.0", "the allocator"),
    ],
)
def test_what_cannot_be_cropped_is_named(policy: str, part: str) -> None:
    model = build("llama")
    ids, mask = make_batch([PROMPT], [PROMPT, 20])
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model)
        forward(model, ids, mask, 0, PROMPT, cache)
        forward(model, ids, mask, PROMPT, PROMPT + 1, cache)
        before = copy.deepcopy(cache)
        with pytest.raises(KVPolicyError, match=rf"^Tokens must not be cropped .*{part}.*\.$"):
            cache.crop(-1)
        same(cache, before)
        cache.crop(0)


def test_a_loaded_or_shifted_cache_did_not_see_its_prompts(tmp_path: Path) -> None:
    model = build("llama")
    ids, mask = make_batch([PROMPT], [PROMPT, 20])
    with kvpolicy.attach(model, "full"):
        cache = PolicyCache(model)
        forward(model, ids, mask, 0, PROMPT, cache)
        cache.save(tmp_path / "prompt.safetensors")
        loaded = PolicyCache.load(model, tmp_path / "prompt.safetensors")
        cache.shift(PROMPT, -1)
        for each in (cache, loaded):
            with pytest.raises(KVPolicyError, match="a load or a shift forgets"):
                each.crop(-1)


def test_old_prompts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered is cropped as ever."""
    monkeypatch.setattr(cropping, "REMEMBERED", 2)
    model = build("llama")
    ids, mask = make_batch([PROMPT], [PROMPT, 20])
    ends = [PROMPT, *range(PROMPT + 2, PROMPT + 14, 2)]
    with kvpolicy.attach(model, "full"):
        cache, twin = (PolicyCache(model) for _ in range(2))
        for each in (cache, twin):
            for start, stop in itertools.pairwise([0, *ends] if each is cache else [0, *ends[:-2]]):
                forward(model, ids, mask, start, stop, each)
        assert len(cache.history.prompts) == 2 and len(store_of(cache, 0).contents.sizes.entries) <= 4
        with pytest.raises(KVPolicyError, match="got an earlier position"):
            cache.crop(-5)
        cache.crop(-4)
        for layer, other in zip(cache.policy_layers, twin.policy_layers, strict=True):
            assert torch.equal(layer.keys, other.keys) and torch.equal(layer.budget, other.budget)
        step = ends[-3], ends[-3] + 1
        assert torch.equal(forward(model, ids, mask, *step, cache), forward(model, ids, mask, *step, twin))


def test_a_crop_of_all_tokens_leaves_what_was_announced() -> None:
    model = build("llama")
    ids, mask = make_batch([PROMPT], [PROMPT])
    with kvpolicy.attach(model, "full"):
        caches = [PolicyCache(model, prompt=PROMPT, new=50) for _ in range(2)]
        forward(model, ids, mask, 0, 4, caches[0])
        caches[0].crop(-4)
        for cache in caches:
            forward(model, ids, mask, 0, PROMPT, cache)
        assert caches[0].nbytes == caches[1].nbytes


def test_other_mistakes() -> None:
    model = build("llama")
    ids, mask = make_batch([PROMPT, 7], [PROMPT, 20])
    with kvpolicy.attach(model, "full"):
        cache = PolicyCache(model)
        forward(model, ids, mask, 0, PROMPT, cache)
        for wrong in (3, True, 0.5, "1"):
            with pytest.raises(KVPolicyError, match="must be 0 or a negative integer"):
                cache.crop(wrong)  # pyright: ignore[reportArgumentType]
        with pytest.raises(KVPolicyError, match="At most 12 tokens"):
            cache.crop(-13)
        mask[1, PROMPT] = 0
        forward(model, ids, mask, PROMPT, PROMPT + 1, cache)
        forward(model, ids, mask, PROMPT + 1, PROMPT + 2, cache)
        with pytest.raises(KVPolicyError, match="Every row must have a token"):
            cache.crop(-1)
        cache.mark()
        with pytest.raises(KVPolicyError, match="must be called without a mark"):
            cache.crop(-1)


def test_sliding_windows() -> None:
    """A full window is cropped only if transformers was told before to record what leaves it."""
    model = build("gemma2")
    ids, mask = make_batch([PROMPT], [PROMPT, 20])
    with kvpolicy.attach(model, "full"):
        cache, twin = (PolicyCache(model) for _ in range(2))
        for each in (cache, twin):
            forward(model, ids, mask, 0, PROMPT, each)
        with pytest.raises(KVPolicyError, match="out of a sliding window"):
            cache.crop(-1)
        cache.activate_past_recording()
        forward(model, ids, mask, PROMPT, PROMPT + 3, cache)
        cache.crop(-3)
        same(cache, twin)
        step = PROMPT, PROMPT + 1
        assert torch.equal(forward(model, ids, mask, *step, cache), forward(model, ids, mask, *step, twin))


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("inference", [False, True])
def test_a_crop_may_run_in_another_mode_than_the_prompt(steps: int, inference: bool) -> None:
    """Only inference mode may change tensors that were made in it."""
    model = build("llama")
    ids, mask = make_batch([PROMPT], [PROMPT, 20])
    with kvpolicy.attach(model, "full"):
        cache, twin = (PolicyCache(model) for _ in range(2))
        with torch.inference_mode(inference):
            for each in (cache, twin):
                forward(model, ids, mask, 0, PROMPT, each)
            for column in range(PROMPT, PROMPT + steps):
                forward(model, ids, mask, column, column + 1, cache)
        with torch.inference_mode(not inference):
            cache.crop(-steps - 2)
        with torch.inference_mode(inference):
            twin.crop(-2)
            same(cache, twin)
            step = PROMPT - 2, PROMPT - 1
            assert torch.equal(forward(model, ids, mask, *step, cache), forward(model, ids, mask, *step, twin))


@pytest.mark.parametrize(("budget", "kept"), [(5, False), (11, False), (12, True), (20, True)])
def test_a_layer_that_kept_its_first_tokens_alone_does_not_keep_all(budget: int, kept: bool) -> None:
    """Slot n holds token n, as without an eviction, but there are fewer of them than tokens were seen."""
    selector: Any = Ranking(score=lambda state, seen, view: -view.positions.float())
    store = LayerStore(LayerSpec(0, selector, Plain(), "evict"))
    q, k, v = draw(PROMPT, 0)
    store.initialize(k)
    _, pending = store.attend_prompt(q, k, v, None, ScoreTransform(1.0))
    keep = torch.tensor([budget])
    store.compress(pending, RowBudget(keep, torch.zeros_like(keep), keep))
    assert store.tensors.positions[0, 0].tolist()[:PROMPT] == [*range(min(budget, PROMPT))]
    assert keeps_all(store) == kept
