"""An announced prompt in chunks that are held: selected as in one piece, at the last chunk."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import KVPolicyError, Policy, PolicyCache
from kvpolicy.codecs.bfp import BFP
from kvpolicy.codecs.tokenwise import TokenWise
from kvpolicy.codecs.turboquant import TurboQuant
from kvpolicy.engine.page_codes import PromptCodes
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.hf.announced import Announced
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.protocols import Codec, StageStore
from kvpolicy.statistics import Forward
from kvpolicy.statistics.windows import ScoreTransform
from kvpolicy.testing import check_cache
from kvpolicy.text.errors import KVPolicyWarning
from tests.conformance.models import build, layers_for
from tests.conformance.play import forward, make_batch
from tests.engine.filled import attached, prompted
from tests.robust.test_tiles import NOTED, Noting
from tests.sampling import each_once, product

TURNS = [26, 1, 1, 7, 1]
SMALL = "snapkv:window=4:kernel=3@0.5"
CODES = "tokenwise:group_size=4:residual_length=4:block_size=4"


def outcome(
    model: Any, policy: str, lengths: list[int], pieces: list[int], later: list[int] = TURNS[3:4], **how: Any
) -> tuple[list[Tensor], Tensor]:
    """Positions and the last logits after two announced prompts, which come in pieces, and steps."""
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
        for turn in [*later, 1]:
            logits = forward(model, ids, mask, start, start + turn, cache)
            start += turn
            check_cache(cache)
    assert cache.policy_layers[0].pending is None
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
        found, last = outcome(model, policy, lengths, [12, 9, 5], [4, 3], chunks="hold", tile=tile)
        assert all(map(torch.equal, found, positions))
        torch.testing.assert_close(last, logits, atol=0.3 if CODES in policy else 1e-3, rtol=1e-3)


def test_generate_holds_its_chunks() -> None:
    model = build("llama")
    ids, _ = make_batch([26], [26])
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    with kvpolicy.attach(model, SMALL):
        whole = model.generate(ids, **how)
    with kvpolicy.attach(model, SMALL, chunks="hold"):
        assert torch.equal(model.generate(ids, prefill_chunk_size=7, **how), whole)


def test_a_prompt_that_is_not_announced_is_not_held() -> None:
    with attached(SMALL, [26], [26], chunks="hold") as (model, ids, mask):
        layer = prompted(model, ids, mask, 20).policy_layers[0]
        assert layer.pending is None and layer.positions.shape[-1] == 10


def test_chunks_that_are_compressed_by_their_own_queries_warn_once() -> None:
    with attached(SMALL, [26], [26]) as (model, ids, mask):
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


@pytest.mark.parametrize("policy", ["squeeze+h2o@0.5", "squeeze+kvzip:chunk=16@0.5"])
def test_rows_are_chosen_between_held_chunks(policy: str) -> None:
    rows = torch.tensor([1, 0, 1])
    budgets: list[list[list[int]]] = []
    for early in (True, False):
        with attached(policy, [26, 11], [26], chunks="hold") as (model, ids, mask):
            cache = prompted(model, ids, mask, 18, prompt=[26, 11])
            if early:
                cache.batch_select_indices(rows)
                forward(model, ids[rows], mask[rows], 18, 26, cache)
            else:
                forward(model, ids, mask, 18, 26, cache)
                cache.batch_select_indices(rows)
        budgets.append([layer.budget.tolist() for layer in cache.policy_layers])
    assert budgets[0] == budgets[1]


def test_a_held_chunk_is_not_cropped_in_part() -> None:
    with attached("full", [26], [26], chunks="hold") as (model, ids, mask):
        cache = prompted(model, ids, mask, 18, prompt=26)
        with pytest.raises(KVPolicyError, match="must have compressed its prompt before tokens are cropped"):
            cache.crop(-3)
        forward(model, ids, mask, 18, 26, cache)
        cache.crop(-3)
        assert cache.policy_layers[0].pending is None and (cache.policy_layers[0].positions >= 0).sum(-1).max() == 23
        check_cache(cache)


HELD = [SMALL, "squeeze+h2o@0.5", "squeeze+kvzip:chunk=9:sinks=2@0.3"]
PIECES = [[1, 6], [1] * 7, [7]]


@product("policy,pieces", HELD, PIECES, sample=each_once(HELD, PIECES), ids=str)
def test_a_later_prompt_is_held_even_if_it_begins_with_one_token(policy: str, pieces: list[int]) -> None:
    model = build("llama")
    expected, last = outcome(model, policy, [26, 11], [26])
    positions, own = outcome(model, policy, [26, 11], [26], later=pieces, chunks="hold")
    assert all(map(torch.equal, positions, expected))
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


@pytest.mark.parametrize("policy", ["full", "uniform/even+h2o:decode=grow@16", "h2o:decode=grow@16"])
def test_an_announcement_while_a_prompt_waits_makes_no_slots(policy: str) -> None:
    """As for a last token of the prompt, with which it is compressed."""
    with attached(policy, [27], [27, 5], layers=2, chunks="hold") as (model, ids, mask):
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


CODECS = [TokenWise(bits=4, group_size=4), TokenWise(bits="fp8", group_size=4), BFP(mantissa=6), TurboQuant()]


def prompt(columns: int, seed: int, valid: list[list[bool]] | None = None) -> PendingPrompt:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 2, 2, columns, 8, generator=generator) * 4 + 1
    flags = None if valid is None else torch.tensor(valid)
    return PendingPrompt(keys, values, flags, ScoreTransform(1.0))


def written(codec: Codec, tokens: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Keys and values of tokens that are written to a store one prompt after the other, head by head."""
    slots = sum(keys.shape[2] for keys, _, _ in tokens)
    every = torch.zeros(2, 2, 2, slots, 8)
    for row, head in itertools.product(range(2), range(2)):
        store = StageStore(codec.stages[0].alloc(1, 1, slots, 8, "cpu"), ())
        occupied = torch.zeros(1, 1, slots, dtype=torch.bool)
        start = 0
        for keys, values, valid in tokens:
            at = torch.arange(start, start + keys.shape[2])[None, None]
            k, v = (t[row, head][None, None] for t in (keys, values))
            codec.stages[0].write(store, k, v, at, valid[row][None, None], occupied)
            occupied[..., at[0, 0]] = valid[row]
            start += keys.shape[2]
        every[0, row, head] = codec.stages[0].keys(store, slice(0, slots))
        every[1, row, head] = codec.stages[0].values(store, slice(0, slots))
    return every[0], every[1]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_codes_of_two_chunks_are_those_of_a_store(codec: Codec) -> None:
    """Also of a row whose first tokens come in the second chunk, to which its parameters are fitted."""
    first = prompt(5, 0, [[True] * 5, [False] * 5])
    second = prompt(4, 1, [[True] * 4, [False, True, True, True]])
    held = first.encoded(codec, ()).joined(second)
    assert held.columns == 9 and not held.keys.numel() and held.lengths(torch.zeros(2).long()).tolist() == [9, 3]
    keys, values = written(codec, [(each.keys, each.values, each.flags) for each in (first, second)])
    found = held.decoded()
    shown = held.flags[:, None, :, None]
    assert torch.where(shown, found.keys, 0).equal(torch.where(shown, keys, 0))
    assert torch.where(shown, found.values, 0).equal(torch.where(shown, values, 0))
    assert isinstance(held.codes, PromptCodes) and found.codes is None and held.encoded(codec, ()) is held
    moved = held.map_rows(lambda t: t[[1, 0, 1]]).decoded()
    assert moved.keys.equal(found.keys[[1, 0, 1]]) and moved.values.equal(found.values[[1, 0, 1]])


