"""Exact attention and the statistics of it: one routine that walks the queries in tiles.

Nothing here holds a full attention matrix: a tile is a few queries against the keys that they may see, and
reducers (a sum over all queries, the rows of the newest ones) are applied to it at once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine.attention_part import Part
from kvpolicy.engine.row_spans import columns_from, rows_by_columns
from kvpolicy.kernels.mixed_values import mixed_values
from kvpolicy.statistics.windows import TILE_ELEMENTS, Past, ScoreTransform, hidden_columns

MASK_ELEMENTS = 1 << 24
"""Elements of the mask of one call of fused attention: 16 MiB of bool."""

MASK_ROWS = 256
"""The most queries of such a call: fused attention computes what its mask hides, half as many keys for each query."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    transform: ScoreTransform,
    past: Past | None,
    valid: Tensor | None,
    sum_weights: bool,
    beside: Part | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend from new tokens to the slots of a layer and causally to each other.

    Args:
        q: [B, Hq, P, D].
        k: [B, H, P, D].
        v: [B, H, P, D'], where D' is D or another size, or 0: `mixed_values` takes the place of values then.
        transform: From products to attention weights.
        past: Slots that every query attends to, or None.
        valid: Which of the P tokens are not padding, [B, P] bool; None if all are.
        sum_weights: Whether to sum the attention weights over the queries.
        beside: Attention of these queries to other keys, which takes part in the softmax, or None.

    Returns:
        The output [B, Hq, P, D'], and the sums [B, Hq, S + P] fp32 over past slots and new tokens, or None.
    """
    keys = k if past is None else torch.cat([past.keys, k], 2)
    values = v if past is None else torch.cat([past.values, v], 2)
    values = values if v.shape[3] else keys  # as `mixed_values`
    if past is None and _is_fusable(transform) and not sum_weights and beside is None:
        if valid is None:
            return _attend_fused(q, keys, values, transform.scale), None
        if torch.compiler.is_compiling():
            return _attend_masked(q, keys, values, transform.scale, valid), None
        return _attend_rows(q, keys, values, transform.scale, valid), None
    sums = q.new_zeros(*q.shape[:2], keys.shape[2], dtype=torch.float32) if sum_weights else None
    return _attend_scores(q, keys, values, transform, past, valid, sums, beside), sums


def attend_tile(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    transform: ScoreTransform,
    past: Past | None,
    valid: Tensor | None,
    sums: Tensor | None,
    beside: Part | None = None,
) -> Tensor:
    """Attend from the newest tokens of a prompt to the slots before it, to its earlier tokens and to each other.

    Args:
        q: Their queries, [B, Hq, T, D].
        keys: Keys of the slots and of the prompt so far, [B, H, S + N, D], of which the last T are those of `q`.
        values: Values of the slots and of the prompt so far, [B, H, S + N, D'], as in `attend`.
        transform: From products to attention weights.
        past: The S slots that come first, or None.
        valid: Which of the N tokens are not padding, [B, N] bool; None if all are.
        sums: The attention weights are added to it, [B, Hq, S + N or more] fp32; None if they are not needed.
        beside: Attention of these queries to other keys, which takes part in the softmax, or None.

    Returns:
        [B, Hq, T, D'].
    """
    values = mixed_values(keys, values)
    if past is not None or not _is_fusable(transform) or sums is not None or beside is not None:
        return _attend_scores(q, keys, values, transform, past, valid, sums, beside)
    if valid is None:
        return _attend_behind(q, keys, values, transform.scale)
    out = q.new_zeros(*q.shape[:3], values.shape[3])
    start = keys.shape[2] - q.shape[2]
    for rows, columns in rows_by_columns(valid):
        # As these rows would attend alone; see `_attend_rows`. Their last columns are those of the tile.
        queries = q[rows][:, :, columns_from(columns, start)]
        if queries.shape[2]:
            mine, mixed = (t[rows][:, :, columns] for t in (keys, values))
            out[rows, :, columns_from(columns, start)] = _attend_behind(queries, mine, mixed, transform.scale)
    return out


def _is_fusable(transform: ScoreTransform) -> bool:
    """Whether fused attention computes these weights: it neither caps scores nor knows sinks."""
    return transform.softcap is None and transform.sinks is None


def _attend_behind(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention of queries [B, Hq, T, D] that belong to the last T of the keys [B, H, N, D]."""
    new = q.shape[2]
    before = keys.shape[2] - new
    if not before:
        return _attend_fused(q, keys, values, scale)
    if q.is_cuda and q.dtype != torch.float32:  # flash attention needs no mask
        from torch.nn.attention.bias import causal_lower_right  # imports the compiler, which plans do without

        bias: Any = causal_lower_right(new, keys.shape[2])
        return _attend_fused(q, keys, values, scale, bias)
    rows = min(max(MASK_ELEMENTS // keys.shape[2], 16), MASK_ROWS)
    out = q.new_empty(*q.shape[:3], values.shape[3])
    for start in range(0, new, rows):
        stop = min(start + rows, new)
        seen = before + stop
        mask = torch.ones(stop - start, seen, dtype=torch.bool, device=q.device).tril(before + start)
        out[:, :, start:stop] = _attend_fused(q[:, :, start:stop], keys[:, :, :seen], values[:, :, :seen], scale, mask)
    return out


def _attend_fused(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    gqa = q.shape[1] != k.shape[1]
    size = v.shape[3]
    if size < q.shape[3] and q.device.type == "cpu":  # which has a fused function for vectors of one size alone
        v = F.pad(v, (0, q.shape[3] - size))
        return _attend_fused(q, k, v, scale, mask)[..., :size]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa)


def _attend_masked(q: Tensor, k: Tensor, v: Tensor, scale: float, valid: Tensor) -> Tensor:
    """Attend causally to valid tokens with a mask of all pairs, which a compiled graph needs: its sizes are fixed."""
    causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    itself = torch.eye(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    # A padding query sees itself, since the softmax of no score at all is not a number.
    mask = (causal & valid[:, None, None, :]) | itself
    return _attend_fused(q, k, v, scale, mask).masked_fill(~valid[:, None, :, None], 0)


def _attend_rows(q: Tensor, k: Tensor, v: Tensor, scale: float, valid: Tensor) -> Tensor:
    """Attend causally to valid tokens without a mask: the valid tokens of a row alone, 0 for padding queries."""
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    for rows, columns in rows_by_columns(valid):
        # The call that these rows would make alone: causal without a mask, and no work for padding.
        queries, keys, values = (t[rows][:, :, columns] for t in (q, k, v))
        out[rows, :, columns] = _attend_fused(queries, keys, values, scale)
    return out


def _attend_scores(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    transform: ScoreTransform,
    past: Past | None,
    valid: Tensor | None,
    sums: Tensor | None,
    beside: Part | None = None,
) -> Tensor:
    """See `attend_tile`: scores are computed of a few queries at a time, against the keys that they may see."""
    batch, heads, total, dim = keys.shape
    group = q.shape[1] // heads
    new = q.shape[2]
    held = total - new
    hidden = hidden_columns(past, valid, total)
    mass = None if sums is None else sums.unflatten(1, (heads, group))
    is_query = None if valid is None else valid[:, valid.shape[1] - new :]
    out = q.new_empty(*q.shape[:3], values.shape[3])
    grouped = q.unflatten(1, (heads, group))
    grouped_out = out.unflatten(1, (heads, group))
    rows = min(max(TILE_ELEMENTS // (batch * q.shape[1] * total), 16), 256)
    future = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
    for start in range(0, new, rows):
        stop = min(start + rows, new)
        count = stop - start
        seen = held + stop
        tile = grouped[:, :, :, start:stop].reshape(batch, heads, group * count, dim)
        score = transform.scores(tile, keys[:, :, :seen]).unflatten(2, (group, count))
        if past is not None:
            past.add_counts(score)
        # No other column can be in the future of a query of this tile.
        score[..., held + start :].masked_fill_(future[:count, :count], -torch.inf)
        if hidden is not None:
            score.masked_fill_(hidden[:, :, None, None, :seen], -torch.inf)
        if beside is not None:  # other keys are one more column, whose score is their normalizer
            score = torch.cat([score, beside.normalizer[..., start:stop, None]], -1)
        weights = transform.weights(score)
        if is_query is not None:  # padding queries produce no output and no statistics
            # Not in place with a graph, because the backward of softmax needs its output. The fill also replaces the
            # NaN of padding queries that see nothing.
            fill = weights.masked_fill if weights.requires_grad else weights.masked_fill_
            weights = fill(~is_query[:, None, None, start:stop, None], 0)
        if mass is not None:
            mass[..., :seen] += weights.detach().sum(3)
        mixed = weights[..., :seen].flatten(2, 3).to(values.dtype) @ values[:, :, :seen]
        mixed = mixed.unflatten(2, (group, count))
        if beside is not None:
            mixed = mixed.float() + weights[..., -1:] * beside.output[:, :, :, start:stop]
        grouped_out[:, :, :, start:stop] = mixed
    return out
