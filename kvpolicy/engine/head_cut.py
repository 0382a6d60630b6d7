"""A snapshot of some KV heads of a layer, cut out of one of all heads.

Which dimension of a tensor counts heads or pages follows from the sizes that a store allocates for more and for fewer
of them, so that no method is asked. A tensor of the same size for all heads and for some is what they have in common.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.pages import buffer_pages, paged_layout
from kvpolicy.engine.snapshot import Snapshot, damaged, parts_in_file, reading_numbers
from kvpolicy.protocols import LayerShape, Layout
from kvpolicy.text.errors import KVPolicyError


class Heads(NamedTuple):
    """Some KV heads of a layer.

    Attributes:
        first: The first one.
        number: How many.
        group: Query heads of each of them.
    """

    first: int
    number: int
    group: int


def cut(store: LayerStore, snapshot: Snapshot, heads: Heads) -> Snapshot:
    """The content of some heads of a layer.

    Args:
        store: A store that `snapshot.begin` has given the sizes of this snapshot.
        snapshot: The content of all heads.
        heads: Those that are wanted.

    Raises:
        KVPolicyError: If a tensor mixes heads, or the content does not fit the parts of the store.
    """
    batch, _, dim = snapshot.numbers["shape"]
    numbers = {**snapshot.numbers, "shape": [batch, heads.number, dim], "group": heads.group}
    whole = _shapes(store, store.shape)
    for name, size in whole.items():
        found = snapshot.tensors.get(name)
        if found is None and name.startswith("limits."):
            continue  # of an earlier version, which did not write it
        if found is None or found.shape != size:
            raise damaged(f"{name} of {'no size' if found is None else [*found.shape]} instead of {[*size]}")
    if store.spec.heads is None:
        part = _shapes(store, _shape_of(store, heads))
        return Snapshot(_cut_heads(store, snapshot, whole, part, heads), numbers)
    return _cut_pages(store, snapshot._replace(numbers=numbers), whole, heads)


class _Pages(NamedTuple):
    """Pages that belong to some heads, [B, n] each.

    Attributes:
        page: The pages.
        used: Whether a head owns the page; else it fills the row.
    """

    page: Tensor
    used: Tensor

    def of(self, t: Tensor) -> Tensor:
        """The pages of a tensor, [B, NB, ...] -> [B, n, ...]."""
        rows = torch.arange(t.shape[0], device=t.device)[:, None]
        return t[rows, self.page.to(t.device)]


def _cut_pages(store: LayerStore, snapshot: Snapshot, whole: dict[str, torch.Size], heads: Heads) -> Snapshot:
    """The content of a layer whose slots are pages, each of which belongs to one head."""
    number, size = snapshot.numbers["pages"]
    buffer = store.layout.exact if store.spec.stages else 0
    each = buffer_pages(buffer, size)  # behind the pages that the heads share
    shared = number - store.shape.heads * each
    owner = snapshot.tensors["owner"]
    pages = _owned(owner[:, :shared], heads)
    first = shared + heads.first * each
    buffers = torch.arange(first, first + heads.number * each, device="cpu").expand(len(owner), -1)
    every = _Pages(torch.cat([pages.page, buffers], 1), torch.cat([pages.used, torch.ones_like(buffers).bool()], 1))

    fewer = number - (store.shape.heads - heads.number) * each
    own = _shape_of(store, heads)
    part = _shapes(store, own, snapshot.numbers | {"pages": [fewer, size]})
    more = _shapes(store, own, snapshot.numbers | {"pages": [fewer + 1, size]})
    paged = {name: every if whole[name][1] == number else pages for name in part if part[name] != more[name]}
    tensors = {name: chosen.of(snapshot.tensors[name]) for name, chosen in paged.items()}
    tensors["owner"] = torch.where(every.used, tensors["owner"] - heads.first, heads.number)
    tensors["positions"] = tensors["positions"].masked_fill(~every.used[..., None], -1)
    others = {name: shape for name, shape in whole.items() if name not in paged}
    left = pages.page.shape[1]
    numbers = snapshot.numbers | {"pages": [left + heads.number * each, size]}
    layout = paged_layout(buffer, left, size, heads.number)
    layout = layout if store.spec.stages else Layout(sum(layout.coded))
    numbers["layout"] = [layout.exact, [*layout.coded]]
    return Snapshot(tensors | _cut_heads(store, snapshot, others, part, heads), numbers)


def _owned(owner: Tensor, heads: Heads) -> _Pages:
    """The pages of some heads in their order, and in rows that have fewer than others any ones behind them."""
    mine = (owner >= heads.first) & (owner < heads.first + heads.number)
    count = mine.sum(-1)
    index = (~mine).to(torch.uint8).argsort(dim=-1, stable=True)[:, : int(count.max())]
    return _Pages(index, torch.arange(index.shape[1], device="cpu") < count[:, None])


def _cut_heads(
    store: LayerStore, snapshot: Snapshot, whole: dict[str, torch.Size], part: dict[str, torch.Size], heads: Heads
) -> dict[str, Tensor]:
    """Some tensors of a layer, of which each has one dimension of heads, or none."""
    found: dict[str, Tensor] = {}
    for name, size in whole.items():
        if name not in snapshot.tensors:
            continue
        tensor = snapshot.tensors[name]
        pairs = [*zip(size, part[name], strict=True)]
        differ = [dim for dim, (whole_size, own) in enumerate(pairs) if whole_size != own]
        if not differ:
            found[name] = tensor
            continue
        if len(differ) > 1 or pairs[differ[0]] != (store.shape.heads, heads.number):
            raise KVPolicyError(
                f"A saved cache must hold every KV head by itself to be divided among ranks, got {name} of layer "
                f"{store.layer_idx}, which mixes them; try saving it on these ranks."
            )
        # A tensor of its own, since the rest of the file is not needed.
        found[name] = tensor.narrow(differ[0], heads.first, heads.number).clone(memory_format=torch.contiguous_format)
    return found


def _shape_of(store: LayerStore, heads: Heads) -> LayerShape:
    """The shape of the layer with some of its heads."""
    return store.shape._replace(heads=heads.number, group=heads.group)


def _shapes(store: LayerStore, shape: LayerShape, numbers: dict[str, Any] | None = None) -> dict[str, torch.Size]:
    """The size of every tensor of a layer of this shape, by its name in files; `numbers` replace the store's."""
    with reading_numbers(store):
        if numbers is not None:
            store.geometry.set_numbers(numbers)
        parts = store.geometry.alloc(len(store.tensors.length), shape, torch.device("meta")).parts()
    return {path: tensor.shape for name, part in parts.items() for path, tensor in parts_in_file(store, part, name)}
