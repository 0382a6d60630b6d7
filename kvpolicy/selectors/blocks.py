"""Attention inside blocks of consecutive tokens of a prompt, in both directions, summed over the queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.statistics import Coming, Context, Sizes, Statistic, Tile, Working
from kvpolicy.statistics.statistic import SCORE_NBYTES, SHORTEST_TILE
from kvpolicy.statistics.windows import TILE_ELEMENTS, take_queries, together


class OpenTokens(NamedTuple):
    """Tokens of blocks that are not complete yet, by ascending position; 0 where a row has fewer.

    Attributes:
        queries: [B, Hq, W, D].
        keys: [B, H, W, D].
        places: Their positions, counted from the first that is in a block, [B, W] int64, -1 for none.
        columns: Their columns in the prompt, [B, W] int64.
    """

    queries: Tensor
    keys: Tensor
    places: Tensor
    columns: Tensor

    def then(self, later: OpenTokens) -> OpenTokens:
        """These tokens and later ones."""
        queries, keys = (torch.cat(pair, 2) for pair in zip(self[:2], later[:2], strict=True))
        places, columns = (torch.cat(pair, 1) for pair in zip(self[2:], later[2:], strict=True))
        return OpenTokens(queries, keys, places, columns)

    def where(self, stays: Tensor) -> OpenTokens:
        """Those that are in `stays` [B, W] bool, in their order."""
        width = int(stays.sum(1).max()) if stays.numel() else 0
        order = stays.to(torch.uint8).argsort(dim=1, stable=True)[:, stays.shape[1] - width :]
        there = stays.gather(1, order)
        queries, keys = (take_queries(t, order).masked_fill(~there[:, None, :, None], 0) for t in self[:2])
        places = self.places.gather(1, order).masked_fill(~there, -1)
        return OpenTokens(queries, keys, places, self.columns.gather(1, order).masked_fill(~there, 0))


@dataclass(frozen=True)
class BlockAttention(Statistic[Tensor]):
    """Attention without a scale inside blocks of positions, each token to all tokens of its block.

    A block begins at the same positions whatever pieces a prompt comes in, so that pieces need not agree on anything.
    Complete blocks are summed as they come, and only the tokens of the others are held.

    Attributes:
        size: Positions of a block.
        first: The first position that is in a block.
        sums: [B, Hq, P] fp32, of the complete blocks; None before a prompt.
        open: The tokens of the other blocks; None before a prompt.
        positions: Positions of the prompt's tokens, [B, P] int32, -1 for padding; None before a prompt and behind it.
    """

    size: int
    first: int = 0
    sums: Tensor | None = None
    open: OpenTokens | None = None
    positions: Tensor | None = None

    of_readers: ClassVar[bool] = True
    along: ClassVar = "heads"

    def described(self) -> str:
        """Which attention."""
        return f"the attention inside blocks of {self.size:,} tokens of the prompt"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The sums, and the tokens that are held."""
        return () if self.sums is None or self.open is None else (self.sums, *self.open)

    def begun(self, coming: Coming) -> BlockAttention:
        """Nothing was seen."""
        return BlockAttention(self.size, self.first, positions=coming.positions)

    def added(self, tile: Tile) -> BlockAttention:
        """Sum the blocks that a tile completes."""
        assert self.positions is not None
        batch, heads, new, _ = tile.queries.shape
        columns = torch.arange(tile.start, tile.start + new, device=tile.queries.device)
        at = self.positions[:, tile.start : tile.start + new].long()
        places = torch.where(at >= self.first, at - self.first, -1)
        tokens = OpenTokens(tile.queries, tile.keys, places, columns.expand(batch, -1))
        sums = tile.queries.new_zeros(batch, heads, self.positions.shape[1], dtype=torch.float32)
        if self.sums is not None and self.open is not None:
            sums = self.sums
            tokens = self.open.then(tokens) if self.open.places.shape[1] else tokens
        found = self._summed(sums, tokens)
        return found if tile.start + new < self.positions.shape[1] else replace(found, positions=None)

    def joined(self, later: Any, columns: int) -> BlockAttention:
        """The blocks of both, and those that the later chunk completes."""
        if self.sums is None or self.open is None or later.sums is None or later.open is None:
            return self if later.sums is None else later
        behind = later.open._replace(columns=later.open.columns + columns * (later.open.places >= 0))
        return self._summed(torch.cat([self.sums, later.sums], 2), self.open.then(behind))

    def _summed(self, sums: Tensor, tokens: OpenTokens) -> BlockAttention:
        sums, rest = sum_blocks(sums, tokens, self.size, partial=False)
        return replace(self, sums=sums, open=rest)

    def beside(self, other: Any, heads: int) -> BlockAttention:
        """The sums and the tokens of both layers, which have the same keys."""
        assert self.sums is not None and self.open is not None and other.sums is not None and other.open is not None
        queries = together(self.open.queries, other.open.queries, heads)
        sums = together(self.sums, other.sums, heads)
        return replace(self, sums=sums, open=self.open._replace(queries=queries))

    def reduced(self, context: Context) -> Tensor:
        """The sums of all blocks, [B, Hq, N] fp32; 0 for tokens from before, and for those in no block."""
        assert self.sums is not None and self.open is not None
        return F.pad(sum_blocks(self.sums, self.open, self.size, partial=True)[0], (context.slots, 0))

    def working(self, sizes: Sizes) -> Working:
        """The sums, the tokens of blocks that are not complete, and a block of a tile."""
        block = min(self.size, sizes.columns)
        # Queries and keys of a token: those of the first and of the last block are held, and put before a tile's.
        width = sizes.widest + sizes.heads * sizes.head_dim
        sums = 4 * sizes.scores
        held = 2 * sizes.batch * block * width * sizes.itemsize + sums
        joined = sizes.batch * sizes.tile * width * sizes.itemsize * (sizes.tile < sizes.columns)
        of_block = sizes.batch * block * width * (4 + sizes.itemsize)
        scores = sizes.batch * sizes.queries * block
        rows = min(max(TILE_ELEMENTS // max(scores, 1), SHORTEST_TILE), block)
        summed = sums + joined + of_block + SCORE_NBYTES * scores * rows
        return Working(held, held + summed, held + 2 * 4 * sizes.scores)

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> BlockAttention:
        """The same with `fn` of the sums and of the tokens."""
        sums = None if self.sums is None else fn(self.sums)
        return replace(self, sums=sums, open=None if self.open is None else OpenTokens(*map(fn, self.open)))


def sum_blocks(sums: Tensor, tokens: OpenTokens, size: int, *, partial: bool) -> tuple[Tensor, OpenTokens]:
    """The sums with the blocks of some tokens, and the tokens whose blocks were left out.

    Args:
        sums: [B, Hq, P] fp32.
        tokens: The tokens.
        size: Positions of a block.
        partial: Whether blocks without all their tokens count too.
    """
    there = tokens.places >= 0
    number = _numbers(tokens.places, size)
    blocks = int(number.max()) + 1 if number.numel() else 0
    if not blocks:
        return sums, tokens.where(there)
    counts = torch.zeros_like(number[:, :1].expand(-1, blocks)).scatter_add(1, number.clamp_min(0), there.long())
    done = counts > 0 if partial else counts == size  # [B, blocks]
    place = torch.where(there, number * size + tokens.places % size, blocks * size)
    # One more place, for tokens of no block.
    table = torch.full_like(place[:, :1].expand(-1, blocks * size + 1), -1)
    table = table.scatter(1, place, torch.arange(place.shape[1], device=place.device).expand_as(place))
    sums = sums.clone()
    for block, some in enumerate(done.any(0).tolist()):
        if some:
            at = table[:, block * size : (block + 1) * size].masked_fill(~done[:, block, None], -1)
            _add_block(sums, tokens, at)
    return sums, tokens.where(there & ~done.gather(1, number.clamp_min(0)))


def _numbers(places: Tensor, size: int) -> Tensor:
    """Which of the blocks that a row has any token of a token is in, [B, W] int64, -1 for no token."""
    there = places >= 0
    block = (places // size).masked_fill(~there, -1)
    # Tokens stand in the order of their places, so that a block begins where the number grows.
    reached = block.cummax(1).values if block.shape[1] else block
    before = torch.cat([torch.full_like(reached[:, :1], -1), reached[:, :-1]], 1)
    return ((reached > before).cumsum(1) - 1).masked_fill(~there, -1)


def _add_block(sums: Tensor, tokens: OpenTokens, at: Tensor) -> None:
    """Add, in place, what the tokens `at` [B, size] (-1 for none) receive of each other."""
    there = at >= 0
    queries, keys = (take_queries(t, at).float() for t in tokens[:2])
    received = block_attention(queries, keys, there)
    columns = tokens.columns.gather(1, at.clamp_min(0))[:, None].expand_as(received)
    sums.scatter_add_(2, columns, received.masked_fill(~there[:, None], 0))


def block_attention(queries: Tensor, keys: Tensor, there: Tensor) -> Tensor:
    """Attention weights of the softmax of plain products, summed over the queries, [B, Hq, n] fp32.

    Args:
        queries: [B, Hq, n, D] fp32: without a scale, products in half precision would lose the weights.
        keys: [B, H, n, D] fp32.
        there: Which of the tokens take part, [B, n] bool.
    """
    batch, heads, size, _ = queries.shape
    grouped = queries.unflatten(1, (keys.shape[1], -1))
    total = queries.new_zeros(*grouped.shape[:3], size)
    rows = max(TILE_ELEMENTS // (batch * heads * size), 16)
    for start in range(0, size, rows):
        part = grouped[:, :, :, start : start + rows]
        score = (part.flatten(2, 3) @ keys.mT).unflatten(2, part.shape[2:4])
        weights = score.masked_fill_(~there[:, None, None, None], -torch.inf).softmax(-1)
        # Queries of padding, and all of a row without a token, whose weights are no numbers.
        total += weights.masked_fill_(~there[:, None, None, start : start + rows, None], 0).sum(3)
    return total.flatten(1, 2)
