"""Helpers shared by selectors: means over the query heads of a KV head, sums over heads, priorities by position."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.protocols import View
from kvpolicy.statistics import OutputNorms, Results


def group_mean(statistic: Tensor, view: View) -> Tensor:
    """Mean over the query heads of each KV head: [B, Hq, N] -> [B, H, N]."""
    return view.ranks.group_mean(statistic.unflatten(1, (view.positions.shape[1], -1)))


def keep_always(priority: Tensor, protected: Tensor) -> Tensor:
    """`priority` [B, H, N], replaced by inf for the tokens in `protected`."""
    return priority.masked_fill(protected, torch.inf)


def unranked_first(score: Tensor, view: View, ranked: Tensor, most: float) -> Tensor:
    """Scores at most `most`, above which stand the tokens that came after the last ranking, by age: [B, H, N].

    Args:
        score: Of each token, [B, H, N] fp32; of tokens that were not ranked, anything.
        view: The tokens.
        ranked: Tokens that each row had seen when it was ranked, [B] int64.
        most: No score is larger.
    """
    return torch.where(view.positions >= ranked[:, None, None], view.positions.float() + most, score)


def below_base(score: Tensor, view: View, ranked: Tensor, base: Tensor) -> Tensor:
    """Scores of at most 0, below the tokens that a wrapped selector always keeps: [B, H, N].

    The newest token is always kept too. Tokens that came after the last ranking stand in between, by age.

    Args:
        score: Of each token, [B, H, N] fp32; of tokens that were not ranked, anything.
        view: The tokens.
        ranked: Tokens that each row had seen when it was ranked, [B] int64.
        base: The priority of the wrapped selector, [B, H, N].
    """
    generated = view.positions >= ranked[:, None, None]
    priority = torch.where(generated, view.positions.float(), score)
    return view.keep_newest(keep_always(priority, base == torch.inf))


def half_budget(view: View, most: int, least: int = 1) -> Tensor:
    """Half the budget of each row, within limits, [B] int64."""
    half = view.memo.once(torch.floor_divide, view.budget, 2)
    return view.memo.once(torch.clamp, half, least, most)


def recent_tokens(view: View, fraction: float) -> Tensor:
    """Which tokens are the newest ones of a fraction of the budget, and always the newest one, [B, H, N] bool."""
    return view.newest(view.memo.once(_fraction, view.budget, fraction))


def _fraction(budget: Tensor, fraction: float) -> Tensor:
    # In floating point, 0.07 * 100 is slightly more than 7, and would be rounded up to 8.
    return (budget.double() * fraction - 1e-9).ceil().long().clamp_min(1)


def by_position(positions: Tensor) -> Tensor:
    """Higher priority for later tokens; exact in fp32 up to position 16,777,216."""
    return positions.float()


def head_sum(x: Tensor, view: View) -> Tensor:
    """The sum over all KV heads that hold the same position, [B, H, N] -> [B, H, N] fp64; 0 for invalid tokens.

    Args:
        x: A number of each token, [B, H, N].
        view: The tokens; its ranks have the other heads.
    """
    x = x.double().masked_fill(~view.valid, 0)
    if view.alike:
        return (view.ranks.total(x.sum(1, keepdim=True)) / view.ranks.replicas).expand_as(x)
    # Heads hold different tokens: a table of positions, in which invalid tokens have a place of their own at the end.
    at = view.positions.long()
    size = int(view.length.max()) + 1
    at = at.where(at >= 0, size - 1)
    sums = position_sums(x, at, size, view)
    return sums[:, None].expand(-1, x.shape[1], -1).gather(2, at).masked_fill(~view.valid, 0)


def position_sums(x: Tensor, at: Tensor, size: int, view: View) -> Tensor:
    """The sum over all KV heads of the numbers at each of `size` positions, [B, size] in the dtype of `x`.

    Args:
        x: A number of each token, [B, H, N].
        at: The position of each token, [B, H, N] int64.
        size: How many positions there are.
        view: The tokens; its ranks have the other heads.
    """
    table = x.new_zeros(x.shape[0], size).scatter_add_(1, at.flatten(1), x.flatten(1))
    return view.ranks.total(table) / view.ranks.replicas


def first_tokens(view: View, most: int) -> Tensor:
    """Which tokens are the first `most` ones of a row, at most half the budget, [B, H, N] bool; any where none is."""
    return view.positions < half_budget(view, most, 0)[:, None, None]


def shares(attention: Tensor, valid: Tensor) -> Tensor:
    """Attention of each token over that of all tokens of its head, [B, H, N] fp32; 0 if none has any.

    Args:
        attention: [B, H, N] fp32, at least 0.
        valid: Which tokens there are, [B, H, N] bool.
    """
    attention = attention.masked_fill(~valid, 0)
    total = attention.sum(-1, keepdim=True, dtype=torch.float64)
    return (attention / total.clamp_min(torch.finfo(torch.float32).tiny)).float()


def mean_output_norm(seen: Results, view: View) -> Tensor:
    """Norm of each value behind the output projection, as a mean over the group, [B, H, N]; 0 if invalid."""
    return group_mean(seen[OutputNorms], view).masked_fill(~view.valid, 0)
