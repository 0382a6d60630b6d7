"""What a layer holds as plain tensors and numbers, taken from one store and put into another.

The tensors have names such as `keys`, `codes.0.key_scale` or `reads.index.high`. The numbers are those that a store
keeps on the host, as JSON can hold them. Together they make an equal store: every later step gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.state import map_state
from kvpolicy.engine.store import LayerStore
from kvpolicy.protocols import Ranks, State
from kvpolicy.spec.errors import KVPolicyError


class Snapshot(NamedTuple):
    """The content of a layer's store.

    Attributes:
        tensors: Its tensors by name; those of the store itself, not copies.
        numbers: What it keeps on the host.
    """

    tensors: dict[str, Tensor]
    numbers: dict[str, Any]


def take(store: LayerStore) -> Snapshot:
    """The content of a store that holds a prompt."""
    tensors = dict(pair for name, part in store.parts().items() for pair in named_tensors(part, name))
    shape = [store.length.shape[0], store.heads, store.keys.shape[-1]]
    return Snapshot(tensors, {"shape": shape, "group": store.group, **store.numbers()})


def put(store: LayerStore, snapshot: Snapshot, ranks: Ranks, dtype: torch.dtype, device: torch.device) -> None:
    """Fill an empty store with what another one with the same parts held.

    Args:
        store: The store.
        snapshot: The content; its tensors become the store's, unless they are on another device.
        ranks: The ranks that hold the layer's other heads.
        dtype: Dtype of keys and values.
        device: Device of the layer.

    Raises:
        KVPolicyError: If the content does not fit the parts of the store.
    """
    try:
        batch, heads, dim = snapshot.numbers["shape"]
        store.initialize(
            torch.empty(batch, heads, 0, dim, dtype=dtype, device=device), ranks, snapshot.numbers["group"]
        )
        store.set_numbers(snapshot.numbers)
        expected = store.empty_parts()
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise _damaged(f"numbers of layer {store.layer_idx} that do not fit ({error})") from error
    for name, part in expected.items():
        given = iter([_fitting(snapshot.tensors, path, like) for path, like in named_tensors(part, name)])

        def filled(_: Tensor, given: Iterator[Tensor] = given) -> Tensor:
            return next(given).to(device)

        store.set_part(name, map_state(filled, part))
    store.fix_addresses()


def named_tensors(state: State, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state, in the order of `map_state`, with dotted names that begin with `name`."""
    if isinstance(state, Tensor):
        yield name, state
        return
    fields: Any = getattr(state, "_fields", range(len(state)))
    for field, part in zip(fields, state, strict=True):
        yield from named_tensors(part, f"{name}.{field}")


def _fitting(tensors: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    found = tensors.get(name)
    if found is None:
        raise _damaged(f"no tensor {name}")
    if found.shape != like.shape or found.dtype != like.dtype:
        raise _damaged(f"{name} as {found.dtype} {list(found.shape)} instead of {like.dtype} {list(like.shape)}")
    return found


def _damaged(difference: str) -> KVPolicyError:
    return KVPolicyError(f"The content of a layer must fit the policy and the model, got {difference}; save it again.")
