"""Helpers shared by mergers: similar keys, and sums over groups of tokens without a matrix of all pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.kernels.products import lengths, thin_products
from kvpolicy.kernels.slot_writes import flat_slots, gather_slots
from kvpolicy.protocols import Candidates, Tokens
from kvpolicy.statistics.ranks import gather

TILE_ELEMENTS = 1 << 20
"""Similarities in one tile: 4 MiB of fp32."""

ADDS_IN_ORDER = ("cpu",)
"""Devices on which a scatter adds in the order of its entries, so that the sum is the same in each run."""

BLOCK = 64
"""Targets in one block of similarities: the largest of a block is found faster than its index."""

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
    """

    keys: Tensor
    values: Tensor
    weights: Tensor
    nearest: Nearest

    def add_to(self, total: Tensor, vectors: Tensor) -> None:
        """Add a vector of each token, [B, H, n, X], to that of its target in `total` [B, H, T, X], in place."""
        targets = total.shape[2]
        index = self.nearest.target
        if total.device.type in ADDS_IN_ORDER:
            total.flatten(0, 2).index_add_(0, flat_slots(index, targets), vectors.flatten(0, 2))
            return
        # A product with ones and zeros, which adds in one order on every device.
        number = torch.arange(targets, device=total.device)
        total += (number[:, None] == index[:, :, None]).float() @ vectors


def unit(keys: Tensor) -> Tensor:
    """Keys [..., D] of length 1, fp32; a key of zeros stays one."""
    return keys.float() / _lengths(keys)[..., None]


def _lengths(keys: Tensor) -> Tensor:
    return lengths(keys).clamp_min(_TINY)


def similar_targets(keys: Tensor, targets: Tensor, is_target: Tensor | None, memory: Tensor) -> Nearest:
    """The target of largest cosine for each token; of ties the first, which is the earliest where targets are sorted.

    Args:
        keys: Keys of the tokens, of length 1, [B, H, n, D] fp32.
        targets: Keys of the targets in whole blocks (see `in_blocks`), of length 1, [B, H, T, D] fp32.
        is_target: Which of them may be one, [B, H, T] bool; None if all may.
        memory: Where similarities are written, [B * H * n * T or more] fp32: new memory costs time in each tile.
    """
    shape = (*keys.shape[:3], targets.shape[2])
    cosine = torch.matmul(keys, targets.mT, out=memory[: math.prod(shape)].view(shape))
    if is_target is not None:
        cosine.masked_fill_(~is_target[:, :, None], -torch.inf)
    cosine = cosine.unflatten(-1, (-1, BLOCK))
    largest = cosine.amax(-1)
    best = largest.amax(-1, keepdim=True)
    # An index is looked for in one block only. Not by `max`, whose index is the first of equal ones on some devices.
    block = (largest == best).to(torch.uint8).argmax(-1, keepdim=True)
    inside = cosine.gather(3, block[..., None].expand(-1, -1, -1, -1, BLOCK)).squeeze(3)
    first = (inside == best).to(torch.uint8).argmax(-1, keepdim=True)
    return Nearest((block * BLOCK + first).squeeze(-1), best.squeeze(-1))


def in_blocks(t: Tensor) -> Tensor:
    """Targets [B, H, T, ...] in whole blocks: the last one is repeated, and the first of its copies is found."""
    missing = -t.shape[2] % BLOCK
    return torch.cat([t, t[:, :, -1:].expand(-1, -1, missing, *t.shape[3:])], 2)


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


def tiles(candidates: Candidates, by: str | Nearest) -> Iterator[Tile]:
    """All evicted tokens, a few at a time, each with the target that it would be merged into.

    Args:
        candidates: The tokens of a prompt.
        by: `keys` for the target of largest cosine, `position` for the nearest one, or the target of every token.
    """
    batch, heads = candidates.keys.shape[:2]
    targets = unit(candidates.at_targets(candidates.keys))
    positions = candidates.at_targets(candidates.positions)
    evicted = candidates.evicted
    # The evicted tokens first, in their order: no other needs a target.
    order = (~evicted).to(torch.uint8).argsort(dim=-1, stable=True)
    count = int(evicted.sum(-1).max())
    blocks = in_blocks(targets)
    some = None if bool(candidates.is_target.all()) else in_blocks(candidates.is_target)
    row = torch.arange(batch, device=targets.device)[:, None, None]
    head = torch.arange(heads, device=targets.device)[:, None]
    size = max(TILE_ELEMENTS // max(batch * heads * targets.shape[2], 1), 16)
    memory = targets.new_empty(batch * heads * min(size, count) * blocks.shape[2] if by == "keys" else 0)
    for start in range(0, count, size):
        at = order[..., start : min(start + size, count)]
        gone = evicted.gather(-1, at)
        mass = gone.float()
        if candidates.counts is not None:
            mass = mass * candidates.counts.gather(-1, at).exp()
        # Keys and values of tokens that are not evicted, such as padding, may hold inf or NaN: 0 times NaN is NaN.
        keys, values = (
            t[row, head, at].float().masked_fill(~gone[..., None], 0) for t in (candidates.keys, candidates.values)
        )
        if isinstance(by, Nearest):
            nearest = Nearest(by.target.gather(-1, at), by.cosine.gather(-1, at))
        elif by == "keys":
            nearest = similar_targets(unit(keys), blocks, some, memory)
            # A copy of the last target may be rounded up against it.
            nearest = nearest._replace(target=nearest.target.clamp_max(targets.shape[2] - 1))
        else:
            here = candidates.positions.gather(-1, at)
            nearest = near_targets(unit(keys), here, targets, positions, candidates.is_target)
        yield Tile(keys, values, mass, nearest)


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


def group_rows(attention: Tensor, candidates: Candidates) -> Tensor:
    """Attention [B, Hq, W, N] as the rows of all query heads of each KV head, [B, H, n, N].

    Those of other ranks are among them, which have other query heads of the same KV heads and must merge alike.
    """
    rows = attention.unflatten(1, (candidates.positions.shape[1], -1)).flatten(2, 3)
    ranks = candidates.ranks
    if ranks.twins:
        rows = gather(rows, ranks.replicas, ranks.twins).permute(1, 2, 0, 3, 4).flatten(2, 3)
    return rows
