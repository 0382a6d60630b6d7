"""Attention inside blocks, against a loop over the queries, from any pieces."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from torch import Tensor

from kvpolicy.selectors.blocks import BlockAttention, block_attention
from kvpolicy.statistics.statistic import Coming, Tile
from kvpolicy.statistics.windows import ScoreTransform
from tests.engine.parts import candidates_of, generator
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
            statistic = None
            for piece in pieces:
                one = gathered(BlockAttention(size, first), valid, start, start + piece, tile, seen)
                statistic = one if statistic is None else statistic.joined(one, start)
                seen = seen + valid[:, start : start + piece].sum(-1)
                start += piece
            assert statistic is not None
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


def test_before_a_prompt_there_is_nothing() -> None:
    none = BlockAttention(4)
    one = gathered(BlockAttention(4), VALID, 0, 13, 13, SEEN)
    assert none.tensors == () and none.joined(one, 0) is one and one.joined(none, 13) is one


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
