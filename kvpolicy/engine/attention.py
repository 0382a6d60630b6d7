"""Exact attention and the statistics of it: one routine that walks the queries in tiles.

Nothing here holds a full attention matrix: a tile is a few queries against the keys that they may see, and
reducers (a sum over all queries, the rows of the newest ones) are applied to it at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.kernels.products import products

if TYPE_CHECKING:
    from kvpolicy.engine.codec_view import Coded

TILE_ELEMENTS = 1 << 20
"""Scores in one tile: 4 MiB of fp32, so that a tile stays in a processor's cache."""


class Past(NamedTuple):
    """What a layer already holds: keys and values [B, H, S, D], and which slots hold a token, [B, H, S] bool."""

    keys: Tensor
    values: Tensor
    live: Tensor


class ScoreTransform(NamedTuple):
    """What a model does to the scores.

    Attributes:
        scale: They are multiplied by it.
        softcap: They are then capped by it (Gemma-2), or None.
        sinks: A learned score of each query head, [Hq], that takes its share beside the tokens (GPT-OSS), or None.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Scaled scores of queries [..., M, D] against keys [..., N, D], fp32 [..., M, N]."""
        return self.finish(products(queries, keys))

    def finish(self, raw: Tensor) -> Tensor:
        """Scale products of queries and keys [..., M, N] fp32, in place, and cap them."""
        if self.softcap is None:
            return raw.mul_(self.scale)
        return torch.tanh(raw.mul_(self.scale / self.softcap)).mul_(self.softcap)

    def share(self, score: Tensor) -> Tensor:
        """The attention of finished scores, fp32 [B, H, G, ..., N]; its rows end below 1 where there are sinks."""
        share = torch.softmax(score, -1)
        if self.sinks is None:
            return share
        sinks = self.sinks.float().reshape(*score.shape[1:3], *[1] * (score.dim() - 3))
        return share * torch.sigmoid(score.logsumexp(-1, keepdim=True) - sinks)


def attend(
    q: Tensor, k: Tensor, v: Tensor, transform: ScoreTransform, past: Past | None, valid: Tensor | None, total: bool
) -> tuple[Tensor, Tensor | None]:
    """Attend from new tokens to what a layer holds and causally to each other.

    Args:
        q: [B, Hq, P, D].
        k: [B, H, P, D].
        v: [B, H, P, D].
        transform: What is done to the scores.
        past: Slots attended to by every query.
        valid: Which of the P tokens are no padding, [B, P] bool; None where all are.
        total: Whether to sum the attention over the queries.

    Returns:
        The output [B, Hq, P, D], and the sums [B, Hq, S + P] fp32 over past slots and new tokens, or None.
    """
    if past is None and valid is None and transform.softcap is None and transform.sinks is None and not total:
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=transform.scale, enable_gqa=gqa), None
    return _tiled(q, k, v, transform, past, valid, total)


