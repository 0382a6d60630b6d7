"""A selector's state: tensors [B, H, S], one entry per slot, in (nested) tuples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from kvpolicy.protocols import State


def map_state(fn: Callable[..., Tensor], *states: State) -> State:
    """Apply `fn` to matching tensors of states of one structure."""
    first: Any = states[0]
    if isinstance(first, Tensor):
        return fn(*states)
    parts = [map_state(fn, *matching) for matching in zip(*states, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)


def tensors(state: State) -> Iterator[Tensor]:
    """Every tensor of a state."""
    if isinstance(state, Tensor):
        yield state
    else:
        for part in state:
            yield from tensors(part)
