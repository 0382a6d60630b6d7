"""Taking back the newest tokens of a layer from which nothing was evicted.

Slot n of each head then holds its row's token n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.engine.attention import ScoreTransform
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.state import slot_tensors
from kvpolicy.engine.store import LayerStore


def keeps_all(store: LayerStore) -> bool:
    """Whether every head holds every token of its row, in order."""
    slot = torch.arange(store.positions.shape[-1], device=store.positions.device)
    length = store.length[:, None, None]
    return bool((store.positions == torch.where(slot < length, slot, -1)).all() & (length <= len(slot)).all())


def crop(store: LayerStore, columns: int, length: Tensor) -> None:
    """Leave a layer as it was after so many columns, which end no later than a prompt begins.

    Args:
        store: The layer, which keeps all of its tokens.
        columns: Columns to keep.
        length: Tokens of each row that these hold, [B] int64.
    """
    sizes = store.sizes.back_to(columns)
    if sizes is not None:
        store.truncate(sizes)
    store.columns.fill_(columns)
    store.length.copy_(length)
    slot = torch.arange(store.layout.exact, device=store.positions.device)
    beyond = (slot >= store.length[:, None])[:, None]
    store.positions.masked_fill_(beyond, -1)
    for tensor in slot_tensors(store.state):
        tensor.masked_fill_(beyond, 0)
    for vectors in (store.keys, store.values):
        vectors.masked_fill_(beyond[..., None], 0)
    store.recount()
    store.fix_addresses()


def newest_tokens(store: LayerStore, length: Tensor, count: int, valid: Tensor | None) -> PendingPrompt:
    """The tokens behind the first `length` [B] of each row, as a prompt of `count` columns that was attended to.

    Args:
        store: The layer, which keeps all of its tokens.
        length: Tokens of each row before it.
        count: Its columns.
        valid: Which of these are not padding, [B, count] bool; None if all are.
    """
    place = torch.arange(1, count + 1, device=length.device) if valid is None else valid.long().cumsum(-1)
    slots = (length[:, None] + place - 1).clamp_min(0)  # of padding, that of any token
    rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
    keys, values = (t.transpose(1, 2)[rows, slots].transpose(1, 2).contiguous() for t in (store.keys, store.values))
    return PendingPrompt(keys, values, valid, ScoreTransform(store.scale))
