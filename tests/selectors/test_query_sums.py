"""Sums over queries, against a loop over them: inside blocks, of the newest ones, and of probes."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from torch import Tensor

from kvpolicy.selectors.a2sf import DecayedSum
from kvpolicy.selectors.blocks import BlockAttention, block_attention
from kvpolicy.selectors.probe import ProbeQueries, draw_probes
from kvpolicy.selectors.scissorhands import BELOW_MEAN, BelowMean
from kvpolicy.statistics import windows
from kvpolicy.statistics.statistic import Coming, Tile
from kvpolicy.statistics.windows import Past, ScoreTransform
from tests.conformance.bench import draw
from tests.engine.parts import candidates_of, generator, newest_queries
from tests.reference.selectors.probe import probes as slow_probes
from tests.sampling import product

SEEN = torch.tensor([0, 5, 3, 0])
VALID = torch.tensor([[1] * 13, [0] * 4 + [1] * 9, [0, 1, 1, 0, 1, 1, 1, 0, 0, 1, 0, 1, 0], [0] * 13], dtype=torch.bool)
QUERIES = torch.randn(4, 4, 13, 6, generator=generator(0)) * 3
KEYS = torch.randn(4, 2, 13, 6, generator=generator(1))


def slow(size: int, first: int, valid: Tensor) -> Tensor:
    """The sums [4, 4, 13], query by query."""
    sums = torch.zeros(4, 4, 13, dtype=torch.float64)
    for b in range(4):
        columns = valid[b].nonzero()[:, 0].tolist()
        block = {c: (int(SEEN[b]) + at - first) // size for at, c in enumerate(columns) if SEEN[b] + at >= first}
        for hq in range(4):
            for c in block:
                near = [other for other in block if block[other] == block[c]]
                logits = [float(QUERIES[b, hq, c].double() @ KEYS[b, hq // 2, other].double()) for other in near]
                whole = sum(map(math.exp, logits))
                for other, logit in zip(near, logits, strict=True):
                    sums[b, hq, other] += math.exp(logit) / whole
    return sums.float()


def gathered(
    statistic: BlockAttention, valid: Tensor, start: int, stop: int, tile: int, seen: Tensor
) -> BlockAttention:
    """The statistic of a chunk that comes in tiles, whose padding holds what no one may read."""
    own = valid[:, start:stop]
    statistic = statistic.begun(Coming(own, stop - start, seen, None))
    for at in range(start, stop, tile):
        columns = slice(at, min(at + tile, stop))
        flags = valid[:, None, columns, None]
        q, k = (t[:, :, columns].masked_fill(~flags, torch.nan) for t in (QUERIES, KEYS))
        whole = tile >= stop - start
        statistic = statistic.added(Tile(q, k, at - start, own[:, at - start : columns.stop - start], whole))
    return statistic


def reduced(statistic: BlockAttention, valid: Tensor) -> Tensor:
    return statistic.reduced(candidates_of(KEYS, valid, ScoreTransform(0.1, 3.0)))


@product("pieces,size,first", [[13], [1] * 13, [12, 1], [2, 9, 2]], [1, 3, 4, 100], [0, 2, 30])
def test_any_pieces_give_the_sums_of_the_loop(pieces: list[int], size: int, first: int) -> None:
    """As chunks of a held prompt, each in tiles."""
    for valid in (VALID, torch.ones_like(VALID)):
        want = slow(size, first, valid)
        for tile in (13, 2):
            start = 0
            seen = SEEN
            statistic = BlockAttention(size, first)  # of nothing
            for piece in pieces:
                one = gathered(BlockAttention(size, first), valid, start, start + piece, tile, seen)
                statistic = statistic.joined(one, start)
                seen = seen + valid[:, start : start + piece].sum(-1)
                start += piece
            torch.testing.assert_close(reduced(statistic, valid), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tile", [1, 5, 13])
def test_complete_blocks_are_not_held(tile: int) -> None:
    """No row holds more than the tokens of its first block and of its last one."""
    found = gathered(BlockAttention(3), VALID, 0, 13, tile, SEEN)
    assert found.open is not None and found.sums is not None
    places = [[place for place in row if place >= 0] for row in found.open.places.tolist()]
    assert places == [[12], [5, 12, 13], [9], []]
    assert found.open.queries.shape == (4, 4, 3, 6) and not found.open.queries.isnan().any()
    assert sum(t.numel() for t in found.tensors) == 4 * (4 * 13 + 3 * (4 * 6 + 2 * 6 + 2))


def test_nothing_that_was_given_is_changed() -> None:
    dice = Random(0)
    whole = gathered(BlockAttention(4), VALID, 0, 13, 13, SEEN)
    copies = [t.clone() for t in whole.tensors]
    order = torch.tensor([dice.randrange(4) for _ in range(5)])
    taken = reduced(whole.map_rows(lambda t: t[order]), VALID[order])
    assert torch.equal(taken, reduced(whole, VALID)[order])
    whole.joined(gathered(BlockAttention(4), VALID, 0, 13, 13, SEEN + 13), 13)
    assert all(torch.equal(*pair) for pair in zip(whole.tensors, copies, strict=True))


def test_large_products_in_half_precision_keep_their_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a scale, scores of 100 differ by more than bf16 tells apart; and in tiles of queries as at once."""
    q, k = (t[:1].bfloat16() * 5 for t in (QUERIES, KEYS))
    there = torch.ones(1, 13, dtype=torch.bool)
    got = block_attention(q.float(), k.float(), there)
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT
    torch.testing.assert_close(got, scores.softmax(-1).sum(2).float(), atol=1e-4, rtol=1e-4)
    monkeypatch.setattr("kvpolicy.selectors.blocks.TILE_ELEMENTS", 1)
    long = torch.cat([q, q, q], 2).float(), torch.cat([k, k, k], 2).float(), torch.ones(1, 39, dtype=torch.bool)
    tiled = block_attention(*long)
    torch.testing.assert_close(tiled[..., :13], got, atol=1e-4, rtol=1e-4)