def test_codes_are_counted() -> None:
    held = prompt(12, 0).encoded(TokenWise(bits=4), ()).owned()
    # Keys and values of 8 channels in 4 bits with scale and zero, and mean and deviation of the channels of a head.
    assert held.nbytes == 2 * 2 * (12 * 2 * (4 + 4) + 2 * 8 * 2)


def decoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep prompts plain, with the numbers that their codes decode to."""

    def keep(self: PolicyLayer, pending: PendingPrompt) -> None:
        self.pending = pending.encoded(self.store.spec.codec, self.store.contents.calibrations[0]).decoded().owned()

    monkeypatch.setattr(PolicyLayer, "keep", keep)


ALONE = "must encode every token by itself for hold='codes', got .*; try tokenwise"
WAITING = [
    f"kvzip:chunk=16+{CODES}@0.5",
    "kvzip:chunk=16:plus=true+tokenwise:group_size=4@0.5",
    f"uniform/adakv+kvzip:chunk=16+{CODES}@0.6",
    f"squeeze+h2o+{CODES}@0.5",
    "squeeze+kvzip:chunk=16+bfp:mantissa=4@0.5",
    "kvzip:chunk=16+turboquant@0.5",
]
LENGTHS = [[26, 11], [26]]
TILES = [None, None, 5, 5]


@product("policy,lengths,tile", WAITING, LENGTHS, [None, 5], sample=each_once(WAITING, LENGTHS, TILES))
def test_what_is_kept_of_decoded_codes(
    monkeypatch: pytest.MonkeyPatch, policy: str, lengths: list[int], tile: int | None
) -> None:
    model = build("llama")
    positions, logits = outcome(model, policy, lengths, [26], hold="codes", tile=tile)
    decoded_at_once(monkeypatch)
    expected, last = outcome(model, policy, lengths, [26], tile=tile)
    assert all(map(torch.equal, positions, expected))
    torch.testing.assert_close(logits, last)


def test_chunks_wait_in_codes() -> None:
    model = build("llama")
    policy = "window+tokenwise:bits=8:group_size=4:residual_length=4:block_size=4@0.6"
    plain, logits = outcome(model, policy, [26, 11], [12, 9, 5], [4, 3], chunks="hold")
    coded, close = outcome(model, policy, [26, 11], [12, 9, 5], [4, 3], chunks="hold", hold="codes")
    assert all(map(torch.equal, plain, coded))
    assert not logits.equal(close)
    torch.testing.assert_close(logits, close, atol=0.05, rtol=0.05)


def test_a_waiting_prompt_takes_the_bytes_of_its_codes() -> None:
    bytes_of: dict[str, int] = {}
    for hold in ("plain", "codes"):
        with attached("h2o+tokenwise@0.5", [26], [26], chunks="hold", hold=hold) as (model, ids, mask):
            cache = prompted(model, ids, mask, 20, prompt=26)
            forward(model, ids, mask, 20, 24, cache)
            check_cache(cache)
            pending: Any = cache.policy_layers[0].pending
            vectors = pending.keys.nbytes + pending.values.nbytes + (0 if hold == "plain" else pending.codes.nbytes)
            bytes_of[hold] = vectors
            assert cache.policy_layers[0].held()["waiting prompt"] >= vectors
    assert bytes_of["codes"] < 0.5 * bytes_of["plain"]


@pytest.mark.parametrize(
    ("policy", "how", "message"),
    [
        (SMALL, {"chunks": "keep"}, "chunks must be 'select' or 'hold', got 'keep'"),
        ("kvzip+tokenwise@0.5", {"hold": "coded"}, "hold must be 'plain' or 'codes', got 'coded'; try hold='codes'"),
        *((policy, {"hold": "codes"}, ALONE) for policy in ("kvzip@0.5", "kvzip+kivi@0.5", "h2o+rotate@0.5")),
    ],
)
def test_what_is_refused(policy: str, how: dict[str, Any], message: str) -> None:
    model = build("llama")
    with pytest.raises(KVPolicyError, match=message):
        kvpolicy.attach(model, policy, **how)
    if "hold" in how:
        with pytest.raises(KVPolicyError, match=message):
            kvpolicy.plan(model, policy, **how)
    refused = pytest.raises(KVPolicyError, match=ALONE)
    with kvpolicy.attach(model, "kvzip+tokenwise@0.5", hold="codes"), refused:
        PolicyCache(model, "kvzip@0.5")
