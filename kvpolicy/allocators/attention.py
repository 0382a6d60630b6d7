"""Helpers shared by allocators that measure layers by their attention."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kvpolicy.protocols import Allocator, Guarantee, LayerBounds, LayerMetric
from kvpolicy.text.budget import waterfill
from kvpolicy.text.errors import KVPolicyError

SLACK = 1e-6
"""The relative amount of a mass that may lack where a share of it counts as reached; attention is fp32."""


class ByAttention(Allocator, Protocol):
    """An allocator that measures layers by their attention: a subclass has `attention`, `measure` and `budgets`."""

    __slots__ = ()

    @property
    def layer_metric(self) -> LayerMetric:
        """Numbers of attention."""
        return "attention"


def check_odd(name: str, kernel: int) -> None:
    """Refuse a width of a pooling that has no middle.

    Raises:
        KVPolicyError: With the name of the field.
    """
    if kernel < 1:
        raise KVPolicyError(f"{name} must be at least 1, got {kernel}; try 7.")
    if kernel % 2 == 0:
        raise KVPolicyError(f"{name} must be odd, got {kernel}; try {kernel + 1}.")


def number_reaching(mass: Tensor, share: float) -> Tensor:
    """How many of the largest numbers reach a share of the sum of all, [...] int64, at least 1.

    Args:
        mass: Numbers of at least 0, [..., N].
        share: The share, in (0, 1].

    Examples:
        >>> number_reaching(torch.tensor([[0.1, 0.6, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]]), 0.8).tolist()
        [2, 4]
    """
    ranked = mass.sort(dim=-1, descending=True).values
    reached = ranked.cumsum(-1, dtype=torch.float64)
    least = share * (1 - SLACK) * reached[..., -1:]
    return ((reached < least).sum(-1) + 1).clamp_max(mass.shape[-1])


def before_window(positions: Tensor, length: Tensor, queries: Tensor) -> Tensor:
    """Which tokens stand before the queries that were reduced, [B, N] bool; see `LayerAttention`."""
    return (positions >= 0) & (positions < (length - queries)[:, None])


def divide_in_proportion(weights: Tensor, total: Tensor, floor: int, ceiling: Tensor, even: float = 0.0) -> Tensor:
    """Tokens of each layer in proportion to weights, [B, L] int64; the same for all where all weights are 0.

    Args:
        weights: Numbers of at least 0, [B, L].
        total: Tokens of all layers together, [B] int64.
        floor: The fewest tokens of a layer.
        ceiling: The most tokens that a layer of each row can use, [B] int64.
        even: The fraction of an even division that every layer has, of which the rest is divided.
    """
    weights = weights.double().to(total.device)
    weights = torch.where(weights.sum(-1, keepdim=True) > 0, weights, 1)
    shares = weights / weights.sum(-1, keepdim=True)
    return waterfill(total[:, None] * shares, total, floor, ceiling, even)


def bounds_in_proportion(
    weights: Tensor,
    lightest: Tensor | float,
    heaviest: Tensor | float,
    total: Tensor,
    floor: int,
    ceiling: Tensor,
    layers: int,
    even: float = 0.0,
) -> LayerBounds:
    """Bounds of layers whose tokens are in proportion to their weights: the heavier the others, the fewer they get.

    Args:
        weights: Of the layers that were measured, [B, K].
        lightest: The least weight that another layer may have, a number or [B].
        heaviest: The largest weight that another layer may have, a number or [B].
        total: Tokens of all layers together, [B] int64.
        floor: The fewest tokens of a layer.
        ceiling: The most tokens that a layer of each row can use, [B] int64.
        layers: Layers in all.
        even: As in `divide_in_proportion`.
    """
    batch, measured = weights.shape

    def divided(other: Tensor | float) -> Tensor:
        number = torch.as_tensor(other, dtype=torch.float64, device=weights.device)
        others = number.expand(batch)[:, None].expand(-1, layers - measured)
        every = torch.cat([weights.double(), others], -1)
        return divide_in_proportion(every, total, floor, ceiling, even)[:, :measured]

    # A token more or less: rounding to whole tokens depends on all layers.
    return LayerBounds((divided(heaviest) - 1).clamp_min(floor), divided(lightest) + 1)


def guarantee_in_proportion(total: Tensor, floor: int, layers: int, least: float = 0.0) -> Guarantee:
    """Guarantees for layers whose tokens are in proportion to their weights.

    Args:
        total: Tokens of all layers together, [B] int64.
        floor: The fewest tokens of a layer.
        layers: Layers in all.
        least: The smallest share of the total that a layer may have.
    """
    fewest = (total.double() * least).floor().long() - 1
    return Guarantee(fewest.clamp_min(floor), total + layers)
