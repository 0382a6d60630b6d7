"""Taking back the newest tokens of a layer from which nothing was evicted.

Slot n of each head then holds its row's token n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.sizes import Sizes
from kvpolicy.engine.state import map_slots, slot_tensors
from kvpolicy.protocols import Layout
from kvpolicy.statistics.windows import ScoreTransform


def keeps_all(store: LayerStore) -> bool:
    """Whether every head holds every token of its row, in order."""
    tensors = store.tensors
    slot = torch.arange(tensors.positions.shape[-1], device=tensors.positions.device)
    length = tensors.length[:, None, None]
    return bool((tensors.positions == torch.where(slot < length, slot, -1)).all() & (length <= len(slot)).all())


def crop(store: LayerStore, columns: int, length: Tensor) -> None:
    """Leave a layer as it was after so many columns, which end no later than a prompt begins.

    Args:
        store: The layer, which keeps all of its tokens.
        columns: Columns to keep.
        length: Tokens of each row that these hold, [B] int64.
    """
    layer = store.contents
    tensors = store.tensors
    sizes = layer.sizes.back_to(columns)
    if sizes is not None:
        _truncate(store.contents, sizes)
    layer.set_columns(columns)
    tensors.length.copy_(length)
    slot = torch.arange(layer.layout.exact, device=tensors.positions.device)
    beyond = (slot >= tensors.length[:, None])[:, None]
    tensors.positions.masked_fill_(beyond, -1)
    for tensor in slot_tensors(tensors.state):
        tensor.masked_fill_(beyond, 0)
    for vectors in (tensors.keys, tensors.values):
        vectors.masked_fill_(beyond[..., None], 0)
    store.recount()
    store.geometry.fix_addresses()


def _truncate(layer: LayerContents, sizes: Sizes) -> None:
    """Truncate a layer to an earlier size."""
    tensors = layer.tensors
    layer.layout = Layout(sizes.exact)
    layer.capacity = sizes.capacity
    layer.expected_len = list(sizes.expected_len)
    tensors.keys = tensors.keys[:, :, : sizes.exact].clone()
    tensors.values = tensors.values[:, :, : sizes.exact].clone()
    tensors.positions = tensors.positions[..., : sizes.exact].clone()
    tensors.state = map_slots(lambda t: t[..., : sizes.exact].clone(), tensors.state)
    layer.set_budget(tensors.budget.new_tensor(sizes.budget))


def newest_tokens(store: LayerStore, length: Tensor, count: int, valid: Tensor | None) -> PendingPrompt:
    """The tokens behind the first `length` [B] of each row, as a prompt of `count` columns that was attended to.

    Args:
        store: The layer, which keeps all of its tokens.
        length: Tokens of each row before it.
        count: Its columns.
        valid: Which of these are not padding, [B, count] bool; None if all are.
    """
    tensors = store.tensors
    place = torch.arange(1, count + 1, device=length.device) if valid is None else valid.long().cumsum(-1)
    slots = (length[:, None] + place - 1).clamp_min(0)  # of padding, that of any token
    rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
    keys, values = (t.transpose(1, 2)[rows, slots].transpose(1, 2).contiguous() for t in (tensors.keys, tensors.values))
    return PendingPrompt(keys, values, valid, ScoreTransform(store.contents.scale))
