"""How scores become attention weights, the attention of a few queries of a prompt, and their heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.kernels.products import scaled_products

TILE_ELEMENTS = 1 << 20
"""Scores in one tile: 4 MiB of fp32, so that a tile stays in a processor's cache."""


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
        if self.softcap is None:
            return scaled_products(queries, keys, self.scale)
        return self._capped(scaled_products(queries, keys, self.scale / self.softcap), self.softcap)

    def finish(self, raw: Tensor) -> Tensor:
        """Scale and cap products of queries and keys [..., M, N] fp32, in place."""
        if self.softcap is None:
            return raw.mul_(self.scale)
        return self._capped(raw.mul_(self.scale / self.softcap), self.softcap)

    @staticmethod
    def _capped(score: Tensor, softcap: float) -> Tensor:
        """A cap on scores that are divided by it."""
        capped = torch.tanh(score)
        return capped * softcap if capped.requires_grad else capped.mul_(softcap)  # its backward needs its output

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


def hidden_columns(past: Past | None, valid: Tensor | None, total: int) -> Tensor | None:
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
    hidden = hidden_columns(past, valid, keys.shape[2])
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


def token_positions(valid: Tensor | None, columns: int, seen: Tensor) -> Tensor:
    """Position of each of `columns` tokens in its row after `seen` [B] tokens, [B, P] int32, -1 for padding."""
    if valid is None:
        return (seen[:, None] + torch.arange(columns, device=seen.device)).to(torch.int32)
    count = seen[:, None] + valid.long().cumsum(-1) - 1
    return count.where(valid, -1).to(torch.int32)


def together(first: Tensor, second: Tensor, heads: int) -> Tensor:
    """Numbers of query heads [B, Hq, ...] and of others [B, Hq', ...] by KV head, [B, Hq + Hq', ...].

    Each of the `heads` KV heads has its query heads of the first layer, and behind them those of the second.
    """
    groups = (t.unflatten(1, (heads, -1)) for t in (first, second))
    return torch.cat(tuple(groups), 2).flatten(1, 2)
