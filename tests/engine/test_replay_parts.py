"""Attention and scores of a replay from parts, against attention by a mask and a softmax over all that is scored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpolicy.engine.replay import Chunk, Gain, attend_context, received
from kvpolicy.engine.replay_parts import ChunkPlace, attend_and_score
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
