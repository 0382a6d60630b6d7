"""Attention and scores of a replay from the same products, where nothing is padding.

Attention to the sinks, to the chunk and to the replay itself is computed apart from that to the rest of the context.
Its normalizer is that of the scores, so that these need neither a softmax of their own nor products with other keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.attention_part import Part
from kvpolicy.engine.partial_attention import attend_causal, attend_part
from kvpolicy.engine.replay import Gain, tile_shape
from kvpolicy.statistics.windows import Past, ScoreTransform

CACHED_ELEMENTS = 1 << 18
"""Scores in one tile: 1 MiB of fp32, so that a tile stays in the cache of a core."""


class ChunkPlace(NamedTuple):
    """Where a chunk stands in a context without padding: the columns from `start` to `stop`, behind `sinks` of them."""

    start: int
    stop: int
    sinks: int


def attend_and_score(
    q: Tensor, k: Tensor, v: Tensor, transform: ScoreTransform, past: Past, of: ChunkPlace, gain: Gain | None
) -> tuple[Tensor, Tensor]:
    """Do `attend_context` and `received` at once, for tensors that have parts (see `has_parts`), without padding.

    Attention to the sinks, to the chunk and to the replay is computed apart from that to the rest of the context: its
    normalizer is that of the scores.

    Args:
        q: Queries of the last T tokens of the replay, [B, Hq, T, D].
        k: [B, H, R, D].
        v: [B, H, R, D].
        transform: From products to attention weights.
        past: The context.
        of: Where the chunk stands in it.
        gain: Factors of the attention weights, or None.

    Returns:
        The output [B, Hq, T, D], and the scores [B, H, C] fp32.
    """
    queries = q.unflatten(1, (k.shape[1], -1))
    own = k.shape[2] - q.shape[2]

    def part(keys: Tensor, values: Tensor, columns: slice) -> Part | None:
        return attend_part(queries, keys[:, :, columns], values[:, :, columns], transform.scale)

    seen = attend_causal(queries, k[:, :, own:], v[:, :, own:], transform.scale)
    seen = seen.joined(part(k, v, slice(own)))
    seen = seen.joined(part(past.keys, past.values, slice(of.sinks)))
    seen = seen.joined(part(past.keys, past.values, slice(of.start, of.stop)))
    scores = _largest_weights(queries, past.keys[:, :, of.start : of.stop], seen.normalizer, transform, of, gain)
    seen = seen.joined(part(past.keys, past.values, slice(of.sinks, of.start)))
    seen = seen.joined(part(past.keys, past.values, slice(of.stop, None)))
    return seen.output.flatten(1, 2), scores


def _largest_weights(
    queries: Tensor,
    keys: Tensor,
    normalizer: Tensor,
    transform: ScoreTransform,
    of: ChunkPlace,
    gain: Gain | None,
) -> Tensor:
    """The largest attention weight of each key over queries whose normalizers are known, [B, H, C] fp32."""
    batch, heads, group, new, dim = queries.shape
    if gain is not None:
        normalizer = normalizer + gain.inputs.log()[:, None, None]
    # As logarithms, of which only the largest ones are raised.
    largest = keys.new_full((batch, heads, group, keys.shape[2]), -torch.inf, dtype=torch.float32)
    rows, many = tile_shape(CACHED_ELEMENTS, batch * group * keys.shape[2], heads)
    for first in range(0, heads, many):
        some = slice(first, first + many)
        for start in range(0, new, rows):
            at = slice(start, start + rows)
            tile = queries[:, some, :, at].reshape(batch, -1, group * (min(start + rows, new) - start), dim)
            score = transform.scores(tile, keys[:, some]).unflatten(2, (group, -1))
            score -= normalizer[:, some, :, at, None]
            largest[:, some] = torch.maximum(largest[:, some], score.amax(3))
    weights = largest.exp()
    if gain is not None:
        weights *= gain.outputs[..., of.start : of.stop].unflatten(1, (heads, group))
    return weights.amax(2)
