"""Exact attention and the statistics of it: one routine that walks the queries in tiles.

Nothing here holds a full attention matrix: a tile is a few queries against the keys that they may see, and
reducers (a sum over all queries, the rows of the newest ones) are applied to it at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine.attention_part import Part
from kvpolicy.engine.codec_view import ChosenSlots, CodecView
from kvpolicy.engine.row_spans import columns_from, rows_by_columns
from kvpolicy.kernels.mixed_values import mixed_values
from kvpolicy.kernels.products import matmul, thin_mix
from kvpolicy.protocols import Estimated
from kvpolicy.statistics.windows import TILE_ELEMENTS, Past, ScoreTransform, hidden_columns

MASK_ELEMENTS = 1 << 24
"""Elements of the mask of one call of fused attention: 16 MiB of bool."""

MASK_ROWS = 256
"""The most queries of such a call: fused attention computes what its mask hides, half as many keys for each query."""

Rest = Callable[[Tensor], Estimated]
"""Estimates the slots that are not read, from the normalizer of those that are; see `Read.rest`."""


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


def attend_slots(
    q: Tensor,
    exact: tuple[Tensor, Tensor],
    coded: CodecView | ChosenSlots | None,
    occupied: Tensor,
    transform: ScoreTransform,
    want_weights: bool,
    counts: Tensor | None = None,
    scanned: Tensor | None = None,
    rest: Rest | None = None,
    beside: Part | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend from one token per row to slots.

    Args:
        q: [B, Hq, 1, D].
        exact: Keys and values of the full-precision slots, [B, H, E, D] and [B, H, E, D'], as in `attend`.
        coded: The coded slots, which follow them; S slots in all.
        occupied: Which slots hold a token, [B, H, S] bool.
        transform: From products to attention weights.
        want_weights: Whether to return the attention weights.
        counts: Logarithm of the number of tokens that each slot stands for, [B, H, S] fp32; None if it is always one.
        scanned: Products of the queries with the keys of the coded slots, or of all slots if none is coded, [B, H, G,
            n] fp32, if they are known; changed in place.
        rest: Estimates what is not read, beside the coded slots, or beside all slots if none is coded.
        beside: Attention of the queries [B, H, G, 1, D] to other keys, which takes part in the softmax, without `rest`.

    Returns:
        The output [B, Hq, 1, D'], and the attention weights [B, H, G, S] fp32, or None.
    """
    keys = exact[0]
    values = exact[1] if exact[1].shape[3] else keys  # as `mixed_values`
    grouped = q.squeeze(2).unflatten(1, (occupied.shape[1], -1))  # [B, H, G, D]: the group takes the queries' place
    plain = not want_weights and transform.softcap is None and transform.sinks is None and coded is None
    plain = plain and scanned is None and rest is None and beside is None
    # The mask of the fused function has the dtype of the queries, in which bf16 would round the counts.
    if plain and (counts is None or q.dtype == torch.float32):
        visible = occupied if counts is None else counts.masked_fill(~occupied, -torch.inf)
        mask = visible[:, :, None].expand(-1, -1, grouped.shape[2], -1)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=transform.scale)
        return out.flatten(1, 2).unsqueeze(2), None
    # Scored and mixed part by part: joining keys would copy the whole cache in every step, and torch 2.13's inductor
    # then loses the write of the new token (eager and aot_eager do not).
    known = None if scanned is None else transform.finish(scanned)
    score = known if known is not None and coded is None else transform.scores(grouped, keys)
    if coded is not None:
        of_codes = map(transform.finish, coded.score(grouped)) if known is None else [known]
        score = torch.cat([score, *of_codes], -1)
    if counts is not None:
        score = score + counts[:, :, None]
    score = score.masked_fill(~occupied[:, :, None], -torch.inf)
    others_add: Tensor | None = None
    if rest is not None:
        buffer = keys.shape[2] if coded is not None else 0  # it is always read, and no reader divides it
        weights, others_add = with_rest(score, score[..., buffer:], transform, rest)
    elif beside is not None:  # other keys are one more column, whose score is their normalizer
        every = transform.weights(torch.cat([score, beside.normalizer], -1))
        weights = every[..., :-1]
        others_add = every[..., -1:] * beside.output.squeeze(3)
    else:
        weights = transform.weights(score)
    first, *others = weights.to(values.dtype).split([keys.shape[2], *(coded.sizes if coded else ())], -1)
    mixed = matmul(first, values)
    if coded is not None:
        # Added in fp32 and rounded once.
        mixed = sum(coded.mix(others), mixed.float())
    if others_add is not None:
        mixed = mixed.float() + others_add
    return mixed.to(values.dtype).flatten(1, 2).unsqueeze(2), weights


def with_rest(score: Tensor, of_entries: Tensor, transform: ScoreTransform, rest: Rest) -> tuple[Tensor, Tensor]:
    """Attention weights of slots, and what the slots that stand for the others add to the output.

    Args:
        score: Scores of the slots that are read, [B, H, G, n] fp32.
        of_entries: Those of them that belong to entries of a reader.
        transform: From scores to attention weights.
        rest: Estimates what is not read.

    Returns:
        [B, H, G, n] and [B, H, G, D] fp32.
    """
    estimated = rest(of_entries.logsumexp(-1))
    # One softmax over both, so that learned sinks take part once.
    every = torch.cat([score, estimated.scores], -1)
    # Masked again, since the softmax of nothing is NaN.
    weights = transform.weights(every).masked_fill(every == -torch.inf, 0)
    own, others = weights.split([score.shape[-1], estimated.scores.shape[-1]], -1)
    return own, thin_mix(others, estimated.values)
