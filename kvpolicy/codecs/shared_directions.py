"""Vectors of two layers as one direction between both on the sphere, and a norm for each layer.

Tokens of which the directions differ most are stored whole in both layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.codecs.common import ENCODED_AT_ONCE, chunks, put, take
from kvpolicy.codecs.uniform import FP16
from kvpolicy.kernels.products import matmul, products
from kvpolicy.protocols import At

_PARALLEL = 1e-6
"""A sine of an angle below which directions are interpolated on the line between them."""

_AT_ONCE = ENCODED_AT_ONCE // 8
"""Tokens of a head that are encoded at a time: those of two layers take, as fp64, many times the memory of fp32."""


class Side(NamedTuple):
    """Stored keys, or values, of a layer.

    Attributes:
        directions: Shared directions, [B, H, C, D] fp16; a layer may read more than it has slots.
        whole_slots: The slot of each token that is stored whole, shared, [B, H, R] int32, -1 for none.
        norm: Norms of this layer, [B, H, C, 1] fp16.
        whole: Vectors of this layer that are stored whole, [B, H, R, D] fp16.
    """

    directions: Tensor
    whole_slots: Tensor
    norm: Tensor
    whole: Tensor


def to_half(x: Tensor) -> Tensor:
    """Round to fp16, clipped to its range."""
    return x.float().clamp(-FP16, FP16).half()


def unit_vectors(x: Tensor) -> tuple[Tensor, Tensor]:
    """Directions [..., D] and norms [..., 1] of vectors [..., D], fp64; a zero vector has the direction 0."""
    x = x.double()
    norm = x.square().sum(-1, keepdim=True).sqrt()
    return x / norm.masked_fill(norm == 0, 1), norm


def angle_between(one: Tensor, other: Tensor) -> Tensor:
    """The angle of unit vectors [..., D], in [0, pi], fp64; 0 where one of them is 0."""
    # Not the arc cosine of their product, which loses half of the digits of small angles.
    angle = 2 * torch.atan2((one - other).norm(dim=-1), (one + other).norm(dim=-1))
    return angle.masked_fill((one == 0).all(-1) | (other == 0).all(-1), 0)


def interpolate(one: Tensor, other: Tensor, t: float) -> Tensor:
    """Unit vectors on the arc from `one` to `other` [..., D], at the fraction `t` of it.

    Where a vector is 0, the result is the other one. Opposite vectors have no arc: their line is taken instead, and
    `one` where it passes through 0.

    Examples:
        >>> interpolate(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), 0.5).float()
        tensor([0.7071, 0.7071])
        >>> interpolate(torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 0.0]), 0.5).tolist()
        [1.0, 0.0]
    """
    one = _unless_zero(one.double(), other.double())
    other = _unless_zero(other.double(), one)
    angle = angle_between(one, other)[..., None]
    sine = angle.sin()
    is_line = sine < _PARALLEL
    sine = sine.masked_fill(is_line, 1)
    of_one = torch.where(is_line, 1 - t, ((1 - t) * angle).sin() / sine)
    of_other = torch.where(is_line, t, (t * angle).sin() / sine)
    mixed, norm = unit_vectors(of_one * one + of_other * other)
    return torch.where(norm < _PARALLEL, one, mixed)


def _unless_zero(x: Tensor, other: Tensor) -> Tensor:
    """Vectors [..., D], replaced by the other ones where they are zero."""
    return torch.where((x == 0).all(-1, keepdim=True), other, x)


def write_side(
    sides: Sequence[Side],
    vectors: Sequence[Tensor],
    slots: Tensor,
    write_mask: Tensor,
    occupied: Tensor,
    *,
    t: float,
    fraction: float,
) -> None:
    """Encode the keys, or the values, of tokens in both layers of a pair, in place; see `GroupStage.write_group`.

    Args:
        sides: What each layer stores; all have the same directions.
        vectors: Vectors of each layer, [B, H, n, D].
        slots: The slot of each token, [B, H, n] int64.
        write_mask: Which tokens are written, [B, H, n] bool.
        occupied: Which slots hold a token that stays, [B, H, C] bool.
        t: How far directions lie from the first layer to the second.
        fraction: The fraction of a head's encoded tokens that are stored whole.
    """
    angles: list[Tensor] = []
    for start in range(0, slots.shape[-1], _AT_ONCE):
        at = slice(start, start + _AT_ONCE)
        halves = [to_half(x[:, :, at]) for x in vectors]
        units = [unit_vectors(x) for x in halves]
        angles.append(angle_between(units[0][0], units[-1][0]).float())
        where = slots[..., at], write_mask[..., at]
        put(sides[0].directions, to_half(interpolate(units[0][0], units[-1][0], t)), *where)
        for side, (_, norm) in zip(sides, units, strict=True):
            put(side.norm, to_half(norm), *where)
    if sides[0].whole_slots.shape[-1]:
        _keep_whole(sides, vectors, torch.cat(angles, -1), slots, write_mask, occupied, fraction)


def _keep_whole(
    sides: Sequence[Side],
    vectors: Sequence[Tensor],
    angles: Tensor,
    slots: Tensor,
    write_mask: Tensor,
    occupied: Tensor,
    fraction: float,
) -> None:
    """Store the tokens of largest angle whole, among those that are stored whole and stay, and those written."""
    table = sides[0].whole_slots
    entries = table.shape[-1]
    held = table.long()
    stays = (held >= 0) & occupied.gather(-1, held.clamp_min(0))
    before = angle_between(*(unit_vectors(side.whole)[0] for side in (sides[0], sides[-1]))).float()
    every = torch.cat([before.masked_fill(~stays, -1), angles.masked_fill(~write_mask, -1)], -1)
    # Stable: of equal angles, those that are stored whole stay, and then the tokens that leave the buffer first.
    order = every.argsort(dim=-1, descending=True, stable=True)[..., :entries]
    count = ((occupied.sum(-1) + write_mask.sum(-1)).double() * fraction).ceil()
    chosen = (torch.arange(entries, device=order.device) < count[..., None]) & (every.gather(-1, order) >= 0)
    chosen = torch.where(write_mask.any(-1, keepdim=True), chosen, False)
    found = torch.cat([held, slots], -1).gather(-1, order).masked_fill(~chosen, -1)
    is_written = write_mask.any(-1, keepdim=True)
    table.copy_(torch.where(is_written, found, held))
    is_old = (order < entries)[..., None]
    for side, x in zip(sides, vectors, strict=True):
        old = take(side.whole, order.clamp_max(entries - 1))
        new = to_half(take(x, (order - entries).clamp_min(0)))
        kept = torch.where(is_old, old, new).masked_fill(~chosen[..., None], 0)
        side.whole.copy_(torch.where(is_written[..., None], kept, side.whole))


def read_side(side: Side, at: At) -> Tensor:
    """Vectors of the slots `at`, [B, H, n, D] fp32."""
    near = take(side.directions, at).float() * take(side.norm, at).float()
    if not side.whole.shape[2]:
        return near
    entry = take(_entries(side), at)[..., None]
    whole = take(side.whole, entry.squeeze(-1).clamp_min(0)).float()
    return torch.where(entry >= 0, whole, near)


def _entries(side: Side) -> Tensor:
    """Which entry of the tokens stored whole a slot has, [B, H, C] int64, -1 for none."""
    slots = side.norm.shape[2]
    entries = side.whole.shape[2]
    table = side.whole_slots[..., :entries].long()
    number = torch.arange(entries, device=table.device).expand_as(table)
    # One slot more, which unused entries write to.
    found = table.new_full((*table.shape[:2], slots + 1), -1)
    return found.scatter(-1, torch.where(table < 0, slots, table), number)[..., :slots]


def score_side(side: Side, queries: Tensor) -> Tensor:
    """Products of queries [B, H, G, D] with the keys of every slot, [B, H, G, C] fp32, of which none is restored."""
    slots = side.norm.shape[2]
    parts = [products(queries, side.directions[:, :, at].to(queries.dtype)) for at in chunks(slots)]
    near = (parts[0] if len(parts) == 1 else torch.cat(parts, -1)) * side.norm.float().transpose(-1, -2)
    if not side.whole.shape[2]:
        return near
    entry = _entries(side)[:, :, None].expand_as(near)
    whole = products(queries, side.whole.to(queries.dtype))
    return torch.where(entry >= 0, whole.gather(-1, entry.clamp_min(0)), near)


def mix_side(side: Side, weights: Tensor) -> Tensor:
    """Values of every slot, weighted by `weights` [B, H, G, C] and summed, [B, H, G, D] fp32; none is restored."""
    slots = side.norm.shape[2]
    entries = side.whole.shape[2]
    table = side.whole_slots[..., :entries].long()
    at_whole = torch.where(table < 0, slots, table)[:, :, None].expand(-1, -1, weights.shape[2], -1)
    padded = F.pad(weights, (0, 1))
    of_whole = padded.gather(-1, at_whole)
    near = padded.scatter(-1, at_whole, 0)[..., :slots] if entries else weights
    near = (near.float() * side.norm.float().transpose(-1, -2)).to(weights.dtype)
    sums = [matmul(near[..., at], side.directions[:, :, at].to(weights.dtype)).float() for at in chunks(slots)]
    return sum(sums, matmul(of_whole, side.whole.to(weights.dtype)).float())
