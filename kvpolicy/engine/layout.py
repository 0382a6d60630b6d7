"""Buffers of a layer that grow with its layout: positions, selector state and codes."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.engine.state import empty_slots, map_slots, map_state, slot_tensors, tensors
from kvpolicy.protocols import Codec, Codes, Layout, State


def grown_layout(old: Layout, wanted: Layout) -> Layout:
    """The smallest layout that is at least as large as both, stage by stage."""
    count = max(len(old.coded), len(wanted.coded))
    held = [*old.coded, *[0] * (count - len(old.coded))]
    asked = [*wanted.coded, *[0] * (count - len(wanted.coded))]
    return Layout(max(wanted.exact, old.exact), tuple(map(max, held, asked)))


def grown_slots(positions: Tensor, state: State, old: Layout, new: Layout, reserved: int) -> tuple[Tensor, State]:
    """Positions and selector state for a new layout.

    Tokens of the stages and of the first `reserved` full-precision slots are carried over; the other full-precision
    slots come out empty.

    Args:
        positions: [B, H, S] int32 in the old layout.
        state: The selector's state in the old layout.
        old: The old layout.
        new: The new one, at least as large.
        reserved: Dictionary slots.
    """
    batch, heads, _ = positions.shape
    grown = positions.new_full((batch, heads, new.slots), -1)
    grown_state = empty_slots(state, new.slots)
    moves = [(0, 0, reserved), *zip(new.starts(), old.starts(), old.coded, strict=False)]
    for to, start, size in moves:
        grown[..., to : to + size] = positions[..., start : start + size]
        for target, source in zip(slot_tensors(grown_state), slot_tensors(state), strict=True):
            target[..., to : to + size] = source[..., start : start + size]
    return grown, grown_state


def grown_state(held: State, old: Layout, new: Layout, reserved: int) -> State:
    """Tensors [B, H, S] for a new layout: what `grown_slots` carries over keeps its entries, all others are 0."""
    moves = [(0, 0, reserved), *zip(new.starts(), old.starts(), old.coded, strict=False)]

    def grown(source: Tensor) -> Tensor:
        target = source.new_zeros(*source.shape[:-1], new.slots)
        for to, start, size in moves:
            target[..., to : to + size] = source[..., start : start + size]
        return target

    return map_state(grown, held)


def grown_codes(
    codec: Codec, codes: tuple[Codes, ...], coded: tuple[int, ...], shape: tuple[int, int, int], device: torch.device
) -> tuple[Codes, ...]:
    """Codes of every stage with room for `coded` slots, beginning with those of `codes`.

    Args:
        codec: The codec.
        codes: Codes of each stage so far.
        coded: Slots of each stage.
        shape: B, H and D.
        device: Device of the codes.
    """
    batch, heads, head_dim = shape
    grown: list[Codes] = []
    for stage, size in enumerate(coded):
        empty = codec.stages[stage].alloc(batch, heads, size, head_dim, device)
        if stage < len(codes):
            for target, source in zip(tensors(empty), tensors(codes[stage]), strict=True):
                # Slots and groups keep their index: tensors of a longer stage begin like those of a shorter one.
                target[:, :, : source.shape[2]] = source
        grown.append(empty)
    return tuple(grown)


def fix_addresses(parts: list[State]) -> None:
    """Mark tensors as static for CUDA graphs, which write only to such tensors and copy all others.

    Unguarded, since a guard would recompile for every cache; a graph is recorded again when an address changes.
    """
    for part in parts:
        for tensor in tensors(part):
            torch._dynamo.mark_static_address(tensor, guard=False)  # pyright: ignore[reportPrivateUsage]


def cleared(state: State, mask: Tensor) -> State:
    """A state that is 0 in the slots where `mask` is set."""
    return map_slots(lambda t: t.masked_fill(mask, 0), state)
