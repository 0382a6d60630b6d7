"""Exact attention and the statistics of it: one routine that walks the queries in tiles.

Nothing here holds a full attention matrix: a tile is a few queries against the keys that they may see, and
reducers (a sum over all queries, the rows of the newest ones) are applied to it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine.attention_part import Part
from kvpolicy.engine.codec_view import ChosenSlots, CodecView
from kvpolicy.engine.mixed_values import mixed_values
from kvpolicy.engine.row_spans import columns_from, rows_by_columns
from kvpolicy.kernels.products import matmul, products, thin_mix
from kvpolicy.protocols import Estimated

TILE_ELEMENTS = 1 << 20
"""Scores in one tile: 4 MiB of fp32, so that a tile stays in a processor's cache."""

MASK_ELEMENTS = 1 << 24
"""Elements of the mask of one call of fused attention: 16 MiB of bool."""

MASK_ROWS = 256
"""The most queries of such a call: fused attention computes what its mask hides, half as many keys for each query."""

Rest = Callable[[Tensor], Estimated]
"""Estimates the slots that are not read, from the normalizer of those that are; see `Estimates.estimate_rest`."""


class Past(NamedTuple):
    """Every slot of a layer, decoded.

    Attributes:
        keys: [B, H, S, D].
        values: [B, H, S, D].
        occupied: Which slots hold a token, [B, H, S] bool.
        counts: Logarithm of the number of tokens that each slot stands for, [B, H, S] fp32; None if it is always one.
    """

    keys: Tensor
    values: Tensor
    occupied: Tensor
    counts: Tensor | None = None

    def to(self, device: torch.device | None) -> Past:
        """Move to `device`; unchanged if None."""
        return self if device is None else Past(*(None if t is None else t.to(device) for t in self))  # pyright: ignore

    def add_counts(self, score: Tensor) -> None:
        """Add the counts to scores [B, H, G, M, S + P] of the slots and of P new tokens, in place."""
        # After scale and softcap: a slot that stands for c tokens has c times the weight that its key alone has.
        if self.counts is not None:
            score[..., : self.counts.shape[-1]] += self.counts[:, :, None, None]


class ScoreTransform(NamedTuple):
    """How a model turns products of queries and keys into attention weights.

    Attributes:
        scale: The factor that products are multiplied by.
        softcap: The cap that is then applied to them (Gemma-2), or None.
        sinks: A learned score of each query head, [Hq], that takes part in the softmax (GPT-OSS), or None.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Scores of queries [..., M, D] against keys [..., N, D], fp32 [..., M, N]."""
        return self.finish(products(queries, keys))

    def finish(self, raw: Tensor) -> Tensor:
        """Scale and cap products of queries and keys [..., M, N] fp32, in place."""
        if self.softcap is None:
            return raw.mul_(self.scale)
        return torch.tanh(raw.mul_(self.scale / self.softcap)).mul_(self.softcap)

    def weights(self, score: Tensor) -> Tensor:
        """Attention weights of scores, fp32 [B, H, G, ..., N]; with sinks, rows sum to less than 1."""
        # With sinks: exp(s) / (sum(exp(s)) + exp(sink)) = softmax(s) * sigmoid(logsumexp(s) - sink). This needs no
        # column for the sink, which would copy all scores.
        weights = torch.softmax(score, -1)
        if self.sinks is None:
            return weights
        return weights * torch.sigmoid(score.logsumexp(-1, keepdim=True) - self._grouped_sinks(score))

    def sink_weights(self, score: Tensor) -> Tensor | None:
        """The weight of the learned sink beside scores [B, H, G, ..., N], fp32 [B, H, G, ...]; None without one.

        It is exact where it is far below 1, unlike what the weights of the tokens leave of 1.
        """
        if self.sinks is None:
            return None
        return torch.sigmoid(self._grouped_sinks(score) - score.logsumexp(-1, keepdim=True)).squeeze(-1)

    def _grouped_sinks(self, score: Tensor) -> Tensor:
        assert self.sinks is not None
        return self.sinks.float().reshape(*score.shape[1:3], *[1] * (score.dim() - 3))


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
    hidden = _hidden_columns(past, valid, total)
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


