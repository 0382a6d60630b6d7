"""LagKV: compare tokens with the range of the tokens that follow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpolicy.protocols import SMALLEST_HEAD, DecodeMode, HeadShape, Selector, State, View
from kvpolicy.selectors.once import OnceScored, none_scored, priority_of, unscored, with_scores
from kvpolicy.statistics import Results, Statistic, Vectors
from kvpolicy.text.strategy import least, strategy


@strategy
class LagKV(Selector):
    """Keep the tokens whose channels vary most within the range of the tokens that follow.

    Behind the sinks, tokens are divided into lags. The keys and values of a lag are brought to the range that each
    channel has in the next lag, so that channels with large numbers do not outweigh the others. A token with a high
    deviation over its channels differs from what follows. Every lag keeps equally many tokens.

    Args:
        sinks: How many of the first tokens are always kept, at most half the budget.
        lag: Tokens of a lag; at most a quarter of the budget.
        decode: Whether generated tokens compete for the budget (`evict`) or are kept in addition to it (`grow`).

    Raises:
        KVPolicyError: If `sinks` is below 0 or `lag` below 1.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("lagkv:lag=64@0.2"))
        'lagkv:lag=64@0.2'

    Source:
        LagKV (arXiv:2504.04704), Section 3, its authors' code and kvpress (LagKVPress). Differences:

        - Defaults are those of kvpress. The authors have lags of 1,024 tokens and 16 sinks.
        - A lag is at most a quarter of the budget, since the last one is kept whole with what follows it, up to two
          lags, and would be all that a small budget holds.
        - Tokens of the last lag and after it rank above all others by age, also if they exceed the budget.
        - While decoding, tokens are scored every `lag` tokens, or half the budget if that is less, over those that are
          still kept, and one is evicted for each generated one.
        - A channel that is constant in the next lag counts as 0. Both divide by 0.
        - Equal scores keep the earlier token.
        - With a codec, coded keys and values are scored as attention reads them.
    """

    sinks: int = least(0, 4)
    lag: int = least(1, 128)
    decode: DecodeMode = "evict"

    @property
    def nested_from(self) -> int:
        """Four lags: a smaller budget shrinks them."""
        return 4 * self.lag

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """Keys and values, of all tokens after a prompt and after every lag."""
        return (Vectors(generated=True),)

    @property
    def rerank_every(self) -> int:
        """After `lag` tokens."""
        return self.lag

    def alloc(
        self, batch: int, heads: int, slots: int, device: torch.device | str, head: HeadShape = SMALLEST_HEAD
    ) -> State:
        return none_scored(batch, heads, slots, device)

    def observe(self, state: OnceScored, seen: Results, view: View) -> State:
        """Score the tokens of every lag that is followed by a whole one."""
        tokens = seen[Vectors]
        pending = unscored(state, view, self.sinks)
        size = (view.budget // 4).clamp(1, self.lag)[:, None, None]
        # Tokens of a head in order of their positions, those that are not pending last.
        far = torch.iinfo(torch.int32).max
        order = view.positions.masked_fill(~pending, far).argsort(dim=-1, stable=True)
        count = pending.sum(-1, keepdim=True)
        place = torch.arange(order.shape[-1], device=order.device).expand_as(order)
        number = place.div(size, rounding_mode="floor")
        whole = number < count.div(size, rounding_mode="floor")  # of a lag that is full
        number = number.masked_fill(~whole, order.shape[-1])
        scored = whole & (number + 1 < count.div(size, rounding_mode="floor"))
        sizes = size.flatten().tolist()
        weight = sum(_deviation_shares(t, order, whole, sizes) for t in (tokens.keys, tokens.values))
        assert isinstance(weight, Tensor)
        above = _place_in_lag(weight, number)  # tokens of the lag that rank higher
        ranked = (size - 1 - above).float() / size
        score = torch.zeros_like(state.score).scatter_(-1, order, ranked)
        return with_scores(state, score, torch.zeros_like(scored).scatter_(-1, order, scored))

    def rerank(self, state: OnceScored, seen: Results, view: View) -> State:
        """Score the lags that are complete by now."""
        return self.observe(state, seen, view)

    def priority(self, state: OnceScored, view: View) -> Tensor:
        """Sinks and the newest token are always kept, then tokens without a score, then by rank: [B, H, N]."""
        return priority_of(state, view, self.sinks)


def _deviation_shares(vectors: Tensor, order: Tensor, whole: Tensor, sizes: list[int]) -> Tensor:
    """Softmax over each lag of the deviation over channels, in the range of the next lag, [B, H, N] fp64.

    Args:
        vectors: [B, H, N, D].
        order: Tokens in the order of lags, [B, H, N] int64.
        whole: Which places of that order are in a full lag, [B, H, N] bool.
        sizes: Tokens of a lag of each row.
    """
    dim = vectors.shape[-1]
    x = vectors.gather(2, order[..., None].expand(-1, -1, -1, dim)).float()
    x = x.masked_fill(~whole[..., None], 0)  # numbers of invalid tokens mean nothing
    shares = x.new_zeros(order.shape, dtype=torch.float64)
    for row, size in enumerate(sizes):  # each has lags of its own size
        lags = x[row, :, : x.shape[2] // size * size].unflatten(1, (-1, size))  # [H, lags, size, D]
        if lags.shape[1] < 2:
            continue
        low = lags.amin(2)[:, 1:, None]
        width = lags.amax(2)[:, 1:, None] - low
        scaled = torch.where(width > 0, (lags[:, :-1] - low) / width, 0)
        spread = scaled.double().std(-1, correction=1) if dim > 1 else torch.zeros_like(scaled[..., 0]).double()
        shares[row, :, : (lags.shape[1] - 1) * size] = spread.softmax(-1).flatten(1)
    return shares


def _place_in_lag(weight: Tensor, number: Tensor) -> Tensor:
    """How many tokens of its lag have a higher weight, or the same one at an earlier place, [B, H, N] int64."""
    down = weight.argsort(dim=-1, descending=True, stable=True)
    by_lag = down.gather(-1, number.gather(-1, down).argsort(dim=-1, stable=True))
    lag = number.gather(-1, by_lag).contiguous()
    place = torch.arange(lag.shape[-1], device=lag.device) - torch.searchsorted(lag, lag)
    return torch.empty_like(place).scatter_(-1, by_lag, place)
