"""Some queries of a replay, spread evenly over the context, and their attention to it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.replay import Chunk
from kvpolicy.statistics.windows import QueryWindow, ScoreTransform, weights_and_sinks


class ReplayedQueries(NamedTuple):
    """Queries of the tokens of a context as they were replayed.

    Attributes:
        queries: As attention takes them, [B, Hq, W, D]; zeros where there is none.
        tokens: Which of the row's own tokens each one repeats, from 0, [B, W] int64; -1 for none.
    """

    queries: Tensor
    tokens: Tensor

    def add(self, q: Tensor, start: int, chunk: Chunk, chunk_size: int, columns: int) -> None:
        """Take the queries that are among some tokens of a replay, in place.

        Args:
            q: Queries of these tokens, [B, Hq, T, D].
            start: Column of the first of them in the text that is replayed.
            chunk: The chunk that is replayed.
            chunk_size: Tokens of every chunk but the last.
            columns: Columns of the text, which ends with the chunk.
        """
        own = self.tokens - chunk.number * chunk_size
        column = own + columns - chunk.columns.shape[1] - start
        here = (own >= 0) & (own < chunk.columns.shape[1]) & (column >= 0) & (column < q.shape[2])
        index = column.clamp(0, q.shape[2] - 1)[:, None, :, None].expand_as(self.queries)
        self.queries.copy_(torch.where(here[:, None, :, None], q.gather(2, index), self.queries))

    def attention(
        self, keys: Tensor, there: Tensor, counts: Tensor | None, transform: ScoreTransform
    ) -> tuple[Tensor, Tensor | None]:
        """Attention weights over all tokens of a layer, without those of the replay, and the weights of learned sinks.

        Args:
            keys: [B, H, N, D].
            there: Which of them are tokens, [B, H, N] bool.
            counts: Logarithm of the number of tokens that each one stands for, [B, H, N] fp32; None if each is one.
            transform: From products to attention weights.

        Returns:
            The weights, fp32 [B, Hq, W, N], and those of sinks, fp32 [B, Hq, W]; None without learned sinks.
        """
        heads = keys.shape[1]
        width = self.queries.shape[2]
        score = transform.scores(self.queries.unflatten(1, (heads, -1)).flatten(2, 3), keys).unflatten(2, (-1, width))
        if counts is not None:
            score += counts[:, :, None, None]
        score.masked_fill_(~there[:, :, None, None], -torch.inf)
        # A row without a replay may have no token, whose softmax is NaN.
        return weights_and_sinks(QueryWindow(self.queries, self.tokens), score, transform)


def no_queries(q: Tensor, context: Tensor, width: int) -> ReplayedQueries:
    """Which tokens of each row's context are observed, before any of them is replayed.

    All tokens of a row with at most `width` of them, else the middle ones of `width` equal parts: a padded row has
    those that it has alone.

    Args:
        q: Queries of any tokens, [B, Hq, T, D].
        context: Which tokens of the held prompt are replayed, [B, P] bool.
        width: The most queries of a row.
    """
    width = min(width, context.shape[1])  # no row has more tokens
    count = context.sum(-1, keepdim=True)
    number = torch.arange(width, device=context.device)
    middle = torch.div((2 * number + 1) * count, 2 * width, rounding_mode="floor")
    tokens = torch.where(count > width, middle, torch.where(number < count, number, -1)).to(q.device)
    return ReplayedQueries(q.new_zeros(*q.shape[:2], width, q.shape[3]), tokens)