def _tiled(
    q: Tensor, k: Tensor, v: Tensor, transform: ScoreTransform, past: Past | None, valid: Tensor | None, total: bool
) -> tuple[Tensor, Tensor | None]:
    batch, heads, new, dim = k.shape
    group = q.shape[1] // heads
    held = 0 if past is None else past.keys.shape[2]
    keys = k if past is None else torch.cat([past.keys, k], 2)
    values = v if past is None else torch.cat([past.values, v], 2)
    hidden = _hidden(past, valid, new)
    mass = q.new_zeros(batch, heads, group, held + new, dtype=torch.float32) if total else None
    out = torch.empty_like(q)
    grouped, grouped_out = q.unflatten(1, (heads, group)), out.unflatten(1, (heads, group))
    rows = min(max(TILE_ELEMENTS // (batch * q.shape[1] * (held + new)), 16), 256)
    future = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
    for start in range(0, new, rows):
        stop = min(start + rows, new)
        count, seen = stop - start, held + stop
        tile = grouped[:, :, :, start:stop].reshape(batch, heads, group * count, dim)
        score = transform.scores(tile, keys[:, :, :seen]).unflatten(2, (group, count))
        score[..., held + start :].masked_fill_(future[:count, :count], -torch.inf)
        if hidden is not None:
            score.masked_fill_(hidden[:, :, None, None, :seen], -torch.inf)
        share = transform.share(score)
        if valid is not None:  # a padding query sees nothing: neither an output nor a vote
            fill = share.masked_fill if share.requires_grad else share.masked_fill_
            share = fill(~valid[:, None, None, start:stop, None], 0)
        if mass is not None:
            mass[..., :seen] += share.detach().sum(3)
        mixed = share.flatten(2, 3).to(v.dtype) @ values[:, :, :seen]
        grouped_out[:, :, :, start:stop] = mixed.unflatten(2, (group, count))
    return out, None if mass is None else mass.flatten(1, 2)


def _hidden(past: Past | None, valid: Tensor | None, new: int) -> Tensor | None:
    """Columns that no query may see, [B, H or 1, S + P]; None where there are none to hide."""
    if past is None:
        return None if valid is None else ~valid[:, None]
    if valid is None:
        valid = past.live.new_ones(past.live.shape[0], new)
    return torch.cat([~past.live, ~valid[:, None].expand(-1, past.live.shape[1], -1)], -1)


class Tail(NamedTuple):
    """The newest valid queries of a forward, [B, Hq, W, D], and where they stand in it, [B, W] (-1: none)."""

    queries: Tensor
    at: Tensor


def newest_queries(q: Tensor, valid: Tensor | None, width: int) -> Tail:
    """The newest `width` valid queries of q [B, Hq, P, D], the newest last."""
    batch, heads, new, dim = q.shape
    width = min(width, new)
    if valid is None:
        index = torch.arange(new - width, new, device=q.device).expand(batch, -1)
        return Tail(q[:, :, new - width :].clone(), index)  # a view would keep all of q alive
    order = valid.to(torch.uint8).argsort(dim=-1, stable=True)[:, new - width :]
    queries = q.gather(2, order[:, None, :, None].expand(-1, heads, -1, dim))
    return Tail(queries, torch.where(valid.gather(1, order), order, -1))


def tail_rows(tail: Tail, k: Tensor, transform: ScoreTransform, past: Past | None, valid: Tensor | None) -> Tensor:
    """Attention of the newest queries over past slots and new tokens, fp32 [B, Hq, W, S + P]."""
    _, heads, new, _ = k.shape
    group, width = tail.queries.shape[1] // heads, tail.queries.shape[2]
    keys = k if past is None else torch.cat([past.keys, k], 2)
    score = transform.scores(tail.queries.unflatten(1, (heads, group)).flatten(2, 3), keys)
    score = score.unflatten(2, (group, width))
    held = keys.shape[2] - new
    future = torch.arange(new, device=k.device) > tail.at[..., None]  # [B, W, P]
    score[..., held:].masked_fill_(future[:, None, None], -torch.inf)
    hidden = _hidden(past, valid, new)
    if hidden is not None:
        score.masked_fill_(hidden[:, :, None, None], -torch.inf)
    absent = (tail.at < 0)[:, None, None, :, None]
    return transform.share(score).masked_fill_(absent, 0).flatten(1, 2)


def largest_queries(q: Tensor, heads: int, valid: Tensor | None) -> Tensor:
    """Largest absolute number of each channel over the valid queries [B, Hq, P, D] of a KV head, [B, H, D] fp32."""
    size = q.abs().float() if valid is None else q.abs().float().masked_fill(~valid[:, None, :, None], 0)
    return size.amax(2).unflatten(1, (heads, -1)).amax(2)


def attend_slots(
    q: Tensor, exact: tuple[Tensor, Tensor], coded: Coded | None, live: Tensor, transform: ScoreTransform, row: bool
) -> tuple[Tensor, Tensor | None]:
    """Attend from one token per row to slots.

    Args:
        q: [B, Hq, 1, D].
        exact: Keys and values of the exact slots, each [B, H, E, D].
        coded: The slots behind them, S in all.
        live: Which slots hold a token, [B, H, S] bool.
        transform: What is done to the scores.
        row: Whether the attention itself is asked for.

    Returns:
        The output [B, Hq, 1, D], and the attention [B, H, G, S] fp32, or None.
    """
    grouped = q.squeeze(2).unflatten(1, (live.shape[1], -1))  # [B, H, G, D]: the group takes the queries' place
    if not row and transform.softcap is None and transform.sinks is None and coded is None:
        mask = live[:, :, None].expand(-1, -1, grouped.shape[2], -1)
        out = F.scaled_dot_product_attention(grouped, *exact, attn_mask=mask, scale=transform.scale)
        return out.flatten(1, 2).unsqueeze(2), None
    # Scored and mixed part by part: joining keys would copy the whole cache in every step, and torch 2.13's inductor
    # then loses the write of the new token (eager and aot_eager do not).
    keys, values = exact
    score = transform.scores(grouped, keys)
    if coded is not None:
        score = torch.cat([score, *map(transform.finish, coded.score(grouped))], -1)
    share = transform.share(score.masked_fill(~live[:, :, None], -torch.inf))
    first, *others = share.to(values.dtype).split([keys.shape[2], *(coded.sizes if coded else ())], -1)
    mixed = first @ values
    if coded is not None:
        mixed = sum(coded.mix(others), mixed.float()).to(values.dtype)
    return mixed.flatten(1, 2).unsqueeze(2), share
