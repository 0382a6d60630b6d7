"""Placement of a prompt's tokens in the full-precision buffer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine.state import map_state, select_state, tensors
from kvpolicy.engine.token_batch import BEYOND, SlotData, TokenBatch


def first_slots(batch: TokenBatch, empty: Tensor, size: int) -> SlotData:
    """A batch, which is a copy and is changed, as the contents of the first slots of a buffer.

    Args:
        batch: At most `size` tokens of each head.
        empty: Which of the slots stay empty, [B, H, n] bool.
        size: Slots of the buffer; keys and values are padded to it, positions and state are not.
    """
    padding = (0, 0, 0, size - batch.positions.shape[-1])
    keys = batch.keys.masked_fill_(empty[..., None], 0)
    values = batch.values.masked_fill_(empty[..., None], 0)
    return SlotData(
        F.pad(keys, padding) if padding[-1] else keys,
        F.pad(values, padding) if padding[-1] else values,
        batch.positions.masked_fill(empty, -1),
        map_state(lambda t: t.masked_fill(empty, 0), batch.state),
    )


def slots_after(batch: TokenBatch, order: Tensor, moved: Tensor, start: Tensor | int, size: int) -> SlotData:
    """The tokens of a batch that were not demoted, by position, in the slots after the dictionary.

    Args:
        batch: The tokens.
        order: Their indices, first to leave first, [B, H, n].
        moved: How many of them were demoted, [B, H].
        start: The first slot after the dictionary of each row, [B, 1, 1] or 0.
        size: Slots of the buffer.
    """
    count = batch.chosen.sum(-1, keepdim=True)
    slot = torch.arange(size, device=order.device).expand(*order.shape[:2], -1)
    # Skip the demoted tokens, and sort the rest by position.
    index = order.gather(-1, (moved[..., None] + slot).clamp_max(order.shape[-1] - 1))
    left = moved[..., None] + slot < count
    positions = torch.where(left, batch.positions.gather(-1, index), BEYOND)
    index = index.gather(-1, positions.argsort(dim=-1, stable=True))
    # Shift them past the dictionary; the slots before `start` repeat a token, and are masked.
    rest = batch.take(index.gather(-1, (slot - start).clamp_min(0)))
    empty = ~((slot >= start) & (moved[..., None] + slot - start < count))
    return SlotData(
        rest.keys.masked_fill(empty[..., None], 0),
        rest.values.masked_fill(empty[..., None], 0),
        rest.positions.masked_fill(empty, -1),
        map_state(lambda t: t.masked_fill(empty, 0), rest.state),
    )


def with_dictionary(new: SlotData, held: SlotData, reserved: int, open_slots: Tensor) -> SlotData:
    """The contents of a buffer whose dictionary slots keep what they hold.

    Args:
        new: The contents, [B, H, E].
        held: Keys and values of the buffer before, and its positions and state.
        reserved: Dictionary slots; `held.keys` has at least so many.
        open_slots: Slots that are not dictionary slots, [B or 1, 1, E] bool.
    """
    padding = (0, 0, 0, new.keys.shape[2] - reserved)
    return SlotData(
        torch.where(open_slots[..., None], new.keys, F.pad(held.keys[:, :, :reserved], padding)),
        torch.where(open_slots[..., None], new.values, F.pad(held.values[:, :, :reserved], padding)),
        torch.where(open_slots, new.positions, held.positions),
        select_state(open_slots, new.state, held.state),
    )


def assign_first(target: Tensor, data: Tensor, rows: Tensor | None = None) -> None:
    """Write `data` [B, H, n] to the first slots of `target` [B, H, S], in `rows` [B, 1, 1] or in all."""
    first = target[..., : data.shape[-1]]
    first.copy_(data if rows is None else torch.where(rows, data, first))


def assign_first_state(target: object, data: object, rows: Tensor | None = None) -> None:
    """The same for every tensor of a selector's state."""
    for held, new in zip(tensors(target), tensors(data), strict=True):
        assign_first(held, new, rows)
