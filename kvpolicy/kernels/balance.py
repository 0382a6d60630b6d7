"""Scales of tokens and of channels, by which groups of tokens have the same deviation everywhere."""

from __future__ import annotations

import torch
from torch import Tensor

DEVIATION = (1e-3, 1e3)
"""Bounds of a standard deviation that is divided by in one round."""

LOG_SCALE = (-0.3, 10.0)
"""Bounds of the logarithm of a scale."""

_LEAST_DEVIATION = 1e-8
"""The least that the largest standard deviation is compared with."""

_AS_GOOD = 1 + 1e-9
"""Imbalances that differ by less are equal: they are where all scales are at a bound, but for the order of sums."""


def balance(x: Tensor, is_written: Tensor, rounds: int, tokens_first: bool) -> tuple[Tensor, Tensor]:
    """Find scales of tokens and of channels, by which groups have nearly the same deviation everywhere.

    In turns, tokens and channels are divided by their standard deviations, and the scales grow by them. After each
    round, the imbalance is the largest deviation over the least one, of tokens plus of channels; the scales of the
    least imbalance are the result, of equal ones the latest, and 1 if no round is better than none.

    To a step that is compiled as a whole, it is one operation: its rounds would be a thousand.

    Args:
        x: Groups of tokens, [..., g, D] fp64, zero where nothing is written.
        is_written: Which tokens are written, [..., g, 1] bool.
        rounds: How often both are divided.
        tokens_first: Whether a round begins with the tokens.

    Returns:
        Scales of tokens [..., g, 1] and of channels [..., 1, D].

    Examples:
        >>> x = torch.tensor([[1.0, -1.0], [10.0, -10.0]], dtype=torch.float64)
        >>> tokens, _ = balance(x, torch.ones(2, 1, dtype=torch.bool), 1, tokens_first=True)
        >>> [round(deviation, 9) for deviation in (x / tokens).std(-1).tolist()]
        [1.0, 1.0]
    """
    if torch.compiler.is_compiling():
        return torch.ops.kvpolicy.balance(x, is_written, rounds, tokens_first)
    return _balance(x, is_written, rounds, tokens_first)


def deviation(x: Tensor) -> Tensor:
    """Standard deviation of each token over its channels, [..., 1]; that of one channel is 0.

    Args:
        x: [..., D] fp64, so that the order of a sum, which depends on the batch, does not matter.
    """
    apart = x - x.mean(-1, keepdim=True)
    return (apart.square().sum(-1, keepdim=True) / max(x.shape[-1] - 1, 1)).sqrt()


def _balance(x: Tensor, is_written: Tensor, rounds: int, tokens_first: bool) -> tuple[Tensor, Tensor]:
    tokens = x.new_zeros((*x.shape[:-1], 1))
    channels = x.new_zeros((*x.shape[:-2], 1, x.shape[-1]))
    best = tokens.exp(), channels.exp()
    found = deviation(x), _deviation_of_channels(x, is_written)
    least = _imbalance(*found, is_written)
    for _ in range(rounds):
        if tokens_first:
            tokens = _grown(tokens, found[0])
            scaled = x / tokens.exp() / channels.exp()
            channels = _grown(channels, _deviation_of_channels(scaled, is_written))
        else:
            channels = _grown(channels, found[1])
            scaled = x / tokens.exp() / channels.exp()
            tokens = _grown(tokens, deviation(scaled))
        scaled = x / tokens.exp() / channels.exp()
        found = deviation(scaled), _deviation_of_channels(scaled, is_written)
        imbalance = _imbalance(*found, is_written)
        is_better = imbalance <= least * _AS_GOOD
        least = torch.where(is_better, imbalance, least)
        best = torch.where(is_better, tokens.exp(), best[0]), torch.where(is_better, channels.exp(), best[1])
    return best


def _grown(log: Tensor, divided_by: Tensor) -> Tensor:
    """The logarithm of scales after another division."""
    return (log + divided_by.clamp(*DEVIATION).log()).clamp(*LOG_SCALE)


def _imbalance(tokens: Tensor, channels: Tensor, is_written: Tensor) -> Tensor:
    """How uneven deviations of tokens [..., g, 1] and of channels [..., 1, D] are, [..., 1, 1]."""
    least_token = tokens.masked_fill(~is_written, torch.inf).amin(-2, keepdim=True)
    most_token = tokens.masked_fill(~is_written, 0).amax(-2, keepdim=True)
    of_tokens = most_token / least_token.clamp(min=_LEAST_DEVIATION)
    of_channels = channels.amax(-1, keepdim=True) / channels.amin(-1, keepdim=True).clamp(min=_LEAST_DEVIATION)
    return of_tokens + of_channels


def _deviation_of_channels(x: Tensor, is_written: Tensor) -> Tensor:
    """Standard deviation of each channel over the tokens that are written, [..., 1, D]; that of one token is 0."""
    count = is_written.sum(-2, keepdim=True)
    mean = x.sum(-2, keepdim=True) / count.clamp(min=1)
    apart = (x - mean).masked_fill(~is_written, 0)
    return (apart.square().sum(-2, keepdim=True) / (count - 1).clamp(min=1)).sqrt()


@torch.library.custom_op("kvpolicy::balance", mutates_args=())
def _call_balance(x: Tensor, is_written: Tensor, rounds: int, tokens_first: bool) -> tuple[Tensor, Tensor]:
    return _balance(x, is_written, rounds, tokens_first)


@_call_balance.register_fake
def _(x: Tensor, is_written: Tensor, rounds: int, tokens_first: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty((*x.shape[:-1], 1)), x.new_empty((*x.shape[:-2], 1, x.shape[-1]))
