"""A selector's state: tensors [B, H, S], one entry per slot, in (nested) tuples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kvpolicy.protocols import State


def map_state(fn: Callable[[Tensor], Tensor], state: State) -> State:
    """Apply `fn` to every tensor of a state."""
    if isinstance(state, Tensor):
        return fn(state)
    parts = [map_state(fn, part) for part in state]
    kind: Any = type(state)
    return kind(*parts) if hasattr(kind, "_fields") else tuple(parts)


def tensors(state: State) -> Iterator[Tensor]:
    """Every tensor of a state."""
    if isinstance(state, Tensor):
        yield state
    else:
        for part in state:
            yield from tensors(part)


def join_states(first: State, second: State) -> State:
    """Concatenate two states along the slots."""
    following = tensors(second)
    return map_state(lambda t: torch.cat([t, next(following)], -1), first)


def select_state(mask: Tensor, chosen: State, other: State) -> State:
    """A state that is `chosen` where `mask` is set, else `other`."""
    others = tensors(other)
    return map_state(lambda t: torch.where(mask, t, next(others)), chosen)
