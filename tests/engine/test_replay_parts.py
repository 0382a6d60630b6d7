"""What each token of a chunk receives from a replay, whole and in parts, against slow versions; and transcripts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpolicy.engine.replay import Chunk, Gain, add_scores, attend_context, chunks, received
from kvpolicy.engine.replay_parts import ChunkPlace, attend_and_score
from kvpolicy.engine.replayed_queries import ReplayedQueries, no_queries
from kvpolicy.hf.transcript import extended
from kvpolicy.statistics import Replay
from kvpolicy.statistics.replay import NOT_REPLAYED
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


CHUNK = Chunk(
    number=1,
    columns=torch.tensor([[4, 5, 6, 7], [5, 7, 8, 10], [3, 0, 9, 11]]),
    chosen=torch.tensor([[True] * 4, [True, True, False, False], [False] * 4]),
    overlap=torch.zeros(3, 0, dtype=torch.int64),
    sinks=torch.tensor([[0, 1], [2, 3], [1, 2]]),
)
"""The last row has no such chunk."""


def slow_weights(q: Tensor, k: Tensor, keys: Tensor, valid: Tensor, gain: Gain | None) -> Tensor:
    """The largest weight of each column of the chunk over all queries of a KV head."""
    found = torch.full((3, HEADS, 4), NOT_REPLAYED, dtype=torch.float64)
    for b, hq, i in valid[:, None].expand(-1, 2 * HEADS, -1).nonzero().tolist():
        h = hq // 2
        places = CHUNK.chosen[b].nonzero()[:, 0].tolist()
        sinks = keys[b, h, CHUNK.sinks[b]] if places else keys[b, h, :0]
        own = k[b, h, : i + 1][valid[b, : i + 1]]
        seen = torch.cat([sinks, keys[b, h, CHUNK.columns[b, places]], own]).double()
        weights = (seen @ q[b, hq, i].double() * TRANSFORM.scale).softmax(0)[len(sinks) :]
        for place, weight in zip(places, weights, strict=False):
            factor = 1.0
            if gain is not None:
                factor = float(gain.outputs[b, hq, CHUNK.columns[b, place]] / gain.inputs[b, i])
            found[b, h, place] = max(float(found[b, h, place]), float(weight) * factor)
    return found


@pytest.mark.parametrize("tile", [1, 1 << 20], ids=["tiles of 16 queries", "one tile"])
@pytest.mark.parametrize("with_gain", [False, True])
def test_the_largest_weight_counts(with_gain: bool, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpolicy.engine.replay.TILE_ELEMENTS", tile)
    q = drawn(0, 3, 2 * HEADS, 37, DIM)
    k = drawn(1, 3, HEADS, 37, DIM)
    keys = drawn(2, 3, HEADS, PROMPT, DIM)
    valid = torch.rand(3, 37, generator=generator(3)) < 0.8
    gain = None
    if with_gain:
        gain = Gain(drawn(4, 3, 2 * HEADS, PROMPT).abs(), 0.1 + drawn(5, 3, 37).abs())
    got = received(q, k, keys, TRANSFORM, CHUNK, valid, gain)
    torch.testing.assert_close(got.double(), slow_weights(q, k, keys, valid, gain), atol=1e-6, rtol=1e-5)


def test_columns_that_a_row_does_not_have_keep_their_scores() -> None:
    scores = torch.full((3, HEADS, PROMPT), 0.25)
    new = torch.arange(1.0, 5).expand(3, HEADS, 4).masked_fill(~CHUNK.chosen[:, None], NOT_REPLAYED)
    add_scores(scores, CHUNK, new)
    for row, written in enumerate([{4: 1.0, 5: 2.0, 6: 3.0, 7: 4.0}, {5: 1.0, 7: 2.0}, {}]):
        want = [written.get(column, 0.25) for column in range(PROMPT)]
        assert scores[row].tolist() == [want] * HEADS


def observed(context: Tensor, width: int, chunk: int, tile: int, before: int = 2) -> ReplayedQueries:
    """Queries that are the number of their token, fed in tiles of texts with `before` tokens ahead of the chunk."""
    rows = context.shape[0]
    found = no_queries(torch.zeros(rows, 2, 1, 3), context, width)
    for part in chunks(context, Replay(chunk)):
        columns = before + part.columns.shape[1]
        numbers = torch.arange(columns) - before + part.number * chunk
        q = numbers.float()[None, None, :, None].expand(rows, 2, -1, 3)
        for start in range(0, columns, tile):
            found.add(q[:, :, start : start + tile], start, part, chunk, columns)
    return found


def test_queries_are_spread_over_each_row() -> None:
    context = torch.zeros(4, 40, dtype=torch.bool)
    for row, count in enumerate((40, 13, 3, 0)):
        context[row, 40 - count :] = True
    for chunk, tile in ((64, 64), (7, 64), (7, 3), (40, 1)):
        found = observed(context, 4, chunk, tile)
        assert found.tokens.tolist() == [[5, 15, 25, 35], [1, 4, 8, 11], [0, 1, 2, -1], [-1] * 4]
        want = found.tokens.clamp_min(0).float()[:, None, :, None].expand(-1, 2, -1, 3)
        assert torch.equal(found.queries, want)


def test_no_more_queries_than_tokens() -> None:
    """A window may be any number; memory of as many queries may not."""
    context = torch.ones(2, 5, dtype=torch.bool)
    assert no_queries(torch.zeros(2, 2, 1, 3), context, 10**12).tokens.tolist() == [[0, 1, 2, 3, 4]] * 2


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


def test_rows_of_a_transcript() -> None:
    """Embeddings of two chunks, and what layers are given beside them; all are counted."""
    given = [(torch.rand(3, size, 8), torch.rand(3, size, 2, 4)) for size in (5, 2)]
    valid = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1], [0, 0, 1, 1, 1]]).bool()
    first = extended(None, given[0][0], valid, None, 0, given[0][1])
    there = torch.tensor([[1, 1], [1, 1], [0, 0]]).bool()
    some = extended(first, given[1][0], there, None, 5, given[1][1]).map_rows(lambda t: t[[2, 0]])
    for (embeddings, by_layer), ids, own in zip(given, some.ids, some.by_layer, strict=True):
        assert torch.equal(ids, embeddings[[2, 0]]) and torch.equal(own, by_layer[[2, 0]])
    assert some.next_position.tolist() == [5, 7] and some.valid[:, 0].tolist() == [False, True]
    assert some.nbytes == 2 * (7 * 4 * (8 + 2 * 4) + 7 + 8)
