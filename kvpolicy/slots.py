"""Moving tokens between the exact and the coded part of a layer's slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvpolicy.protocols import Layout, State
from kvpolicy.state import map_state, tensors

if TYPE_CHECKING:
    from kvpolicy.layer import PolicyLayer

FAR = torch.iinfo(torch.int32).max
"""Later than any position."""


class Loose(NamedTuple):
    """Tokens in full precision that must find a slot.

    Attributes:
        keys: [B, H, n, D].
        values: [B, H, n, D].
        positions: [B, H, n] int32.
        state: The selector's state of each.
        chosen: Which are kept, [B, H, n] bool.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    state: State
    chosen: Tensor

    def take(self, index: Tensor) -> Loose:
        """Tokens `index` [B, H, m] of each head."""
        wide = index[..., None].expand(-1, -1, -1, self.keys.shape[-1])
        state = map_state(lambda t: t.gather(-1, index), self.state)
        return Loose(
            self.keys.gather(2, wide), self.values.gather(2, wide), self.positions.gather(-1, index), state,
            self.chosen.gather(-1, index),
        )  # fmt: skip


def lay_out(layer: PolicyLayer, layout: Layout) -> None:
    """Make room for a layout, at least as large as the one before; exact slots come out empty."""
    old = layer.layout
    layer.layout = Layout(max(layout.exact, old.exact), max(layout.coded, old.coded))
    batch, heads, _ = layer.positions.shape
    size, shift = sum(layer.layout), layer.layout.exact
    positions = layer.positions.new_full((batch, heads, size), -1)
    positions[..., shift : shift + old.coded] = layer.positions[..., old.exact :]
    fresh = layer.policy.selector.alloc(batch, heads, size, layer.device)
    for empty, held in zip(tensors(fresh), tensors(layer.state), strict=True):
        empty[..., shift : shift + old.coded] = held[..., old.exact :]
    layer.positions, layer.state = positions, fresh
    if layer.layout.coded != old.coded:
        assert layer.keys is not None
        codes = layer.policy.codec.alloc(batch, heads, layer.layout.coded, layer.keys.shape[-1], layer.device)
        for empty, held in zip(tensors(codes), tensors(layer.codes), strict=True):
            empty[:, :, : held.shape[2]] = held
        layer.codes = codes


def pack_loose(layer: PolicyLayer, loose: Loose) -> tuple[Tensor, Tensor]:
    """Give every chosen token a slot, oldest first: whole blocks are coded, the newest stay exact.

    Returns:
        The exact keys and values, [B, H, E, D].
    """
    codec, exact = layer.policy.codec, layer.layout.exact
    count = loose.chosen.sum(-1)  # [B, H]
    most = max(int(count.max()), 1)
    order = torch.where(loose.chosen, loose.positions, FAR).argsort(dim=-1, stable=True)
    loose = loose.take(order[..., :most])
    blocks = torch.zeros_like(count)
    if codec.block and layer.layout.coded:
        blocks = (count - codec.residual).clamp_min(0) // codec.block
        _code_blocks(layer, loose, blocks)
    coded = blocks * codec.block
    index = coded[..., None] + torch.arange(exact, device=count.device)
    rest = loose.take(index.clamp_max(most - 1))
    there = index < count[..., None]
    layer.positions[..., :exact] = rest.positions.masked_fill(~there, -1)
    for slot, item in zip(tensors(layer.state), tensors(rest.state), strict=True):
        slot[..., :exact] = item.masked_fill(~there, 0)
    blank = ~there[..., None]
    return rest.keys.masked_fill(blank, 0), rest.values.masked_fill(blank, 0)


def _code_blocks(layer: PolicyLayer, loose: Loose, blocks: Tensor) -> None:
    """Code each head's first `blocks` [B, H] blocks of tokens."""
    block, most = layer.policy.codec.block, int(blocks.max())
    live = layer.positions[..., layer.layout.exact :] >= 0
    if not most:
        return
    if not bool(live.any()):  # nothing to fit in with: one write
        size = most * block
        slots = torch.arange(size, device=live.device).expand(*live.shape[:2], -1)
        _write(layer, _first(loose, 0, size), slots, slots < (blocks * block)[..., None], live)
        return
    for number in range(most):
        place_block(layer, _first(loose, number * block, block), number < blocks)


def _first(loose: Loose, start: int, size: int) -> Loose:
    index = torch.arange(start, start + size, device=loose.positions.device)
    return loose.take(index.expand(*loose.positions.shape[:2], -1).clamp_max(loose.positions.shape[-1] - 1))


def oldest_exact(layer: PolicyLayer, size: int) -> tuple[Loose, Tensor]:
    """The oldest `size` exact tokens of each head, taken out where the exact part is full.

    Returns:
        The tokens, and in which heads they were taken out, [B, H] bool.
    """
    exact = layer.layout.exact
    assert layer.keys is not None and layer.values is not None
    positions = layer.positions[..., :exact]
    live = positions >= 0
    active = live.sum(-1) >= exact
    index = torch.where(live, positions, FAR).argsort(dim=-1, stable=True)[..., :size]
    state = map_state(lambda t: t[..., :exact], layer.state)
    taken = Loose(layer.keys, layer.values, positions, state, live).take(index)
    layer.positions.scatter_(-1, index, taken.positions.masked_fill(active[..., None], -1))
    return taken, active


def place_block(layer: PolicyLayer, block: Loose, active: Tensor) -> None:
    """Code one block per active head, into a group without tokens or else over dead slots of the emptiest groups."""
    exact, size = layer.layout.exact, layer.policy.codec.block
    live = layer.positions[..., exact:] >= 0
    crowd = live.unflatten(-1, (-1, size)).sum(-1, keepdim=True).expand(*live.shape[:2], -1, size).flatten(-2)
    # A row has the groups that it would have alone, however many its neighbours need.
    own = (layer.budget - layer.policy.codec.residual + size - 1).div(size, rounding_mode="floor") * size
    other = torch.arange(live.shape[-1], device=live.device) >= own[:, None, None]
    order = torch.where(live | other, size + 1 + other.long(), crowd).argsort(dim=-1, stable=True)
    there = active[..., None].expand_as(block.positions)
    _write(layer, block, order[..., :size], there, live)


def _write(layer: PolicyLayer, block: Loose, slots: Tensor, there: Tensor, live: Tensor) -> None:
    layer.policy.codec.write(layer.codes, block.keys, block.values, slots, there, live)
    at = slots + layer.layout.exact
    kept = layer.positions.gather(-1, at)
    layer.positions.scatter_(-1, at, torch.where(there, block.positions, kept))
    for target, item in zip(tensors(layer.state), tensors(block.state), strict=True):
        target.scatter_(-1, at, torch.where(there, item, target.gather(-1, at)))
