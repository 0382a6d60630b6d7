"""An announced prompt in chunks that are held: selected as in one piece, at the last chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import KVPolicyError, Policy, PolicyCache
from kvpolicy.hf.announced import Announced
from kvpolicy.statistics import Forward
from kvpolicy.testing import check_cache
from kvpolicy.text.errors import KVPolicyWarning
from tests.conformance.models import build, layers_for
from tests.conformance.play import forward, make_batch
from tests.robust.test_tiles import NOTED, Noting
from tests.sampling import each_once, product

TURNS = [26, 1, 1, 7, 1]
SMALL = "snapkv:window=4:kernel=3@0.5"
CODES = "tokenwise:group_size=4:residual_length=4:block_size=4"


def outcome(model: Any, policy: str, lengths: list[int], pieces: list[int], **how: Any) -> tuple[list[Tensor], Tensor]:
    """Positions and the last logits after two announced prompts and steps; the first prompt comes in pieces."""
    ids, mask = make_batch(lengths, TURNS)
    with kvpolicy.attach(model, policy, **how):
        cache = PolicyCache(model, prompt=lengths, new=3)
        start = 0
        logits = torch.zeros(0)
        for turn in [*pieces, *TURNS[1:3]]:
            logits = forward(model, ids, mask, start, start + turn, cache)
            start += turn
            check_cache(cache)
        cache.expect([length + 9 for length in lengths], 1)
        for turn in [4, 3, 1] if how.get("chunks") else [7, 1]:
            logits = forward(model, ids, mask, start, start + turn, cache)
            start += turn
            check_cache(cache)
    return [layer.head_positions.sort(-1).values for layer in cache.policy_layers], logits[:, -1]


@pytest.mark.parametrize(
    "policy",
    [
        SMALL,
        "h2o@0.5",
        "tova@0.5",
        "expected@0.5",
        "scissorhands@0.5",
        "keydiff@0.5",
        "compactor:sinks=2:recent=2:block=8@0.5",
        "squeeze+h2o@0.5",
        f"uniform/adakv+snapkv:window=4:kernel=3+{CODES}@0.6",
        "snapkv:window=4:kernel=3+merge@0.5",
        "snapkv:window=4:kernel=3+regress:queries=replay:window=5:sinks=1:recent=3@0.5",
        "snapkv:window=4:kernel=3+labels:read=8:channels=2:dense=0@0.6",
        "snapkv:window=4:kernel=3+labels:read=8:channels=2:dense=0:host=true@0.6",
    ],
)
def test_what_one_piece_keeps(policy: str) -> None:
    model = build("llama", layers=layers_for(policy))
    lengths = [26, 11]
    positions, logits = outcome(model, policy, lengths, [26])
    for tile in (None, 5):
        found, last = outcome(model, policy, lengths, [12, 9, 5], chunks="hold", tile=tile)
        assert all(torch.equal(*pair) for pair in zip(found, positions, strict=True))
        torch.testing.assert_close(last, logits, atol=0.3 if CODES in policy else 1e-3, rtol=1e-3)


def test_squeeze_measures_all_chunks_of_a_replayed_prompt() -> None:
    model = build("llama")
    ids, mask = make_batch([26], [26])
    found: list[list[int]] = []
    for pieces in ([26], [9, 17]):
        with kvpolicy.attach(model, "squeeze+kvzip:chunk=16@0.4"):
            cache = PolicyCache(model, prompt=26)
            start = 0
            for piece in pieces:
                forward(model, ids, mask, start, start + piece, cache)
                start += piece
        found.append([int(layer.budget[0]) for layer in cache.policy_layers])
    assert found[0] == found[1]


def test_generate_holds_its_chunks() -> None:
    model = build("llama")
    ids, _ = make_batch([26], [26])
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    with kvpolicy.attach(model, SMALL):
        whole = model.generate(ids, **how)
    with kvpolicy.attach(model, SMALL, chunks="hold"):
        assert torch.equal(model.generate(ids, prefill_chunk_size=7, **how), whole)


def test_a_prompt_that_is_not_announced_is_not_held() -> None:
    model = build("llama")
    ids, mask = make_batch([26], [26])
    with kvpolicy.attach(model, SMALL, chunks="hold"):
        cache = PolicyCache(model)
        forward(model, ids, mask, 0, 20, cache)
        assert cache.policy_layers[0].pending is None and cache.policy_layers[0].positions.shape[-1] == 10


def test_chunks_that_are_compressed_by_their_own_queries_warn_once() -> None:
    model = build("llama")
    ids, mask = make_batch([26], [26])
    with kvpolicy.attach(model, SMALL):
        with pytest.warns(KVPolicyWarning, match="compressed by its own last queries under .*; attach with tile="):
            forward(model, ids, mask, 0, 20, PolicyCache(model, prompt=26))
        forward(model, ids, mask, 0, 20, PolicyCache(model, prompt=26))
    silent: list[tuple[str, Any]] = [
        (f"{SMALL}:least=26", "select"),
        (SMALL, "hold"),
        ("h2o@0.5", "select"),
        ("kvzip@0.5", "select"),
    ]
    for policy, chunks in silent:
        with kvpolicy.attach(model, policy, chunks=chunks):
            forward(model, ids, mask, 0, 20, PolicyCache(model, prompt=26))
    with kvpolicy.attach(model, SMALL):
        forward(model, ids, mask, 0, 26, PolicyCache(model, prompt=26))
        forward(model, ids, mask, 0, 26, PolicyCache(model))


def test_other_words_are_refused() -> None:
    model = build("llama")
    with pytest.raises(KVPolicyError, match="chunks must be 'select' or 'hold', got 'keep'"):
        kvpolicy.attach(model, SMALL, chunks="keep")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("policy", ["squeeze+h2o@0.5", "squeeze+kvzip:chunk=16@0.5"])
def test_rows_are_chosen_between_held_chunks(policy: str) -> None:
    model = build("llama")
    ids, mask = make_batch([26, 11], [26])
    rows = torch.tensor([1, 0, 1])
    budgets: list[list[list[int]]] = []
    for early in (True, False):
        with kvpolicy.attach(model, policy, chunks="hold"):
            cache = PolicyCache(model, prompt=[26, 11])
            forward(model, ids, mask, 0, 18, cache)
            if early:
                cache.batch_select_indices(rows)
                forward(model, ids[rows], mask[rows], 18, 26, cache)
            else:
                forward(model, ids, mask, 18, 26, cache)
                cache.batch_select_indices(rows)
        budgets.append([layer.budget.tolist() for layer in cache.policy_layers])
    assert budgets[0] == budgets[1]


def test_a_held_chunk_is_not_cropped_in_part() -> None:
    model = build("llama")
    ids, mask = make_batch([26], [26])
    with kvpolicy.attach(model, "full", chunks="hold"):
        cache = PolicyCache(model, prompt=26)
        forward(model, ids, mask, 0, 18, cache)
        with pytest.raises(KVPolicyError, match="must have compressed its prompt before tokens are cropped"):
            cache.crop(-3)
        forward(model, ids, mask, 18, 26, cache)
        cache.crop(-3)
        assert cache.policy_layers[0].pending is None and (cache.policy_layers[0].positions >= 0).sum(-1).max() == 23
        check_cache(cache)


HELD = [SMALL, "squeeze+h2o@0.5", "squeeze+kvzip:chunk=9:sinks=2@0.3"]
PIECES = [[1, 6], [1] * 7, [7], [3, 4]]


@product("policy,pieces", HELD, PIECES, sample=each_once(HELD, PIECES), ids=str)
def test_a_later_prompt_is_held_even_if_it_begins_with_one_token(policy: str, pieces: list[int]) -> None:
    model = build("llama")
    ids, mask = make_batch([26, 11], TURNS)
    found: list[tuple[list[Tensor], Tensor]] = []
    for chunks, turns in (("select", [26, 1, 1, 7, 1]), ("hold", [26, 1, 1, *pieces, 1])):
        with kvpolicy.attach(model, policy, chunks=chunks):  # pyright: ignore[reportArgumentType]
            cache = PolicyCache(model, prompt=[26, 11], new=10)
            start = 0
            logits = torch.zeros(0)
            for number, turn in enumerate(turns):
                if number == 3:
                    cache.expect([35, 20], 1)
                logits = forward(model, ids, mask, start, start + turn, cache)
                start += turn
                check_cache(cache)
        assert cache.policy_layers[0].pending is None
        found.append(([layer.head_positions.sort(-1).values for layer in cache.policy_layers], logits[:, -1]))
    (expected, last), (positions, own) = found
    assert all(torch.equal(*pair) for pair in zip(positions, expected, strict=True))
    torch.testing.assert_close(own, last, atol=1e-3, rtol=1e-3)


def test_a_last_chunk_of_one_token_has_the_arguments_of_its_attention() -> None:
    model = build("llama", layers=2)
    ids, mask = make_batch([26], [26])
    NOTED.clear()
    with kvpolicy.attach(model, Policy(selector=Noting(), budget=0.5), chunks="hold"):
        cache = PolicyCache(model, prompt=26)
        for start, stop in ((0, 25), (25, 26)):
            forward(model, ids, mask, start, stop, cache)
    assert NOTED and all(isinstance(seen, Forward) for seen in NOTED)


@pytest.mark.parametrize("chunks", ["select", "hold"])
def test_an_announcement_for_other_rows_is_refused_before_anything_changes(chunks: Any) -> None:
    model = build("llama")
    ids, mask = make_batch([26], [26])
    with kvpolicy.attach(model, SMALL, chunks=chunks):
        cache = PolicyCache(model, prompt=[26, 11])
        with pytest.raises(KVPolicyError, match="one length or one per row, got 2 lengths for 1 rows"):
            forward(model, ids, mask, 0, 20, cache)
        cache.announced = Announced(26)
        forward(model, ids, mask, 0, 20, cache)


@pytest.mark.parametrize("policy", ["full", "uniform/even+h2o:decode=grow@16", "h2o:decode=grow@16"])
def test_an_announcement_while_a_prompt_waits_makes_no_slots(policy: str) -> None:
    """As for a last token of the prompt, with which it is compressed."""
    model = build("llama", layers=2)
    ids, mask = make_batch([27], [27, 5])
    with kvpolicy.attach(model, policy, chunks="hold"):
        cache, other = (PolicyCache(model, prompt=27) for _ in range(2))
        forward(model, ids, mask, 0, 26, cache)
        forward(model, ids, mask, 0, 26, other)
        held = cache.nbytes
        cache.expect(27, 3)
        assert cache.nbytes == held
        cache.tick()
        other.announced = Announced(27, 3)
        for column in range(26, 32):
            both = [forward(model, ids, mask, column, column + 1, each) for each in (cache, other)]
            assert torch.equal(*both)
        assert cache.nbytes == other.nbytes
