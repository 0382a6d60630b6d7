"""Buffers of a layer that grow with its layout (positions, selector state and codes), and when they must grow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpolicy.engine.state import empty_slots, map_state, slot_tensors, tensors
from kvpolicy.engine.token_batch import BEYOND
from kvpolicy.protocols import Codec, Codes, Layout, State

GROWTH_FACTOR = 8
MIN_GROWTH = 16
MAX_GROWTH = 256


def growth(tokens: Tensor) -> Tensor:
    """Tokens that a growing cache adds at a time if the number of tokens to come is unknown.

    An eighth of what each row holds, so that the reserve stays small beside short prompts, but no fewer than 16, so
    that buffers are not copied every few steps, and no more than 256.

    Args:
        tokens: Tokens of each row, [B] int64.

    Examples:
        >>> growth(torch.tensor([10, 490, 100_000])).tolist()
        [16, 61, 256]
    """
    return (tokens // GROWTH_FACTOR).clamp(MIN_GROWTH, MAX_GROWTH)


def free_steps(
    occupied: Tensor,
    budget: Tensor,
    expected_len: Sequence[int],
    *,
    grows: bool,
    buffer_room: Tensor | None,
) -> int:
    """Decode steps that are guaranteed to fit.

    Args:
        occupied: Tokens of each head, [B, H] int64.
        budget: The most tokens of each row, [B] int64.
        expected_len: Tokens that each row has slots for.
        grows: Whether generated tokens are kept in addition to the budget.
        buffer_room: Tokens that each head's full-precision buffer can take before a block must be demoted, [B, H];
            None without stages.
    """
    expected = torch.tensor(expected_len, device=occupied.device)
    # Without `grows`, a row whose budget fits into its slots evicts in place for ever. With it, a row ends where its
    # budget or its slots do: a budget may exceed all tokens that were announced.
    limit = torch.minimum(budget, expected) if grows else torch.where(budget > expected, expected, BEYOND)
    left = limit[:, None] - occupied
    if buffer_room is not None:  # a new token is in full precision, even where the evicted one was coded
        left = torch.minimum(left, buffer_room)
    return int(left.amin())


def may_exceed_plan(expected_len: Sequence[int], budget: Sequence[int]) -> bool:
    """Whether a row may hold more tokens than it has slots for."""
    return any(expected < most for expected, most in zip(expected_len, budget, strict=True))


def slots_needed(expected_len: Sequence[int], budget: Sequence[int], held: Sequence[int], *, grows: bool) -> list[int]:
    """Slots to add per row before the next step; see `growth`. Free ones that the budget does not use come first.

    Args:
        expected_len: Tokens that each row has slots for.
        budget: The most tokens of each row.
        held: Tokens in each row's fullest head.
        grows: Whether generated tokens are kept in addition to the budget.
    """
    steps = growth(torch.tensor(held, device="cpu")).tolist()
    rows = zip(expected_len, budget, held, steps, strict=True)
    if grows:
        return [
            max(0, count + step - expected) if count >= min(limit, expected) else 0
            for expected, limit, count, step in rows
        ]
    return [min(step, limit - expected) if expected <= count < limit else 0 for expected, limit, count, step in rows]


def merge_expected(old: Sequence[int], new: Sequence[int], idle: Sequence[bool] | None) -> list[int]:
    """The larger expected length of each row; the old one for rows that are `idle`."""
    merged = [max(pair) for pair in zip(old, new, strict=True)]
    if idle is None:
        return merged
    return [kept if skip else found for kept, found, skip in zip(old, merged, idle, strict=True)]


UNLIMITED = math.inf
"""Free steps of a layer in which every step evicts a token in place."""


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


def fix_addresses(parts: list[State], varying: int = 2) -> None:
    """Tell the compiler what stays: addresses of tensors, and sizes that are the same for all caches of a model.

    CUDA graphs write only to tensors of static addresses, and copy all others. Unguarded, since a guard would recompile
    for every cache; a graph is recorded again when an address changes. Where vectors are as long as the code says,
    inductor need not reason about them: it compiles a step in half the time.

    Args:
        parts: The tensors, of which those with vectors are [B, H, slots, ...], or [B, pages, slots of a page, ...].
        varying: The dimension behind the rows that differs between caches: 2, or 1 for pages.
    """
    for part in parts:
        for tensor in tensors(part):
            torch._dynamo.mark_static_address(tensor, guard=False)  # pyright: ignore[reportPrivateUsage]
            if tensor.dim() > 2:
                same = [dim for dim in range(1, tensor.dim()) if dim != varying]
                torch._dynamo.mark_static(tensor, same)  # pyright: ignore[reportPrivateUsage]
