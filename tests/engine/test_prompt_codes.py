"""A prompt that waits in the codes of its codec: what it attends to and what is kept is what the codes decode to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import KVPolicyError, PolicyCache
from kvpolicy.codecs.bfp import BFP
from kvpolicy.codecs.tokenwise import TokenWise
from kvpolicy.codecs.turboquant import TurboQuant
from kvpolicy.engine.page_codes import PromptCodes
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.protocols import Codec, StageStore
from kvpolicy.statistics.windows import ScoreTransform
from kvpolicy.testing import check_cache
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch
from tests.engine.test_held_chunks import CODES, outcome
from tests.sampling import each_once, product

CODECS = [TokenWise(bits=4, group_size=4), TokenWise(bits="fp8", group_size=4), BFP(mantissa=6), TurboQuant()]


def prompt(columns: int, seed: int, valid: list[list[bool]] | None = None) -> PendingPrompt:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 2, 2, columns, 8, generator=generator) * 4 + 1
    flags = None if valid is None else torch.tensor(valid)
    return PendingPrompt(keys, values, flags, ScoreTransform(1.0))


def written(codec: Codec, tokens: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Keys and values of tokens that are written to a store one prompt after the other, head by head."""
    rows = tokens[0][0].shape[0]
    found: list[list[tuple[Tensor, Tensor]]] = []
    for row in range(rows):
        found.append([])
        for head in range(tokens[0][0].shape[1]):
            slots = sum(keys.shape[2] for keys, _, _ in tokens)
            store = StageStore(codec.stages[0].alloc(1, 1, slots, 8, "cpu"), ())
            occupied = torch.zeros(1, 1, slots, dtype=torch.bool)
            start = 0
            for keys, values, valid in tokens:
                at = torch.arange(start, start + keys.shape[2])[None, None]
                k, v = (t[row : row + 1, head : head + 1] for t in (keys, values))
                codec.stages[0].write(store, k, v, at, valid[row][None, None], occupied)
                occupied[..., start : start + keys.shape[2]] = valid[row]
                start += keys.shape[2]
            every = slice(0, slots)
            found[-1].append((codec.stages[0].keys(store, every)[0, 0], codec.stages[0].values(store, every)[0, 0]))
    keys, values = (torch.stack([torch.stack([pair[side] for pair in row]) for row in found]) for side in (0, 1))
    return keys, values


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
    assert all(torch.equal(*pair) for pair in zip(positions, expected, strict=True))
    torch.testing.assert_close(logits, last)


def test_chunks_wait_in_codes() -> None:
    model = build("llama")
    policy = "window+tokenwise:bits=8:group_size=4:residual_length=4:block_size=4@0.6"
    plain, logits = outcome(model, policy, [26, 11], [12, 9, 5], chunks="hold")
    coded, close = outcome(model, policy, [26, 11], [12, 9, 5], chunks="hold", hold="codes")
    assert all(torch.equal(*pair) for pair in zip(plain, coded, strict=True))
    assert not logits.equal(close)
    torch.testing.assert_close(logits, close, atol=0.05, rtol=0.05)


def test_a_waiting_prompt_takes_the_bytes_of_its_codes() -> None:
    model = build("llama")
    ids, mask = make_batch([26], [26])
    bytes_of: dict[str, int] = {}
    hold: Any
    for hold in ("plain", "codes"):
        with kvpolicy.attach(model, "h2o+tokenwise@0.5", chunks="hold", hold=hold):
            cache = PolicyCache(model, prompt=26)
            forward(model, ids, mask, 0, 20, cache)
            forward(model, ids, mask, 20, 24, cache)
            check_cache(cache)
            pending: Any = cache.policy_layers[0].pending
            vectors = pending.keys.nbytes + pending.values.nbytes + (0 if hold == "plain" else pending.codes.nbytes)
            bytes_of[hold] = vectors
            assert cache.policy_layers[0].held()["waiting prompt"] >= vectors
    assert bytes_of["codes"] < 0.5 * bytes_of["plain"]


@pytest.mark.parametrize("policy", ["kvzip@0.5", "kvzip+kivi@0.5", "h2o+rotate@0.5", "h2o@0.5"])
def test_codecs_that_do_not_encode_every_token_by_itself(policy: str) -> None:
    model = build("llama")
    with pytest.raises(
        KVPolicyError, match=r"must encode every token by itself for hold='codes', got .*; try tokenwise"
    ):
        kvpolicy.attach(model, policy, hold="codes")
    with pytest.raises(KVPolicyError, match=r"for hold='codes'"):
        kvpolicy.plan(model, policy, hold="codes")


def test_a_cache_of_another_codec_is_refused() -> None:
    model = build("llama")
    with (
        kvpolicy.attach(model, "kvzip+tokenwise@0.5", hold="codes"),
        pytest.raises(KVPolicyError, match="for hold='codes', got"),
    ):
        PolicyCache(model, "kvzip@0.5")


def test_neither_plain_nor_codes() -> None:
    with pytest.raises(KVPolicyError, match="hold must be 'plain' or 'codes', got 'coded'; try hold='codes'"):
        kvpolicy.attach(build("llama"), "kvzip+tokenwise@0.5", hold="coded")  # pyright: ignore[reportArgumentType]
