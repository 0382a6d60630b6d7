"""Scores of a context that is run once more: the attention that its tokens receive from a replay of themselves.

A replay goes chunk by chunk through all layers. Its queries attend to the whole context and to their own past, so that
the model reads what it would read; scores come from a softmax of their own, over the first tokens, one chunk of the
context and the replay itself. Scores of different chunks are then comparable, and cost time linear in the context.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine.attention import MASK_ELEMENTS, MASK_ROWS, attend_tile
from kvpolicy.kernels.mixed_values import mixed_values
from kvpolicy.statistics import Replay
from kvpolicy.statistics.windows import TILE_ELEMENTS, Past, ScoreTransform

NOT_REPLAYED = -1.0
"""The score of a token that was not replayed; others have at least 0."""

SHORTEST = 16
"""Queries of a tile, at least."""


class Chunk(NamedTuple):
    """A chunk of every row's context, as columns of the held prompt.

    Attributes:
        number: Which chunk, from 0.
        columns: Columns of its tokens, [B, C] int64; arbitrary where `chosen` is not set.
        chosen: Which of these columns belong to it, [B, C] bool.
        overlap: Columns of the last tokens before it, [B, O]; read by rows that have the chunk.
        sinks: Columns of the row's first tokens before it, [B, K]; read by rows that have the chunk.
    """

    number: int
    columns: Tensor
    chosen: Tensor
    overlap: Tensor
    sinks: Tensor

    def to(self, device: torch.device) -> Chunk:
        """Move to a device."""
        return Chunk(self.number, *(t.to(device) for t in self[1:]))


def chunks(context: Tensor, replay: Replay) -> Iterator[Chunk]:
    """Divide the context of each row into chunks, by the row's own tokens.

    Args:
        context: Which tokens of the held prompt are a context to replay, [B, P] bool.
        replay: The size of a chunk and of what is read before it.
    """
    # The row's own tokens first, in their order.
    order = (~context).to(torch.uint8).argsort(dim=-1, stable=True)
    count = context.sum(-1, keepdim=True)
    for number in range(-(-int(count.max()) // replay.chunk)):
        start = number * replay.chunk
        columns = order[:, start : start + replay.chunk]
        rank = start + torch.arange(columns.shape[1], device=context.device)
        overlap = order[:, max(start - replay.overlap, 0) : start] if replay.later else order[:, :0]
        yield Chunk(number, columns, rank < count, overlap, order[:, : min(replay.sinks, start)])


def attend_context(
    q: Tensor, k: Tensor, v: Tensor, transform: ScoreTransform, past: Past, valid: Tensor | None
) -> Tensor:
    """Attend from a replay to the whole context and causally to itself, [B, Hq, T, D].

    Args:
        q: Queries of the last T tokens of the replay, [B, Hq, T, D].
        k: [B, H, R, D].
        v: [B, H, R, D].
        transform: From products to attention weights.
        past: The context.
        valid: Which of the R tokens are not padding, [B, R] bool; None if all are and the past has no empty slot.
    """
    keys = torch.cat([past.keys, k], 2)
    values = mixed_values(keys, torch.cat([past.values, v], 2))
    if transform.softcap is not None or transform.sinks is not None:
        return attend_tile(q, keys, values, transform, past, valid, None)
    if valid is None:  # the context is as the earlier part of a prompt
        return attend_tile(q, keys, values, transform, None, None, None)
    new = q.shape[2]
    held = keys.shape[2] - new
    # One head stands for all: nothing was evicted from a held prompt, so that all heads have the same tokens.
    seen = torch.cat([past.occupied[:, 0], valid], 1)[:, None, None]
    gqa = q.shape[1] != k.shape[1]
    rows = min(max(MASK_ELEMENTS // seen.numel(), 16), MASK_ROWS)
    out = q.new_empty(*q.shape[:3], values.shape[3])
    for start in range(0, new, rows):
        stop = min(start + rows, new)
        # Query i of this part stands in column held + start + i, which it sees as well.
        mask = torch.ones(stop - start, held + stop, dtype=torch.bool, device=q.device).tril(held + start)
        mask = mask & seen[..., : held + stop]
        tile = q[:, :, start:stop], keys[:, :, : held + stop], values[:, :, : held + stop]
        out[:, :, start:stop] = F.scaled_dot_product_attention(
            *tile, attn_mask=mask, scale=transform.scale, enable_gqa=gqa
        )
    # A padding query may see nothing, and its output is not a number then.
    return out.masked_fill_(~valid[:, None, -new:, None], 0)


def received(
    q: Tensor,
    k: Tensor,
    keys: Tensor,
    transform: ScoreTransform,
    chunk: Chunk,
    valid: Tensor | None,
    gain: Gain | None,
) -> Tensor:
    """The largest attention that each token of a chunk receives from the replay, [B, H, C] fp32.

    Args:
        q: Queries of the last T tokens of the replay, [B, Hq, T, D].
        k: The replay's keys, [B, H, R, D].
        keys: Keys of the held prompt, [B, H, P, D].
        transform: From products to attention weights.
        chunk: The chunk that is replayed.
        valid: Which tokens of the replay are not padding, [B, R] bool; None if all are, as then all of the chunk.
        gain: Factors of the attention weights, or None.
    """
    batch, heads, _, dim = k.shape
    new = q.shape[2]
    group = q.shape[1] // heads
    before = chunk.sinks.shape[1]
    scored = before + chunk.columns.shape[1]
    seen = torch.cat([_columns(keys, chunk.sinks), _columns(keys, chunk.columns), k], 2)
    held = seen.shape[2] - new
    hidden = None
    if valid is not None:
        # A row that has a token of this chunk has all sinks before it. In any other row, these columns may be padding.
        hidden = ~torch.cat([chunk.chosen.any(-1, keepdim=True).expand(-1, before), chunk.chosen, valid], 1)
    is_query = None if valid is None else valid[:, valid.shape[1] - new :]
    factor = None if gain is None else gain.of_tokens(chunk.columns).unflatten(1, (heads, group))[:, :, :, None]
    largest = k.new_zeros(batch, heads, chunk.columns.shape[1], dtype=torch.float32)
    grouped = q.unflatten(1, (heads, group))
    sinks = None if transform.sinks is None else transform.sinks.unflatten(0, (heads, group))
    rows, many = tile_shape(TILE_ELEMENTS, batch * group * seen.shape[2], heads)
    future = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
    for first in range(0, heads, many):
        of = slice(first, first + many)
        weigh = transform if sinks is None else transform._replace(sinks=sinks[of].flatten())
        for start in range(0, new, rows):
            stop = min(start + rows, new)
            count = stop - start
            end = held + stop
            tile = grouped[:, of, :, start:stop].reshape(batch, -1, group * count, dim)
            score = weigh.scores(tile, seen[:, of, :end]).unflatten(2, (group, count))
            score[..., held + start :].masked_fill_(future[:count, :count], -torch.inf)
            if hidden is not None:
                score.masked_fill_(hidden[:, None, None, None, :end], -torch.inf)
            weights = weigh.weights(score)[..., before:scored]
            if factor is not None and gain is not None:
                weights = weights * factor[:, of] / gain.inputs[:, None, None, start:stop, None]
            if is_query is not None:  # also replaces the NaN of a row without this chunk, which sees nothing
                weights = weights.masked_fill(~is_query[:, None, None, start:stop, None], 0)
            largest[:, of] = torch.maximum(largest[:, of], weights.amax((2, 3)))
    return largest.masked_fill(~chunk.chosen[:, None], NOT_REPLAYED)


def tile_shape(elements: int, scores: int, heads: int) -> tuple[int, int]:
    """Queries and KV heads of a tile: many queries of few heads, since products of few rows are slow.

    Args:
        elements: Scores of a tile.
        scores: Scores of one query of each row in the group of one KV head.
        heads: KV heads.
    """
    rows = min(max(elements // scores, SHORTEST), MASK_ROWS)
    return rows, min(max(elements // (rows * scores), 1), heads)


def add_scores(scores: Tensor, chunk: Chunk, new: Tensor) -> None:
    """Write the scores of a chunk, [B, H, C], to those of the held prompt, [B, H, P], in place."""
    index = chunk.columns[:, None].expand_as(new)
    # A row with fewer tokens has columns of other chunks here; their scores stay.
    scores.scatter_(-1, index, new.maximum(scores.gather(-1, index)))


class Gain(NamedTuple):
    """Factors of attention weights: what a token adds to the residual stream, over the size of what asks.

    Attributes:
        outputs: Norm of each token's value behind the output projection, by query head, [B, Hq, P] fp32.
        inputs: Norm of the attention module's input for each query, [B, T] fp32; never 0.
    """

    outputs: Tensor
    inputs: Tensor

    def of_tokens(self, columns: Tensor) -> Tensor:
        """`outputs` of some columns [B, C], [B, Hq, C]."""
        return self.outputs.gather(-1, columns[:, None].expand(-1, self.outputs.shape[1], -1))


def input_norms(hidden: Tensor) -> Tensor:
    """Norm of each input [B, R, hidden] of an attention module, [B, R] fp32, as a divisor."""
    return hidden.float().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)


def _columns(keys: Tensor, columns: Tensor) -> Tensor:
    """Some columns [B, n] of keys [B, H, P, D]."""
    batch, heads, _, dim = keys.shape
    return keys.gather(2, columns[:, None, :, None].expand(batch, heads, -1, dim))