OCCUPIED = torch.tensor([1, 0, 1, 1, 0]).bool()
MASKS = [None, [1] * 11, [0, 0, 0, *[1] * 8], [1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 0], [0] * 10 + [1]]


@product("held,mask,width", [0, 5], MASKS, [1, 4, 40])
def test_sums_and_counts(held: int, mask: list[int] | None, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over padding, empty slots and rows with fewer queries than the window has, in tiles of sixteen queries."""
    monkeypatch.setattr("kvpolicy.statistics.windows.TILE_ELEMENTS", 1)
    q, k, _ = draw(11, 3, heads=2, group=2, sharp=1.0)
    valid = None if mask is None else torch.tensor([mask]).bool()
    past = None
    if held:
        _, keys, values = draw(held, 5)
        past = Past(keys, values, OCCUPIED.expand(1, 2, -1))
    window = newest_queries(q, valid, width)
    seen = candidates_of(k, valid, ScoreTransform(0.35), past)
    factor = 0.01 if width == 4 else 0.7
    sums = DecayedSum(width, factor, window).reduced(seen)
    counts = BelowMean(width, window).reduced(seen)
    every = k if past is None else torch.cat([past.keys, k], 2)
    there = torch.ones(11).bool() if valid is None else valid[0]
    own = there.nonzero()[:, 0].tolist()
    for hq in range(4):
        decayed, below = torch.zeros(2, held + 11)
        for age, column in enumerate(reversed(own[-width:])):
            sees = torch.cat([OCCUPIED[:held], there & (torch.arange(11) <= column)])
            score = (every[0, hq // 2] @ q[0, hq, column] * 0.35).masked_fill(~sees, -torch.inf)
            weights = torch.softmax(score, 0)
            decayed += factor**age * weights
            below += sees & (weights * sees.sum() < BELOW_MEAN)
        torch.testing.assert_close(sums[0, hq], decayed)
        assert torch.equal(counts[0, hq], below)


ROWS = 3
HEADS = 2
GROUP = 2
NEW = 40
DIM = 4
PADDED = torch.arange(NEW) >= torch.tensor([[0], [36], [0]])
PADDED[2, -1] = False
SHARES = [(0.3, 0.3), (0.0, 0.5), (1.0, 0.0), (0.0, 0.0), (1.0, 1.0), (0.01, 0.0)]


def config(recent: float, random: float, seed: int) -> dict[str, float]:
    return {"recent": recent, "random": random, "seed": seed}


@pytest.mark.parametrize("share", SHARES)
def test_probes_are_those_of_the_slow_version(share: tuple[float, float]) -> None:
    for length in (1, 2, 9, 40):
        for seed in range(3):
            assert draw_probes(length, ProbeQueries(*share, seed)).tolist() == slow_probes(config(*share, seed), length)


def slow_sums(q: Tensor, k: Tensor, valid: Tensor, past: Past | None, at: list[list[int]]) -> tuple[Tensor, Tensor]:
    """One probe after the other, over the tokens that it may see: how much each token gets, of how many probes."""
    keys = k if past is None else torch.cat([past.keys, k], 2)
    held = keys.shape[2] - NEW
    total, count = torch.zeros(2, ROWS, HEADS * GROUP, held + NEW, dtype=torch.float64)
    for b in range(ROWS):
        for hq in range(HEADS * GROUP):
            own = valid[b] if past is None else torch.cat([past.occupied[b, hq // GROUP], valid[b]])
            for column in at[b]:
                sees = own & (torch.arange(held + NEW) <= held + column)
                scores = keys[b, hq // GROUP].double() @ q[b, hq, column].double() * 0.5
                total[b, hq] += scores.masked_fill(~sees, -torch.inf).softmax(0)
                count[b, hq] += sees
    return total, count


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("with_past", [False, True])
@pytest.mark.parametrize("tile", [1 << 20, 1])
def test_sums_are_those_of_the_whole_matrix(
    padded: bool, with_past: bool, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in tiles, which have at least 16 queries."""
    monkeypatch.setattr(windows, "TILE_ELEMENTS", tile)
    q = torch.randn(ROWS, HEADS * GROUP, NEW, DIM, generator=generator(0))
    k = torch.randn(ROWS, HEADS, NEW, DIM, generator=generator(1))
    valid = PADDED if padded else None
    past = None
    if with_past:
        occupied = torch.rand(ROWS, HEADS, 5, generator=generator(2)) < 0.6
        keys = torch.randn(ROWS, HEADS, 5, DIM, generator=generator(3))
        past = Past(keys, torch.zeros_like(keys), occupied)
    coming = Coming(valid, NEW, torch.zeros(ROWS, dtype=torch.int64), None)
    gathered = ProbeQueries(0.3, 0.3, 2).begun(coming).added(Tile(q, k, 0, valid, True))
    total, count = gathered.reduced(candidates_of(k, valid, ScoreTransform(0.5), past))
    there = torch.ones_like(PADDED) if valid is None else valid
    columns = [row.nonzero()[:, 0] for row in there]
    at = [own[slow_probes(config(0.3, 0.3, 2), len(own))].tolist() for own in columns]
    want, seen = slow_sums(q, k, there, past, at)
    torch.testing.assert_close(total.double(), want, atol=1e-5, rtol=1e-5)
    # How many probes could see a token is only asked of tokens that there are.
    assert torch.equal(count.double()[want > 0], seen[want > 0])