def _hidden_columns(past: Past | None, valid: Tensor | None, total: int) -> Tensor | None:
    """Which of `total` columns no query may see, [B, H or 1, S + N]; None if there are none to hide."""
    if past is None:
        return None if valid is None else ~valid[:, None]
    occupied = past.occupied
    if valid is None:
        valid = occupied.new_ones(occupied.shape[0], total - occupied.shape[2])
    return torch.cat([~occupied, ~valid[:, None].expand(-1, occupied.shape[1], -1)], -1)


class QueryWindow(NamedTuple):
    """A few valid queries of a forward, [B, Hq, W, D], and their columns in it, [B, W] (-1 for none)."""

    queries: Tensor
    at: Tensor


def newest_columns(valid: Tensor | None, shape: tuple[int, int], width: int, device: torch.device) -> Tensor:
    """Columns of the newest `width` tokens of each row, [B, W] int64, the newest last; -1 where a row has fewer.

    Args:
        valid: Which of P tokens are not padding, [B, P] bool; None if all are.
        shape: B and P.
        width: How many.
        device: Device of the result.
    """
    batch, new = shape
    width = min(width, new)
    if valid is None:
        return torch.arange(new - width, new, device=device).expand(batch, -1)
    # Valid queries last, in their order, so that a fixed width from the end takes the newest ones.
    order = valid.to(torch.uint8).argsort(dim=-1, stable=True)[:, new - width :]
    return torch.where(valid.gather(1, order), order, -1)


def take_queries(q: Tensor, at: Tensor) -> Tensor:
    """The queries [B, Hq, W, D] of q [B, Hq, P, D] in the columns [B, W]; any where a column is -1."""
    return q.gather(2, at.clamp_min(0)[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[-1]))


def window_tiles(window: QueryWindow, columns: int) -> Iterator[tuple[slice, QueryWindow]]:
    """The queries of a window in tiles, and which of them each tile has, for attention over `columns` tokens."""
    batch, heads, width, _ = window.queries.shape
    rows = max(TILE_ELEMENTS // max(batch * heads * columns, 1), 16)
    for start in range(0, width, rows):
        part = slice(start, start + rows)
        yield part, QueryWindow(window.queries[:, :, part], window.at[:, part])


def window_attention(
    window: QueryWindow, k: Tensor, transform: ScoreTransform, past: Past | None, valid: Tensor | None
) -> Tensor:
    """Attention weights of a window of queries over past slots and new tokens, fp32 [B, Hq, W, S + P]."""
    return weights_and_sinks(window, window_scores(window, k, transform, past, valid), transform)[0]


def window_scores(
    window: QueryWindow, k: Tensor, transform: ScoreTransform, past: Past | None, valid: Tensor | None
) -> Tensor:
    """Scores of a window of queries against past slots and new tokens, fp32 [B, H, G, W, S + P]; -inf if not seen."""
    _, heads, new, _ = k.shape
    group = window.queries.shape[1] // heads
    width = window.queries.shape[2]
    keys = k if past is None else torch.cat([past.keys, k], 2)
    score = transform.scores(window.queries.unflatten(1, (heads, group)).flatten(2, 3), keys)
    score = score.unflatten(2, (group, width))
    if past is not None:
        past.add_counts(score)
    held = keys.shape[2] - new
    future = torch.arange(new, device=k.device) > window.at[..., None]  # [B, W, P]
    score[..., held:].masked_fill_(future[:, None, None], -torch.inf)
    hidden = _hidden_columns(past, valid, keys.shape[2])
    if hidden is not None:
        score.masked_fill_(hidden[:, :, None, None], -torch.inf)
    return score


def weights_and_sinks(window: QueryWindow, score: Tensor, transform: ScoreTransform) -> tuple[Tensor, Tensor | None]:
    """Attention weights of scores [B, H, G, W, N] of a window of queries, and the weights of learned sinks.

    Returns:
        The weights, fp32 [B, Hq, W, N], and those of sinks, fp32 [B, Hq, W]; None without learned sinks.
    """
    # An absent query sees no new token, and without a past nothing at all: its softmax is NaN.
    absent = (window.at < 0)[:, None, None, :]
    weights = transform.weights(score).masked_fill_(absent[..., None], 0).flatten(1, 2)
    sinks = transform.sink_weights(score)
    return weights, None if sinks is None else sinks.masked_fill_(absent, 0).flatten(1, 2)


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
