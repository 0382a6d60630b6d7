"""A selector's state in (nested) tuples: one entry per slot, but for tensors that declare another scope; bytes by kind.

See `kvpolicy.protocols.scoped`. Tensors per head and per row stay where they are while slots are gathered, joined,
grown and written; what follows rows (`select_rows`, a beam) moves all tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from kvpolicy.protocols import HeadShape, Selector, State


def map_state(fn: Callable[[Tensor], Tensor], state: State) -> State:
    """Apply `fn` to every tensor of a state."""
    if isinstance(state, Tensor):
        return fn(state)
    return _rebuilt(state, [map_state(fn, part) for part in state])


def map_slots(fn: Callable[[Tensor], Tensor], state: State) -> State:
    """Apply `fn` to the tensors with one entry per slot; those per head and per row stay as they are."""
    if isinstance(state, Tensor):
        return fn(state)
    return _rebuilt(
        state,
        [map_slots(fn, part) if per_slot else part for part, per_slot in zip(state, _per_slot(state), strict=True)],
    )


def alloc_paged_state(
    selector: Selector, batch: int, heads: int, pages: int, size: int, device: torch.device | str, head: HeadShape
) -> State:
    """An empty state of a layer with pages: statistics of slots are [B, NB, P], others as without pages."""
    state = selector.alloc(batch, heads, 0, device, head)
    return map_slots(lambda t: t.new_zeros(batch, pages, size), state)


def tensors(state: State) -> Iterator[Tensor]:
    """Every tensor of a state."""
    if isinstance(state, Tensor):
        yield state
    else:
        for part in state:
            yield from tensors(part)


def fields(state: State, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a state with the name of its field, in the innermost tuple; `name` is that of a tensor alone."""
    if isinstance(state, Tensor):
        yield name, state
    else:
        for field, part in zip(getattr(state, "_fields", [""] * len(state)), state, strict=True):
            yield from fields(part, field)


def slot_tensors(state: State) -> Iterator[Tensor]:
    """The tensors of a state with one entry per slot."""
    if isinstance(state, Tensor):
        yield state
    else:
        for part, per_slot in zip(state, _per_slot(state), strict=True):
            if per_slot:
                yield from slot_tensors(part)


def join_states(first: State, second: State) -> State:
    """Concatenate two states along the slots; what is not per slot is that of the first."""
    following = slot_tensors(second)
    return map_slots(lambda t: torch.cat([t, next(following)], -1), first)


def select_state(mask: Tensor, chosen: State, other: State) -> State:
    """A state with the slots of `chosen` where `mask` is set, else of `other`; other tensors are those of `chosen`."""
    others = slot_tensors(other)
    return map_slots(lambda t: torch.where(mask, t, next(others)), chosen)


def select_rows(mask: Tensor, chosen: State, other: State) -> State:
    """A state, all scopes of it, that is `chosen` in the rows of `mask` [B], else `other`."""
    others = tensors(other)
    return map_state(lambda t: torch.where(mask.view(-1, *[1] * (t.dim() - 1)), t, next(others)), chosen)


def empty_slots(state: State, slots: int) -> State:
    """A state of zeros for `slots` slots of the heads of another state; what is not per slot is that of the other."""
    return map_slots(lambda t: t.new_zeros(*t.shape[:2], slots), state)


def carry_over(target: Tensor, held: Tensor) -> None:
    """Copy a tensor to one of the same shape, or to the beginning of one with more entries in the third dimension."""
    if target.shape == held.shape:
        target.copy_(held)
    elif target.dim() > 2 and target[:, :, :0].shape == held[:, :, :0].shape and target.shape[2] > held.shape[2]:
        target[:, :, : held.shape[2]] = held


def map_numbers(fn: Callable[[Tensor], Tensor], numbers: list[int]) -> list[int]:
    """Select or repeat numbers of rows that are held on the host, one for each row, as `fn` does with tensors."""
    return fn(torch.tensor(numbers, device="cpu")).tolist()


def owned(t: Tensor) -> Tensor:
    """A tensor in memory of its own, so that it does not keep a larger one alive; itself if it is."""
    return t if t.untyped_storage().nbytes() == t.nbytes else t.clone()


def _rebuilt(state: State, parts: list[Any]) -> State:
    kind: Any = type(state)
    return kind(*parts) if hasattr(kind, "_fields") else tuple(parts)


def _per_slot(state: State) -> list[bool]:
    """Which parts of a tuple have, or contain, one entry per slot."""
    kind: Any = type(state)
    scopes: dict[str, str] = getattr(kind, "scopes", {})
    return [name not in scopes for name in kind._fields] if scopes else [True] * len(state)


HOST = "host"
"""The kind of the bytes of keys and values in host memory."""


def bytes_by_kind(
    exact: Iterable[Tensor],
    codes: Iterable[Any],
    positions: Tensor,
    state: Any,
    counters: Iterable[Tensor],
    merged: Any = (),
    reads: Any = (),
) -> dict[str, int]:
    """Bytes of one layer's tensors: exact, codes, scales, positions, statistics, index, counters, and counts if any.

    Args:
        exact: Keys and values in full precision.
        codes: The codes of each stage, (nested) NamedTuples; the names of their fields tell scales and zero points.
        positions: Positions of the slots.
        state: The selector's state.
        counters: Lengths, budgets and limits of the rows.
        merged: The counts of the slots, and the merger's state.
        reads: The `ReadState` of a layer that may read less than everything.
    """
    kinds = {"exact": sum(t.nbytes for t in exact), "codes": 0, "scales": 0}
    for stage in codes:
        for name, tensor in fields(stage):
            kinds["scales" if "scale" in name or "zero" in name else "codes"] += tensor.nbytes
    kinds["positions"] = positions.nbytes
    kinds["statistics"] = sum(t.nbytes for t in tensors(state))
    kinds["index"] = sum(t.nbytes for t in tensors(reads))
    kinds["counters"] = sum(t.nbytes for t in counters)
    if counts := sum(t.nbytes for t in tensors(merged)):
        kinds["counts"] = counts
    return kinds
