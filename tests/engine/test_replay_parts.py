"""Attention and scores of a replay from parts, against attention by a mask and a softmax over all that is scored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpolicy.engine.replay import Chunk, Gain, attend_context, received
from kvpolicy.engine.replay_parts import ChunkPlace, attend_and_score
from kvpolicy.hf.transcript import extended
from kvpolicy.statistics.windows import Past, ScoreTransform
from tests.engine.parts import generator
from tests.sampling import product

ROWS = 2
HEADS = 3
DIM = 8
PROMPT = 50
TRANSFORM = ScoreTransform(0.4)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


def chunk_of(place: ChunkPlace) -> Chunk:
    """The same chunk as columns of every row."""

    def columns(*ends: int) -> Tensor:
        return torch.arange(*ends).expand(ROWS, -1)

    size = place.stop - place.start
    chosen = torch.ones(ROWS, size, dtype=torch.bool)
    return Chunk(1, columns(place.start, place.stop), chosen, columns(0), columns(place.sinks))


def slow(q: Tensor, k: Tensor, v: Tensor, past: Past, place: ChunkPlace, gain: Gain | None) -> tuple[Tensor, Tensor]:
    """One matrix of all scores in double precision."""
    group = q.shape[1] // HEADS
    own = k.shape[2] - q.shape[2]
    keys, values = (torch.cat(pair, 2).double().repeat_interleave(group, 1) for pair in ((past[0], k), (past[1], v)))
    score = q.double() @ keys.mT * TRANSFORM.scale
    score.masked_fill_(torch.ones(score.shape[-2:], dtype=torch.bool).triu(PROMPT + own + 1), -torch.inf)
    shown = torch.zeros(keys.shape[2], dtype=torch.bool)
    shown[: place.sinks] = True
    shown[place.start : place.stop] = True
    shown[PROMPT:] = True
    weights = score.masked_fill(~shown, -torch.inf).softmax(-1)[..., place.start : place.stop]
    if gain is not None:
        weights = weights * gain.outputs[:, :, None, place.start : place.stop] / gain.inputs[:, None, :, None]
    return score.softmax(-1) @ values, weights.unflatten(1, (HEADS, group)).amax((2, 3))


PLACES = {
    "first": ChunkPlace(0, 20, 0),
    "middle": ChunkPlace(20, 40, 4),
    "no sinks": ChunkPlace(20, 40, 0),
    "last": ChunkPlace(40, 50, 4),
    "all": ChunkPlace(0, 50, 0),
    "sinks to the chunk": ChunkPlace(4, 5, 4),
}


@product("name,tile,scores", [*PLACES], [1, 1 << 18], ["drawn", "equal", "large", "far apart"])
def test_parts_are_the_whole(name: str, tile: int, scores: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles of queries, of one query head or of several, and where what is not scored has all of the weight."""
    place = PLACES[name]
    monkeypatch.setattr("kvpolicy.engine.replay_parts.CACHED_ELEMENTS", tile)
    error = 1e-4 if scores in ("large", "far apart") else 1e-5  # scores of some hundreds
    for group, new, own in ((1, 37, 37), (2, 20, 37), (2, 1, 1), (4, 5, 37)):
        q = drawn(0, ROWS, HEADS * group, new, DIM)
        k = drawn(1, ROWS, HEADS, own, DIM)
        v = drawn(2, ROWS, HEADS, own, DIM)
        past = Past(drawn(3, ROWS, HEADS, PROMPT, DIM), drawn(4, ROWS, HEADS, PROMPT, DIM), torch.ones(()))
        if scores == "equal":
            k.zero_()
            past.keys.zero_()
        elif scores == "large":
            q *= 60
        elif scores == "far apart":  # by more than fp32 can represent as a ratio of weights
            q = q.abs()
            k = k.abs()
            past.keys.abs_().neg_()
            past.keys[:, :, place.sinks : place.start] = 100
            past.keys[:, :, place.stop :] = 100
        for gain in (None, Gain(drawn(5, ROWS, HEADS * group, PROMPT).abs(), 0.1 + drawn(6, ROWS, new).abs())):
            out, got = attend_and_score(q, k, v, TRANSFORM, past, place, gain)
            want_out, want = slow(q, k, v, past, place, gain)
            torch.testing.assert_close(out.double(), want_out, atol=error, rtol=1e-5)
            torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=error)
            if scores == "equal" and gain is None:
                assert bool((got == got[..., :1]).all()), "ties stay ties"
            # The general functions, which know padding, agree.
            torch.testing.assert_close(out, attend_context(q, k, v, TRANSFORM, past, None), atol=1e-4, rtol=1e-4)
            one = received(q, k, past.keys, TRANSFORM, chunk_of(place), None, gain)
            torch.testing.assert_close(got, one, atol=1e-6, rtol=1e-4)


def test_the_next_position_is_behind_a_rows_own_tokens() -> None:
    ids = torch.arange(12).reshape(3, 4)
    valid = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0]]).bool()
    first = extended(None, ids, valid, None, 3)
    assert first.columns == 3 and first.next_position.tolist() == [7, 7, 5] and not first.positioned
    none_of_the_second = torch.tensor([[1, 1], [0, 0], [0, 1]]).bool()
    second = extended(first, ids[:, :2], none_of_the_second, None, 7)
    assert second.next_position.tolist() == [9, 7, 9] and second.columns == 3
    assert torch.equal(second.valid, torch.cat([valid, none_of_the_second], 1))


def test_positions_that_were_given_once_are_given_to_the_replay() -> None:
    ids = torch.arange(8).reshape(2, 4)
    places = torch.tensor([[5, 6, 7, 8], [0, 0, 1, 2]])
    given = extended(None, ids, None, places, 0)
    assert given.positioned and given.next_position.tolist() == [9, 3]
    assert extended(given, ids, None, None, 4).positioned
    counted = extended(None, ids, None, None, 0)
    assert extended(counted, ids, None, places[:1], 4).positioned


def test_later_changes_of_the_callers_tokens_do_not_count() -> None:
    ids = torch.arange(8).reshape(2, 4)
    valid = torch.tensor([[True] * 4, [False, False, True, True]])
    noted = extended(None, ids, valid, None, 0)
    ids.zero_()
    valid.fill_(True)
    assert noted.ids[0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert noted.valid.tolist() == [[True] * 4, [False, False, True, True]]


def test_rows_are_selected_in_every_part() -> None:
    ids = torch.arange(8).reshape(2, 4)
    valid = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]).bool()
    whole = extended(extended(None, ids, valid, None, 0), ids + 8, None, torch.tensor([[4, 5, 6, 7], [2, 3, 4, 5]]), 4)
    picked = whole.map_rows(lambda t: t[[1, 0, 1]])
    assert [chunk[0].tolist() for chunk in picked.ids] == [[4, 5, 6, 7], [12, 13, 14, 15]]
    assert picked.next_position.tolist() == [6, 8, 6] and picked.valid[:, 0].tolist() == [False, True, False]
