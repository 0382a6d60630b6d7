"""Helpers shared by mergers: similar keys, and sums over groups of tokens without a matrix of all pairs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.kernels.products import thin_products
from kvpolicy.kernels.slot_writes import gather_slots
from kvpolicy.protocols import Candidates, Tokens

TILE_ELEMENTS = 1 << 20
"""Similarities in one tile: 4 MiB of fp32."""

_TINY = torch.finfo(torch.float32).tiny
_FAR = torch.iinfo(torch.int32).max
"""Later than any position."""


class Nearest(NamedTuple):
    """The target of each token, and how similar the two keys are.

    Attributes:
        target: Index of the target, [B, H, n] int64.
        cosine: Cosine of the two keys, [B, H, n] fp32; -inf where there is no target.
    """

    target: Tensor
    cosine: Tensor


class Tile(NamedTuple):
    """A few evicted tokens and the target of each.

    Attributes:
        values: [B, H, n, D] fp32.
        keys: [B, H, n, D] fp32.
        weights: How many tokens each one stands for, 0 where it is not evicted, [B, H, n] fp32.
        nearest: Its target.
        members: 1 where an entry of the first axis is the target of a token, else 0, [B, H, T, n] fp32.
    """

    keys: Tensor
    values: Tensor
    weights: Tensor
    nearest: Nearest
    members: Tensor


def unit(keys: Tensor) -> Tensor:
    """Keys [..., D] of length 1, fp32; a key of zeros stays one."""
    return keys.float() / _lengths(keys)[..., None]


def _lengths(keys: Tensor) -> Tensor:
    return torch.linalg.vector_norm(keys, dim=-1, dtype=torch.float32).clamp_min(_TINY)


def similar_targets(keys: Tensor, targets: Tensor, is_target: Tensor) -> Nearest:
    """The target of largest cosine for each token; of ties the first, which is the earliest where targets are sorted.

    Args:
        keys: Keys of the tokens, of length 1, [B, H, n, D] fp32.
        targets: Keys of the targets, of length 1, [B, H, T, D] fp32.
        is_target: Which of them may be one, [B, H, T] bool.
    """
    cosine = (keys @ targets.mT).masked_fill(~is_target[:, :, None], -torch.inf)
    best = cosine.max(-1)
    # Not `best.indices`, which is the first of equal ones on some devices only.
    first = (cosine == best.values[..., None]).to(torch.uint8).argmax(-1)
    return Nearest(first, best.values)


def near_targets(
    keys: Tensor, positions: Tensor, targets: Tensor, target_positions: Tensor, is_target: Tensor
) -> Nearest:
    """The target of nearest position for each token, the earlier of two; arguments as in `similar_targets`.

    Args:
        keys: [B, H, n, D] fp32.
        positions: Positions of the tokens, [B, H, n] int32.
        targets: [B, H, T, D] fp32.
        target_positions: Positions of the targets, [B, H, T] int32, ascending among those that may be one.
        is_target: [B, H, T] bool.
    """
    distance = (positions[..., None] - target_positions[:, :, None]).abs().masked_fill(~is_target[:, :, None], _FAR)
    best = distance.amin(-1, keepdim=True)
    index = (distance == best).to(torch.uint8).argmax(-1)
    cosine = (keys * gather_slots(targets, index)).sum(-1)
    return Nearest(index, cosine.masked_fill(~is_target.any(-1, keepdim=True), -torch.inf))


def tiles(candidates: Candidates, by: str) -> Iterator[Tile]:
    """All candidates, a few at a time, each with the target that it would be merged into.

    Args:
        candidates: The tokens of a prompt.
        by: `keys` for the target of largest cosine, `position` for the nearest one.
    """
    batch, heads, count, _ = candidates.keys.shape
    targets = unit(candidates.at_targets(candidates.keys))
    positions = candidates.at_targets(candidates.positions)
    number = torch.arange(targets.shape[2], device=targets.device)
    evicted = candidates.evicted
    size = max(TILE_ELEMENTS // max(batch * heads * targets.shape[2], 1), 16)
    for start in range(0, count, size):
        at = slice(start, start + size)
        mass = evicted[..., at].float()
        if candidates.counts is not None:
            mass = mass * candidates.counts[..., at].exp()
        # Keys and values of tokens that are not evicted, such as padding, may hold inf or NaN: 0 times NaN is NaN.
        gone = evicted[..., at, None]
        keys, values = (t[:, :, at].float().masked_fill(~gone, 0) for t in (candidates.keys, candidates.values))
        if by == "keys":
            nearest = similar_targets(unit(keys), targets, candidates.is_target)
        else:
            nearest = near_targets(unit(keys), candidates.positions[..., at], targets, positions, candidates.is_target)
        members = (number[:, None] == nearest.target[:, :, None]).float()
        yield Tile(keys, values, mass, nearest, members)


def target_of(victim: Tokens, slots: Tokens, by: str) -> Nearest:
    """The slot that the victim of a decode step would be merged into, [B, H, 1]; slots are in any order.

    Args:
        victim: One token of each head.
        slots: The full-precision buffer.
        by: As in `tiles`.
    """
    # Divided by the lengths at last: keys of length 1 would be a copy of the buffer, and compiled code would divide the
    # victim's again for every slot. But fp16 may lack the range for a product of two keys.
    own = unit(victim.keys) if slots.keys.dtype == torch.float16 else victim.keys
    cosine = thin_products(own, slots.keys).squeeze(2) / _lengths(slots.keys) / _lengths(own)
    cosine = cosine.masked_fill(~slots.there, -torch.inf)
    rank = cosine
    if by == "position":
        rank = -(slots.positions - victim.positions).abs().float().masked_fill(~slots.there, torch.inf)
    best = rank == rank.amax(-1, keepdim=True)
    # Of equal ones the earliest position, which is unique within a head.
    index = torch.where(best & slots.there, slots.positions, _FAR).argmin(-1, keepdim=True)
    return Nearest(index, cosine.gather(-1, index))
