"""Edits of a text in a cache, and taking back its newest tokens."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import KVPolicyError, PolicyCache
from kvpolicy.hf import journal
from kvpolicy.text.errors import KVPolicyStateError
from tests.conformance.access import kept_positions, store_of
from tests.conformance.play import forward, make_batch, talk
from tests.conformance.policies import words
from tests.engine.filled import attached, prompted, steps
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


def keys_by_position(cache: PolicyCache) -> dict[tuple[int, int, int], Tensor]:
    """The key of each row, head and position in the first layer."""
    past: Any = cache.policy_layers[0].store.past()
    positions = cache.policy_layers[0].head_positions
    return {(b, h, int(positions[b, h, s])): past.keys[b, h, s] for b, h, s in (positions >= 0).nonzero().tolist()}


INDEXED = "labels:read=8:channels=8:dense=0"


@pytest.mark.parametrize("policy", ["full", "window@20", "uniform/even+streaming:sinks=2@20", "exact:read=8", INDEXED])
def test_a_removed_span_was_never_there(policy: str) -> None:
    """With one layer keys depend on the token and its position alone, so that the edited text gives the same logits."""
    with attached(policy, LENGTHS, [26, STEPS], layers=1) as (model, ids, mask):
        cache = prompted(model, ids, mask, 26)
        cache.shift(LAST, FIRST - LAST)
        ids, mask = edited(ids, mask, FIRST, LAST)
        seen = ids.shape[1] - STEPS
        fresh = prompted(model, ids, mask, seen)
        got, want = (steps(model, ids, mask, seen, ids.shape[1], each) for each in (cache, fresh))
    if policy in ("full", "exact:read=8", INDEXED):  # the others have evicted before the edit
        assert kept_positions(cache.policy_layers[0]) == kept_positions(fresh.policy_layers[0])
        assert torch.allclose(got, want, atol=1e-4)
    held = keys_by_position(cache)
    same = [(held[at], key) for at, key in keys_by_position(fresh).items() if at in held]
    assert len(same) > 20 and all(torch.allclose(one, other, atol=1e-5) for one, other in same)


@pytest.mark.parametrize("codec", ["plain", "csr", "kvquant"])
def test_behind_a_longer_text(codec: str) -> None:
    """The keys of the first layer are those of the same tokens behind a longer beginning."""
    with attached(words("full", codec, budget="1.0"), [26], layers=1) as (model, ids, mask):
        cache = prompted(model, ids, mask, 26)
        codes = [t.clone() for t in cache.policy_layers[0].store.tensors.codes[0]] if codec != "plain" else []
        before = keys_by_position(cache)
        cache.shift(FIRST, 4)
        assert codec == "plain" or all(map(torch.equal, codes, cache.policy_layers[0].store.tensors.codes[0]))
        after = keys_by_position(cache)
        assert sorted(after) == sorted((b, h, p if p < FIRST else p + 4) for b, h, p in before)
        if codec == "plain":
            more = torch.cat([ids[:, :FIRST], torch.full((1, 4), 7), ids[:, FIRST:26]], 1)
            want = keys_by_position(prompted(model, more, torch.ones_like(more), 30))
            assert all(torch.allclose(key, want[at], atol=1e-5) for at, key in after.items())
        cache.shift(FIRST + 4, -4)
        again = keys_by_position(cache)
        assert all(torch.allclose(again[at], key, atol=1e-5) for at, key in before.items())
        assert forward(model, ids, mask, 26, 27, cache).isfinite().all()


@pytest.mark.parametrize(("start", "by"), [(FIRST, 4), (LAST, FIRST - LAST), (25, 3), (25, -2)])
def test_codes_outlast_the_tokens_that_they_refer_to(start: int, by: int) -> None:
    """Codes are read with the unrotated keys of dictionary slots, which stay after their tokens were evicted."""
    with attached(words("full", "csr", budget="1.0"), [26], layers=1) as (model, ids, mask):
        cache = prompted(model, ids, mask, 26)
        store = cache.policy_layers[0].store
        assert store.tensors.positions[0, 0, : store.contents.reserved].tolist() == [25, 24]
        before = slots_of(store).codes.atoms()
        first = torch.zeros(*store.tensors.positions.shape[:2], 1, dtype=torch.int64)
        slots_of(store).writer.write(first, None, None)
        cache.shift(start, by)
        after = slots_of(store).codes.atoms()
        assert before is not None and after is not None
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("policy", "start", "by", "message"),
    [
        ("snapkv+kivi@0.5", 3, 1, "codec must store unrotated keys"),
        ("keydiff@0.5", 3, 1, "selector must rank tokens by attention or position"),
        ("compactor@0.5", 3, 1, "selector must rank tokens by attention or position"),
        ("h2o+merge@0.5", 3, 1, "must not be merged"),
        ("h2o@0.5", 18, 1, "from_position must be between 0 and 17"),
        ("h2o@0.5", 3, -4, "by must be at least -3 for the position 3, got -4"),
        ("h2o@0.5", "a", 1, "must be an integer, got .*; try shift"),
        ("h2o@0.5", 3, None, "must be an integer, got .*; try shift"),
        ("h2o@0.5", 1.5, 1, "must be an integer, got .*; try shift"),
    ],
)
def test_what_cannot_be_moved(policy: str, start: Any, by: Any, message: str) -> None:
    with attached(policy, LENGTHS, layers=1) as (model, ids, mask):
        with pytest.raises(KVPolicyError, match="must have compressed its prompt"):
            PolicyCache(model).shift(3, 1)
        cache = prompted(model, ids, mask, 26)
        before = copy.deepcopy(cache)
        with pytest.raises(KVPolicyError, match=message) as error:
            cache.shift(start, by)
        assert isinstance(error.value, TypeError) == ("integer" in message)
        same(cache, before)


def test_a_fork_is_of_rows_that_there_are() -> None:
    wrong: list[Any] = [[], [2], [-1], "0", ["a"]]
    with attached("h2o@0.5", LENGTHS, layers=1) as (model, ids, mask):
        cache = prompted(model, ids, mask, 26)
        for rows in wrong:
            with pytest.raises(KVPolicyError, match="rows must be a list of numbers from 0 to 1"):
                cache.fork(rows)


def test_cosines_that_were_not_measured() -> None:
    refused = pytest.raises(KVPolicyStateError, match="got none; try the allocator squeeze, and run a prompt")
    with attached("h2o@0.5", LENGTHS, layers=1) as (model, ids, mask), refused:
        prompted(model, ids, mask, 26).cosines()


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
    later, _ = make_batch(lengths, [PROMPT, 40], seed=1)
    ends = [*itertools.accumulate(turns)]
    stateful = "snapkv" in policy  # its statistics are of prompts, which cannot be taken back
    with attached(policy, lengths, [PROMPT, 40]) as (model, ids, mask):
        for end in ends[:-1] if len(turns) < 10 else ends[2:-1:6]:
            cache, twin = (PolicyCache(model, new=new) for _ in range(2))
            first = ends.index(end) + 1
            talk(model, ids, mask, [*turns], cache)
            talk(model, ids, mask, [*turns[:first]], twin)
            if stateful and max(turns[first:]) > 1:
                with pytest.raises(KVPolicyError, match="whose statistics"):
                    cache.crop(end - ends[-1])
                continue
            cache.crop(end - ends[-1])
            same(cache, twin)
            assert torch.equal(*(steps(model, later, mask, end, end + 3, each) for each in (cache, twin)))
            assert torch.equal(*(forward(model, later, mask, end + 3, end + 7, each) for each in (cache, twin)))
            same(cache, twin)


def close(cache: PolicyCache, twin: PolicyCache) -> None:
    """Both caches hold the same tokens, whose last bits may differ."""
    for layer, other in zip(cache.policy_layers, twin.policy_layers, strict=True):
        assert torch.equal(layer.positions, other.positions) and torch.equal(layer.length, other.length)
        assert torch.equal(layer.budget, other.budget)
        assert torch.allclose(layer.keys, other.keys, atol=1e-5)
        assert torch.allclose(layer.values, other.values, atol=1e-5)
    assert torch.equal(cache.mask_digest, twin.mask_digest)  # pyright: ignore[reportArgumentType]
    assert cache.nbytes == twin.nbytes and str(cache.report()) == str(twin.report())


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
        close(cache, twin)
        for start, stop in ((PROMPT + keep, PROMPT + keep + 1), (PROMPT + keep + 1, PROMPT + keep + 4)):
            logits = [forward(model, ids, mask, start, stop, each) for each in (cache, twin)]
            assert torch.allclose(logits[0], logits[1], atol=1e-4)


@pytest.mark.parametrize("lengths", ROWS)
@pytest.mark.parametrize("keep", [0, 3, 7, 10])
def test_a_first_prompt_is_cropped_too(lengths: list[int], keep: int) -> None:
    """In two calls, also within the padding of a row, and whole."""
    with attached("full", lengths, [PROMPT, 20]) as (model, ids, mask):
        cache, twin = (PolicyCache(model) for _ in range(2))
        forward(model, ids, mask, 0, PROMPT, cache)
        cache.crop(-1)
        cache.crop(keep + 1 - PROMPT)
        assert cache.get_seq_length() == keep and cache.is_initialized == (keep > 0)
        if keep:
            forward(model, ids, mask, 0, keep, twin)
            close(cache, twin)
            assert store_of(cache, 0).journal.keeps_all()
        logits = [forward(model, ids, mask, keep, PROMPT + 2, each) for each in (cache, twin)]
        shown = mask[:, keep : PROMPT + 2].bool()
        assert torch.allclose(logits[0][shown], logits[1][shown], atol=1e-4)


def test_after_rows_were_selected() -> None:
    with attached("full", [PROMPT, 7], [PROMPT, 20]) as (model, ids, mask):
        cache, twin = (prompted(model, ids, mask, PROMPT) for _ in range(2))
        forward(model, ids, mask, PROMPT, PROMPT + 3, cache)
        for each in (cache, twin):
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
        cache = prompted(model, ids, mask, PROMPT)
        forward(model, ids, mask, PROMPT, PROMPT + 1, cache)
        before = copy.deepcopy(cache)
        with pytest.raises(KVPolicyError, match=rf"^Tokens must not be cropped .*{part}.*\.$"):
            cache.crop(-1)
        same(cache, before)
        cache.crop(0)


def test_a_loaded_or_shifted_cache_did_not_see_its_prompts(tmp_path: Path) -> None:
    with attached("full", [PROMPT], [PROMPT, 20]) as (model, ids, mask):
        cache = prompted(model, ids, mask, PROMPT)
        cache.save(tmp_path / "prompt.safetensors")
        loaded = PolicyCache.load(model, tmp_path / "prompt.safetensors")
        cache.shift(PROMPT, -1)
        for each in (cache, loaded):
            with pytest.raises(KVPolicyError, match="a load or a shift forgets"):
                each.crop(-1)


def test_old_prompts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered is cropped as ever."""
    monkeypatch.setattr(journal, "REMEMBERED", 2)
    with attached("full", [PROMPT], [PROMPT, 20]) as (model, ids, mask):
        cache, twin = (PolicyCache(model) for _ in range(2))
        talk(model, ids, mask, [PROMPT, *[2] * 6], cache)
        talk(model, ids, mask, [PROMPT, *[2] * 4], twin)
        assert len(cache.journal.prompts) == 2 and len(store_of(cache, 0).journal.sizes) <= 4
        with pytest.raises(KVPolicyError, match="got an earlier position"):
            cache.crop(-5)
        cache.crop(-4)
        for layer, other in zip(cache.policy_layers, twin.policy_layers, strict=True):
            assert torch.equal(layer.keys, other.keys) and torch.equal(layer.budget, other.budget)
        step = PROMPT + 8, PROMPT + 9
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
        cache = prompted(model, ids, mask, PROMPT)
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
            talk(model, ids, mask, [PROMPT, *[1] * steps], cache)
            forward(model, ids, mask, 0, PROMPT, twin)
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
