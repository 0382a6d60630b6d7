"""Edits of a text in a cache, and taking back its newest tokens."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import KVPolicyError, PolicyCache
from kvpolicy.engine.editing import check_movable
from kvpolicy.hf import journal
from kvpolicy.text.errors import KVPolicyStateError, KVPolicyTypeError
from tests.conformance.access import kept_positions, store_of
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch
from tests.conformance.policies import words
from tests.engine.filled import attached, prompted
from tests.engine.parts import Ranking, prompted_store, slots_of
from tests.engine.test_rollback import same
from tests.readers.bench import draw
from tests.sampling import each_once, product

LENGTHS = [26, 17]
STEPS = 6
FIRST = 5
LAST = 9
"""The tokens that are removed, counted without padding."""


def edited(ids: Tensor, mask: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """The batch without the tokens `first` to `last` of each row, padded on the left as before."""
    counted = (mask.cumsum(-1) - 1).where(mask.bool(), -1)
    rows = [(row[(at >= 0) & ((at < first) | (at >= last))]) for row, at in zip(ids, counted, strict=True)]
    width = ids.shape[1] - (last - first)
    filled = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    return filled, torch.stack([torch.arange(width) >= width - len(row) for row in rows]).long()


def steps(model: Any, cache: PolicyCache, ids: Tensor, mask: Tensor, seen: int, new: Tensor) -> Tensor:
    """The logits of further tokens."""
    found: list[Tensor] = []
    ids = torch.cat([ids[:, :seen], new], 1)
    mask = torch.cat([mask[:, :seen], torch.ones_like(new)], 1)
    for column in range(seen, ids.shape[1]):
        found.append(forward(model, ids, mask, column, column + 1, cache))
    return torch.cat(found, 1)


INDEXED = "labels:read=8:channels=8:dense=0"


@pytest.mark.parametrize("policy", ["full", "window@20", "uniform/even+streaming:sinks=2@20", "exact:read=8", INDEXED])
def test_a_removed_span_was_never_there(policy: str) -> None:
    """With one layer keys depend on the token and its position alone, so that the edited text gives the same logits."""
    model = build("llama", layers=1)
    ids, mask = make_batch(LENGTHS, [26, STEPS])
    new = ids[:, 26:]
    want_ids, want_mask = edited(ids[:, :26], mask[:, :26], FIRST, LAST)
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model)
        fresh = PolicyCache(model)
        forward(model, ids, mask, 0, 26, cache)
        cache.shift(LAST, FIRST - LAST)
        forward(model, want_ids, want_mask, 0, want_ids.shape[1], fresh)
        if policy in ("full", "exact:read=8", INDEXED):  # the others have evicted before the edit
            assert kept_positions(cache.policy_layers[0]) == kept_positions(fresh.policy_layers[0])
            got = steps(model, cache, want_ids, want_mask, want_ids.shape[1], new)
            want = steps(model, fresh, want_ids, want_mask, want_ids.shape[1], new)
            assert torch.allclose(got, want, atol=1e-4)
            return
        steps(model, cache, want_ids, want_mask, want_ids.shape[1], new)
        held = keys_by_position(cache)
        steps(model, fresh, want_ids, want_mask, want_ids.shape[1], new)
        same = [(held[at], key) for at, key in keys_by_position(fresh).items() if at in held]
        assert len(same) > 20 and all(torch.allclose(one, other, atol=1e-5) for one, other in same)


def keys_by_position(cache: PolicyCache) -> dict[tuple[int, int, int], Tensor]:
    """The key of each row, head and position in the first layer."""
    past: Any = cache.policy_layers[0].store.past()
    positions = cache.policy_layers[0].head_positions
    return {(b, h, int(p)): past.keys[b, h, s] for (b, h, s), p in _each(positions) if p >= 0}


def _each(positions: Tensor) -> list[tuple[tuple[int, int, int], int]]:
    places = torch.cartesian_prod(*(torch.arange(size) for size in positions.shape)).tolist()
    return [((b, h, s), int(positions[b, h, s])) for b, h, s in places]


@pytest.mark.parametrize("codec", ["plain", "csr", "kvquant"])
def test_behind_a_longer_text(codec: str) -> None:
    """The keys of the first layer are those of the same tokens behind a longer beginning."""
    with attached(words("full", codec, budget="1.0"), [26], layers=1) as (model, ids, mask):
        cache = PolicyCache(model)
        longer = PolicyCache(model)
        forward(model, ids, mask, 0, 26, cache)
        codes = [t.clone() for t in cache.policy_layers[0].store.tensors.codes[0]] if codec != "plain" else []
        before = keys_by_position(cache)
        cache.shift(FIRST, 4)
        assert codec == "plain" or all(map(torch.equal, codes, cache.policy_layers[0].store.tensors.codes[0]))
        after = keys_by_position(cache)
        assert sorted(after) == sorted((b, h, p if p < FIRST else p + 4) for b, h, p in before)
        if codec == "plain":
            more = torch.cat([ids[:, :FIRST], torch.full((1, 4), 7), ids[:, FIRST:26]], 1)
            forward(model, more, torch.ones_like(more), 0, 30, longer)
            want = keys_by_position(longer)
            assert all(torch.allclose(key, want[at], atol=1e-5) for at, key in after.items())
        cache.shift(FIRST + 4, -4)
        again = keys_by_position(cache)
        assert all(torch.allclose(again[at], key, atol=1e-5) for at, key in before.items())
        assert forward(model, ids, mask, 26, 27, cache).isfinite().all()


@pytest.mark.parametrize(("start", "by"), [(FIRST, 4), (LAST, FIRST - LAST), (25, 3), (25, -2)])
def test_codes_outlast_the_tokens_that_they_refer_to(start: int, by: int) -> None:
    """Codes are read with the unrotated keys of dictionary slots, which stay after their tokens were evicted."""
    with attached(words("full", "csr", budget="1.0"), [26], layers=1) as (model, ids, mask):
        cache = PolicyCache(model)
        forward(model, ids, mask, 0, 26, cache)
        store = cache.policy_layers[0].store
        assert store.tensors.positions[0, 0, : store.contents.reserved].tolist() == [25, 24]
        before = slots_of(store).codes.atoms()
        first = torch.zeros(*store.tensors.positions.shape[:2], 1, dtype=torch.int64)
        slots_of(store).writer.write(first, None, None)
        cache.shift(start, by)
        after = slots_of(store).codes.atoms()
        assert before is not None and after is not None
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(before, after, strict=True))


REFUSED = {
    "snapkv+kivi@0.5": "codec must store unrotated keys",
    "keydiff@0.5": "selector must rank tokens by attention or position",
    "compactor@0.5": "selector must rank tokens by attention or position",
    "h2o+merge@0.5": "must not be merged",
    "h2o@0.5": "from_position must be between 0 and 17",
}


@pytest.mark.parametrize("policy", REFUSED)
def test_what_cannot_be_moved(policy: str) -> None:
    with attached(policy, LENGTHS, layers=1) as (model, ids, mask):
        cache = PolicyCache(model)
        with pytest.raises(KVPolicyError, match="must have compressed its prompt"):
            cache.shift(3, 1)
        forward(model, ids, mask, 0, 26, cache)
        before = cache.policy_layers[0].positions.clone()
        with pytest.raises(KVPolicyError, match=REFUSED[policy]):
            cache.shift(18, 1)
        if policy != "h2o@0.5":
            with pytest.raises(KVPolicyError, match=REFUSED[policy]):
                check_movable(cache.policy_layers[0].store)
        if policy == "h2o@0.5":
            with pytest.raises(KVPolicyError, match="by must be at least -3 for the position 3, got -4"):
                cache.shift(3, -4)
        assert torch.equal(before, cache.policy_layers[0].positions)


def test_a_fork_goes_on_by_itself() -> None:
    with attached(words("h2o", "kivi"), LENGTHS) as (model, ids, mask):
        cache = PolicyCache(model)
        forward(model, ids, mask, 0, 26, cache)
        picked = torch.tensor([1, 0, 1])
        fork = cache.fork([1, 0, 1])
        whole = cache.fork()
        want = forward(model, ids, mask, 26, 27, cache)
        assert torch.equal(forward(model, ids, mask, 26, 27, whole), want)
        assert torch.allclose(forward(model, ids[picked], mask[picked], 26, 27, fork), want[picked], atol=1e-5)
        assert cache.batch_size == 2 and fork.batch_size == 3
        wrong: list[Any] = [[], [2], [-1], "0", ["a"]]
        for rows in wrong:
            with pytest.raises(KVPolicyError, match="rows must be a list of numbers from 0 to 1"):
                cache.fork(rows)


def test_positions_are_integers() -> None:
    model = build("llama", layers=2)
    ids, mask = make_batch(LENGTHS)
    wrong: Any
    with torch.no_grad(), kvpolicy.attach(model, "window@9"):
        cache = PolicyCache(model)
        model(ids, attention_mask=mask, cache=cache)
        for wrong in (("a", 1), (3, "a"), (1.5, 1), (3, None)):
            with pytest.raises(KVPolicyTypeError, match=r"must be an integer, got .*; try shift"):
                cache.shift(*wrong)
        with pytest.raises(KVPolicyStateError, match="got none; try the allocator squeeze, and run a prompt"):
            cache.cosines()


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
    with attached("full", lengths, [PROMPT, 20]) as (model, ids, mask):
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
    with attached("full", [PROMPT], [PROMPT, 20]) as (model, ids, mask):
        cache = PolicyCache(model)
        forward(model, ids, mask, 0, PROMPT, cache)
        cache.crop(-4)
        cache.crop(-4)
        store = store_of(cache, 0)
        assert store.journal.keeps_all()
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
    with attached("full", [PROMPT, 7], [PROMPT, 20]) as (model, ids, mask):
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
    with attached("full", [PROMPT, 7], [PROMPT, 20]) as (model, ids, mask):
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
    with attached(policy, [PROMPT], [PROMPT, 20]) as (model, ids, mask):
        cache = PolicyCache(model)
        forward(model, ids, mask, 0, PROMPT, cache)
        forward(model, ids, mask, PROMPT, PROMPT + 1, cache)
        before = copy.deepcopy(cache)
        with pytest.raises(KVPolicyError, match=rf"^Tokens must not be cropped .*{part}.*\.$"):
            cache.crop(-1)
        same(cache, before)
        cache.crop(0)


def test_a_loaded_or_shifted_cache_did_not_see_its_prompts(tmp_path: Path) -> None:
    with attached("full", [PROMPT], [PROMPT, 20]) as (model, ids, mask):
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
    monkeypatch.setattr(journal, "REMEMBERED", 2)
    model = build("llama")
    ids, mask = make_batch([PROMPT], [PROMPT, 20])
    ends = [PROMPT, *range(PROMPT + 2, PROMPT + 14, 2)]
    with kvpolicy.attach(model, "full"):
        cache, twin = (PolicyCache(model) for _ in range(2))
        for each in (cache, twin):
            for start, stop in itertools.pairwise([0, *ends] if each is cache else [0, *ends[:-2]]):
                forward(model, ids, mask, start, stop, each)
        assert len(cache.journal.prompts) == 2 and len(store_of(cache, 0).journal.sizes) <= 4
        with pytest.raises(KVPolicyError, match="got an earlier position"):
            cache.crop(-5)
        cache.crop(-4)
        for layer, other in zip(cache.policy_layers, twin.policy_layers, strict=True):
            assert torch.equal(layer.keys, other.keys) and torch.equal(layer.budget, other.budget)
        step = ends[-3], ends[-3] + 1
        assert torch.equal(forward(model, ids, mask, *step, cache), forward(model, ids, mask, *step, twin))


def test_a_crop_of_all_tokens_leaves_what_was_announced() -> None:
    with attached("full", [PROMPT], [PROMPT]) as (model, ids, mask):
        caches = [PolicyCache(model, prompt=PROMPT, new=50) for _ in range(2)]
        forward(model, ids, mask, 0, 4, caches[0])
        caches[0].crop(-4)
        for cache in caches:
            forward(model, ids, mask, 0, PROMPT, cache)
        assert caches[0].nbytes == caches[1].nbytes


def test_other_mistakes() -> None:
    with attached("full", [PROMPT, 7], [PROMPT, 20]) as (model, ids, mask):
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
    with attached("full", [PROMPT], [PROMPT, 20], family="gemma2") as (model, ids, mask):
        cache, twin = (prompted(model, ids, mask, PROMPT) for _ in range(2))
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
    with attached("full", [PROMPT], [PROMPT, 20]) as (model, ids, mask):
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
    store = prompted_store(selector, draw(PROMPT, 0), budget)
    assert store.tensors.positions[0, 0].tolist()[:PROMPT] == [*range(min(budget, PROMPT))]
    assert store.journal.keeps_all() == kept
