"""Snapshot of a layer: plain tensors and numbers, taken from one store and put into another.

The tensors have names such as `keys`, `codes.0.key_scale` or `reads.index.high`. The numbers are those that a store
keeps on the host, as JSON can hold them. Together they make an equal store: every later step gives the same bits.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.layer_tensors import HOST_PARTS
from kvpolicy.engine.state import map_state
from kvpolicy.protocols import Ranks, State
from kvpolicy.text.errors import KVPolicyError

MOST_CAPACITY = 2
"""Tokens that a layer was made for, for each of its slots: pages are fewer by rounding."""


ALWAYS_IN_FILES = ("limits.query_absmax", "limits.query_square")
"""Tensors that a file has for every codec with stages, empty where they are not kept, as in earlier versions."""


class Snapshot(NamedTuple):
    """The content of a layer's store.

    Attributes:
        tensors: Its tensors by name; those of the store itself, not copies.
        numbers: Its numbers on the host.
    """

    tensors: dict[str, Tensor]
    numbers: dict[str, Any]


def take(store: LayerStore) -> Snapshot:
    """The content of a store that holds a prompt."""
    layer = store.contents
    tensors = dict(pair for name, part in store.tensors.parts().items() for pair in parts_in_file(store, part, name))
    batch = store.tensors.length.shape[0]
    heads = layer.shape.heads
    dim = store.tensors.keys.shape[-1]
    if store.tensors.limits is not None:
        none = torch.empty(0, heads, dim, dtype=torch.float32, device=store.tensors.device)
        tensors = {name: none for name in ALWAYS_IN_FILES} | tensors
    return Snapshot(tensors, {"shape": [batch, heads, dim], "group": layer.shape.group, **store.geometry.numbers()})


def put(store: LayerStore, snapshot: Snapshot, ranks: Ranks, dtype: torch.dtype, device: torch.device) -> None:
    """Fill an empty store with the content of another one with the same parts.

    Args:
        store: The store.
        snapshot: The content, which is copied: tensors that lie in a file begin at any byte, and sums over memory that
            is not aligned round otherwise.
        ranks: The ranks that hold the layer's other heads.
        dtype: Dtype of keys and values.
        device: Device of the layer.

    Raises:
        KVPolicyError: If the content does not fit the parts of the store.
    """
    pins = snapshot.tensors.get("limits.pins")
    if store.spec.stages and (pins is None or pins.shape[-1] != store.spec.codec_traits.pinned):
        raise damaged("another number of pinned tokens")  # it is allocated below, and the policy is that of a file
    begin(store, snapshot, ranks, dtype, device)
    with reading_numbers(store):
        expected = store.geometry.alloc(len(store.tensors.length), store.shape, torch.device("meta")).parts()
    for name, part in expected.items():
        given = iter([_fitting(snapshot.tensors, path, like) for path, like in parts_in_file(store, part, name)])

        own = torch.device("cpu") if store.tensors.host and name in HOST_PARTS else device

        def filled(_: Tensor, given: Iterator[Tensor] = given, own: torch.device = own) -> Tensor:
            return next(given).to(own, copy=True)

        store.tensors.set_part(name, map_state(filled, part))
    store.contents.forget_columns()
    store.geometry.fix_addresses()
    store.contents.note_slots()
    _check_numbers(store)


def begin(store: LayerStore, snapshot: Snapshot, ranks: Ranks, dtype: torch.dtype, device: torch.device) -> None:
    """Give an empty store the sizes of a snapshot, without its tensors; see `put`.

    Raises:
        KVPolicyError: If the numbers do not fit the parts of the store.
    """
    with reading_numbers(store):
        batch, heads, dim = snapshot.numbers["shape"]
        keys = torch.empty(batch, heads, 0, dim, dtype=dtype, device=device)
        store.initialize(keys, ranks, snapshot.numbers["group"], snapshot.tensors["values"].shape[-1])
        store.geometry.set_numbers(snapshot.numbers)


@contextmanager
def reading_numbers(store: LayerStore) -> Generator[None]:
    """Say of what fails meanwhile that the numbers of a snapshot do not fit."""
    try:
        yield
    except (KeyError, TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise damaged(f"numbers of layer {store.layer_idx} that do not fit ({error})") from error


def _check_numbers(store: LayerStore) -> None:
    """Refuse numbers that would let later steps lose tokens, or allocate more than the layer holds."""
    layer = store.contents
    slots = layer.layout.slots
    number = f"of layer {store.layer_idx} that its tensors do not have"
    if layer.layout != store.geometry.find_layout():
        raise damaged(f"the layout {number}")
    # Of budgets by head, another rank may have nearly all pages.
    elsewhere = store.spec.heads is not None and layer.ranks.size > 1
    most = max(slots, layer.columns) if elsewhere else slots
    if not max(layer.expected_len, default=0) <= layer.capacity <= MOST_CAPACITY * most:
        raise damaged(f"the capacity {number}")
    if layer.reserved > layer.layout.exact:
        raise damaged(f"reserved slots {number}")
    if layer.largest_block > max(slots, store.spec.codec_traits.block):
        raise damaged(f"a block {number}")
    if not (layer.schedule.is_started or store.spec.heads is not None):
        raise damaged(f"no steps of layer {store.layer_idx} until slots are ranked again")
    if layer.free_steps > store.geometry.count_free_steps():
        raise damaged(f"free steps {number}")
    length = layer.tensors.length.view(-1, 1, 1)
    positions = layer.tensors.positions
    if bool(((positions < -1) | (positions >= length)).any()):
        raise damaged(f"positions in layer {store.layer_idx} of tokens that its rows have not seen")
    pages = layer.tensors.pages
    if pages is not None and bool(((pages.owner < 0) | (pages.owner > layer.shape.heads)).any()):
        raise damaged(f"pages in layer {store.layer_idx} of heads that it does not have")


def parts_in_file(store: LayerStore, part: State, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a part with their names in files, which a codec's statistics have chosen themselves."""
    kept = enumerate(store.spec.codec_statistics)
    names = {f"limits.statistics.{number}": f"limits.{each.file_name}" for number, each in kept if each.file_name}
    for path, tensor in named_tensors(part, name):
        yield names.get(path, path), tensor


def named_tensors(state: State, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state, in the order of `map_state`, with dotted names that begin with `name`."""
    if isinstance(state, Tensor):
        yield name, state
        return
    fields: Any = getattr(state, "_fields", range(len(state)))
    for field, part in zip(fields, state, strict=True):
        yield from named_tensors(part, f"{name}.{field}")


def below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors with names that begin with `prefix`; it is removed from their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _fitting(tensors: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    found = tensors.get(name)
    if found is None and name.startswith("limits.") and not like.numel():
        return torch.empty_like(like, device="cpu")  # of a codec without it, in a file of an earlier version
    if found is None:
        raise damaged(f"no tensor {name}")
    if found.shape != like.shape or found.dtype != like.dtype:
        raise damaged(f"{name} as {found.dtype} {list(found.shape)} instead of {like.dtype} {list(like.shape)}")
    return found


def damaged(difference: str) -> KVPolicyError:
    """The error for a content that does not fit, by what differs."""
    return KVPolicyError(f"The content of a layer must fit the policy and the model, got {difference}; save it again.")
