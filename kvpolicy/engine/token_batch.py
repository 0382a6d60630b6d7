"""Tokens in full precision that must find a slot, and their placement in the full-precision buffer."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine.state import map_slots, map_state, select_state, slot_tensors
from kvpolicy.protocols import State

BEYOND = torch.iinfo(torch.int32).max
"""Later than any position, and more than any count of tokens."""


class SlotData(NamedTuple):
    """Data that is written to slots.

    Attributes:
        keys: [B, H, n, D].
        values: [B, H, n, D].
        positions: [B, H, n] int32.
        state: The selector's state.
        counts: Logarithm of the number of tokens that each one stands for, [B, H, n] fp32; () if it is always one.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    state: State
    counts: State = ()


class TokenBatch(NamedTuple):
    """Tokens of each head, with their positions and the selector's state.

    Attributes:
        keys: [B, H, n, D].
        values: [B, H, n, D].
        positions: [B, H, n] int32.
        state: The selector's state, tensors of [B, H, n].
        chosen: Which tokens are kept, [B, H, n] bool; the others are ignored.
        counts: Logarithm of the number of tokens that each one stands for, [B, H, n] fp32; () if it is always one.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    state: State
    chosen: Tensor
    counts: State = ()

    @property
    def data(self) -> SlotData:
        """The tokens without the choice."""
        return SlotData(self.keys, self.values, self.positions, self.state, self.counts)

    def take(self, index: Tensor) -> TokenBatch:
        """Tokens `index` [B, H, m] of each head."""
        rows = torch.arange(index.shape[0], device=index.device)
        heads = torch.arange(index.shape[1], device=index.device)
        # Indexing copies whole vectors, which is twice as fast as gathering single numbers.
        vectors = rows[:, None, None], heads[:, None], index
        return TokenBatch(
            self.keys[vectors],
            self.values[vectors],
            self.positions.gather(-1, index),
            map_slots(lambda t: t.gather(-1, index), self.state),
            self.chosen.gather(-1, index),
            map_state(lambda t: t.gather(-1, index), self.counts),
        )

    def take_order(self, index: Tensor) -> TokenBatch:
        """The same as `take`, without a copy where every head's index is one range, as of a prompt without padding."""
        start = int(index[0, 0, 0]) if index.numel() else 0
        size = index.shape[-1]
        if bool((index == torch.arange(start, start + size, device=index.device)).all()):
            return self.window(start, size)
        return self.take(index)

    def window(self, start: int, size: int) -> TokenBatch:
        """Tokens `start` to `start + size` of each head; the last one is repeated if there are fewer.

        They are not copied if there are as many.
        """
        if start + size <= self.positions.shape[-1]:
            at = slice(start, start + size)
            return TokenBatch(
                self.keys[:, :, at],
                self.values[:, :, at],
                self.positions[..., at],
                map_slots(lambda t: t[..., at], self.state),
                self.chosen[..., at],
                map_state(lambda t: t[..., at], self.counts),
            )
        index = torch.arange(start, start + size, device=self.positions.device)
        index = index.expand(*self.positions.shape[:2], -1).clamp_max(self.positions.shape[-1] - 1)
        return self.take(index)

    def by_position(self) -> Tensor:
        """The index of each token by ascending position, [B, H, n]; tokens that are not chosen come last."""
        return torch.where(self.chosen, self.positions, BEYOND).argsort(dim=-1, stable=True)

    def trimmed(self) -> TokenBatch:
        """The same by ascending position, cut to the largest number of chosen tokens of any head."""
        most = max(int(self.chosen.sum(-1).max()), 1)
        return self.take_order(self.by_position()[..., :most])

    def front(self, width: int) -> TokenBatch:
        """The chosen tokens first, in their order, cut to `width`, which must be enough for them."""
        index = (~self.chosen).int().argsort(dim=-1, stable=True)[..., :width]
        return self.take(index)


def first_slots(batch: TokenBatch, empty: Tensor, size: int) -> SlotData:
    """A batch, which is a copy and is changed, as the contents of the first slots of a buffer.

    Args:
        batch: At most `size` tokens of each head.
        empty: Which of the slots stay empty, [B, H, n] bool.
        size: Slots of the buffer; keys and values are padded to it, positions and state are not.
    """
    padding = (0, 0, 0, size - batch.positions.shape[-1])
    # The tokens in empty slots may be padding with arbitrary numbers. Attention gives these slots a weight of 0,
    # and 0 times inf or NaN would be NaN.
    keys = batch.keys.masked_fill_(empty[..., None], 0)
    values = batch.values.masked_fill_(empty[..., None], 0)
    return SlotData(
        F.pad(keys, padding) if padding[-1] else keys,
        F.pad(values, padding) if padding[-1] else values,
        batch.positions.masked_fill(empty, -1),
        map_slots(lambda t: t.masked_fill(empty, 0), batch.state),
        map_state(lambda t: t.masked_fill(empty, 0), batch.counts),
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
        map_slots(lambda t: t.masked_fill(empty, 0), rest.state),
        map_state(lambda t: t.masked_fill(empty, 0), rest.counts),
    )


def with_dictionary(new: SlotData, held: SlotData, reserved: int, open_slots: Tensor) -> SlotData:
    """The contents of a buffer that keeps its dictionary slots.

    Args:
        new: The contents, [B, H, E].
        held: Keys and values of the buffer before, and its positions, state and counts.
        reserved: Dictionary slots; `held.keys` has at least so many.
        open_slots: Slots that are not dictionary slots, [B or 1, 1, E] bool.
    """
    padding = (0, 0, 0, new.keys.shape[2] - reserved)
    return SlotData(
        torch.where(open_slots[..., None], new.keys, F.pad(held.keys[:, :, :reserved], padding)),
        torch.where(open_slots[..., None], new.values, F.pad(held.values[:, :, :reserved], padding)),
        torch.where(open_slots, new.positions, held.positions),
        select_state(open_slots, new.state, held.state),
        select_state(open_slots, new.counts, held.counts),
    )


def assign_first(target: Tensor, data: Tensor, rows: Tensor | None = None) -> None:
    """Write `data` [B, H, n] to the first slots of `target` [B, H, S], in `rows` [B, 1, 1] or in all."""
    first = target[..., : data.shape[-1]]
    first.copy_(data if rows is None else torch.where(rows, data, first))


def assign_first_state(target: object, data: object, rows: Tensor | None = None) -> None:
    """The same for every tensor of a state that is per slot."""
    for held, new in zip(slot_tensors(target), slot_tensors(data), strict=True):
        assign_first(held, new, rows)
