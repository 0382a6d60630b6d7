"""CUR: keep the tokens with the largest share of their window's keys and values."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from kvpolicy.protocols import SMALLEST_HEAD, DecodeMode, HeadShape, Selector, State, View
from kvpolicy.selectors.once import OnceScored, none_scored, priority_of, unscored, with_scores
from kvpolicy.statistics import Results, Statistic, Vectors
from kvpolicy.text.strategy import least, strategy


@strategy
class CUR(Selector):
    """Keep the tokens with the largest share of the squares of their window's keys and values.

    Rows of a matrix of which many others are combinations have large leverage scores. They are approximated by the
    squared length of a row over that of a window of neighbors, so that tokens are kept from everywhere in the prompt.

    Args:
        sinks: How many of the first tokens are always kept, at most half the budget.
        window: Positions of a window.
        of: Whether shares of `keys`, of `values`, their `product` or their `mean` decide.
        every: After how many generated tokens those since are scored; at most half the budget. Until then they rank
            above all others.
        decode: Whether generated tokens compete for the budget (`evict`) or are kept in addition to it (`grow`).

    Raises:
        KVPolicyError: If `sinks` is below 0, `window` or `every` below 1, or `of` is unknown.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("cur:of=keys@0.2"))
        'cur:of=keys@0.2'

    Source:
        CurDKV (arXiv:2509.15038) and kvpress (CURPress). Differences:

        - A window is one of positions, and shares are over the mean of its tokens times its size, so that a window that
          is not full is not over-rated. A full window gives the published sum, but for the first one, which leaves out
          the sinks.
        - The random sketch of 20 dimensions, an option of both, is left out.
        - The newest token is always kept.
        - A token keeps its score: a chunk or a later prompt is scored by its own tokens, generated tokens every `every`
          steps by those that are held.
        - A window of zeros has scores of 0 (kvpress divides by 0).
        - With a codec, coded keys and values are scored as attention reads them.
    """

    sinks: int = least(0, 4)
    window: int = least(1, 16)
    of: Literal["product", "keys", "values", "mean"] = "product"
    every: int = least(1, 128)
    decode: DecodeMode = "evict"

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """Keys and values, of all tokens after a prompt and now and then."""
        return (Vectors(generated=True),)

    @property
    def rerank_every(self) -> int:
        """After `every` tokens."""
        return self.every

    def alloc(
        self, batch: int, heads: int, slots: int, device: torch.device | str, head: HeadShape = SMALLEST_HEAD
    ) -> State:
        return none_scored(batch, heads, slots, device)

    def observe(self, state: OnceScored, seen: Results, view: View) -> State:
        """Score every token that has no score yet."""
        tokens = seen[Vectors]
        pending = unscored(state, view, self.sinks)
        windows = view.positions.long().div(self.window, rounding_mode="floor").masked_fill(~pending, 0)
        keys, values = (_shares(t, windows, pending, self.window) for t in (tokens.keys, tokens.values))
        score = {"product": keys * values, "keys": keys, "values": values, "mean": (keys + values) / 2}[self.of]
        # With `window=1`, a token has all of its window, and a score must be below 1: see `priority_of`.
        return with_scores(state, score.clamp_max(_BELOW_ONE), pending)

    def rerank(self, state: OnceScored, seen: Results, view: View) -> State:
        """Score the tokens that were generated since."""
        return self.observe(state, seen, view)

    def priority(self, state: OnceScored, view: View) -> Tensor:
        """Sinks and the newest token are always kept, then tokens without a score, then by score: [B, H, N]."""
        return priority_of(state, view, self.sinks)


_BELOW_ONE = 1 - 2**-24


def _shares(vectors: Tensor, windows: Tensor, which: Tensor, size: int) -> Tensor:
    """The squared length of each token over the mean of its window's, over the size of a window, [B, H, N] fp32."""
    square = vectors.float().square().sum(-1).masked_fill(~which, 0).double()
    count = int(windows.max()) + 1 if windows.numel() else 1
    total = square.new_zeros(*square.shape[:2], count).scatter_add_(-1, windows, square).gather(-1, windows)
    tokens = square.new_zeros(*square.shape[:2], count).scatter_add_(-1, windows, which.double()).gather(-1, windows)
    share = square * tokens / (total * size)
    return share.masked_fill(~which | (total == 0), 0).float()
