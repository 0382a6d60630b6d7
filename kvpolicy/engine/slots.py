"""Tokens on their way into a layer's slots, and room for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.state import map_state, tensors
from kvpolicy.protocols import Layout, State, View

if TYPE_CHECKING:
    from kvpolicy.hf.layer import PolicyLayer

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
        rows, heads = (torch.arange(size, device=index.device) for size in index.shape[:2])
        whole = rows[:, None, None], heads[:, None], index  # vector by vector: twice as fast as a gather
        keys, values = self.keys[whole], self.values[whole]
        state = map_state(lambda t: t.gather(-1, index), self.state)
        return Loose(keys, values, self.positions.gather(-1, index), state, self.chosen.gather(-1, index))


def words_of(layer: PolicyLayer) -> str:
    """A layer's `repr`: its slots, and how they are stored."""
    if not layer.is_initialized:
        return f"{type(layer).__name__}(layer_idx={layer.layer_idx}, empty)"
    batch, heads, slots = layer.positions.shape
    kept = f"exact={layer.layout.exact}" + (f", coded={layer.layout.coded}" if layer.layout.coded else "")
    return f"{type(layer).__name__}(layer_idx={layer.layer_idx}, rows={batch}, heads={heads}, slots={slots}, {kept})"


def frozen_rows(layer: PolicyLayer) -> Tensor:
    """Which rows have frozen slots, [B, 1, 1] bool: those that had room for codes when the first prompt was settled."""
    assert layer.rows is not None
    return layer.rows.pins[:, :1, :1] >= 0


def open_slots(layer: PolicyLayer) -> Tensor:
    """Which exact slots any token may take, [B or 1, 1, E] bool: all but frozen ones."""
    slots = torch.arange(layer.layout.exact, device=layer.positions.device)[None, None]
    return (slots >= layer.frozen) | ~frozen_rows(layer) if layer.frozen else slots >= 0


def lay_out(layer: PolicyLayer, layout: Layout) -> None:
    """Make room for a layout, at least as large as the one before; exact slots come out empty but for frozen ones."""
    old = layer.layout
    held = [*old.coded, *[0] * (len(layout.coded) - len(old.coded))]
    wanted = [*layout.coded, *[0] * (len(held) - len(layout.coded))]
    layer.layout = new = Layout(max(layout.exact, old.exact), tuple(map(max, held, wanted)))
    batch, heads, _ = layer.positions.shape
    positions = layer.positions.new_full((batch, heads, new.slots), -1)
    state = layer.policy.selector.alloc(batch, heads, new.slots, layer.device)
    moves = [(0, 0, layer.frozen), *zip(new.starts(), old.starts(), old.coded, strict=False)]
    for now, then, size in moves:
        positions[..., now : now + size] = layer.positions[..., then : then + size]
        for empty, full in zip(tensors(state), tensors(layer.state), strict=True):
            empty[..., now : now + size] = full[..., then : then + size]
    if layer.frozen:
        positions[..., : layer.frozen].masked_fill_(~frozen_rows(layer), -1)
    layer.positions, layer.state = positions, state
    if new.coded != old.coded:
        layer.codes = tuple(_longer(layer, number, size) for number, size in enumerate(new.coded))


def _longer(layer: PolicyLayer, stage: int, size: int) -> object:
    """A stage's codes, with room for `size` slots."""
    batch, heads, _ = layer.positions.shape
    assert layer.keys is not None
    codes = layer.policy.codec.stages[stage].alloc(batch, heads, size, layer.keys.shape[-1], layer.device)
    if stage < len(layer.codes):
        for empty, held in zip(tensors(codes), tensors(layer.codes[stage]), strict=True):
            empty[:, :, : held.shape[2]] = held
    return codes


def fix_addresses(layer: PolicyLayer) -> None:
    """Say that a layer's tensors stay where they are: CUDA graphs write to no others, and copy those they read.

    Unguarded, since a guard would compile again for every cache; a graph is recorded anew where an address is another.
    """
    held: list[Any] = [layer.keys, layer.values, layer.positions, layer.length, layer.budget, layer.columns]
    parts = (layer.state, layer.codes, layer.calibrations, layer.rows or ())
    for tensor in [*held, *(tensor for part in parts for tensor in tensors(part))]:
        torch._dynamo.mark_static_address(tensor, guard=False)  # pyright: ignore[reportPrivateUsage]


def without_nan(worth: Tensor) -> Tensor:
    """A priority in which NaN ranks above every number, below what always stays: what is broken does not vanish."""
    return worth.nan_to_num(torch.finfo(worth.dtype).max, torch.inf, -torch.inf)


def leaving_order(layer: PolicyLayer, loose: Loose) -> Tensor:
    """Who leaves the exact part (or a stage) first: the index of each token, [B, H, n]; the unchosen come last."""
    traits = layer.policy.codec.traits
    if traits.demote_by == "age":
        order = loose.positions.argsort(dim=-1, stable=True)
    else:
        # Of equals the later position leaves first, as in eviction.
        order = loose.positions.argsort(dim=-1, descending=True, stable=True)
        seen = loose.positions.masked_fill(~loose.chosen, -1)
        view = View(seen, layer.length, _precise(layer), layer.layer_idx, layer.ranks)
        worth = without_nan(layer.policy.selector.priority(loose.state, view))
        order = order.gather(-1, worth.gather(-1, order).argsort(dim=-1, stable=True))
    last = torch.where(loose.chosen, 0, 2).masked_fill(loose.chosen & _stays(layer, loose.positions), 1)
    return order.gather(-1, last.gather(-1, order).argsort(dim=-1, stable=True))


def _precise(layer: PolicyLayer) -> Tensor:
    """Tokens of each row that stay precise, [B]: what a selector ranks for, since its windows are shares of that."""
    assert layer.rows is not None
    precise = layer.rows.full[:, 0] - layer.policy.codec.traits.block
    if layer.rows.room.shape[1] > 1:
        precise = precise + layer.rows.room[:, 0]
    return torch.minimum(precise.clamp_min(layer.policy.selector.min_tokens), layer.budget)


def is_pinned(layer: PolicyLayer, positions: Tensor) -> Tensor:
    """Which positions [B, H, n] are pinned."""
    assert layer.rows is not None
    return (positions[..., None] == layer.rows.pins[:, :, None]).any(-1)


def _stays(layer: PolicyLayer, positions: Tensor) -> Tensor:
    """Which tokens are never coded: pinned ones, and where worth decides, the newest."""
    assert layer.rows is not None
    traits = layer.policy.codec.traits
    stays = torch.zeros_like(positions, dtype=torch.bool)
    if traits.pinned:
        stays = is_pinned(layer, positions)
    if traits.demote_by == "priority":
        stays = stays | (positions >= (layer.length - traits.residual)[:, None, None])
    return stays
