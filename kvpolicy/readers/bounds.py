"""The largest and the smallest number of each key channel in pages of tokens, which bound products with their keys."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvpolicy.kernels.slot_writes import flat_slots, write_slots
from kvpolicy.protocols import ALONE, Changed, SlotAccess, StepMemo
from kvpolicy.readers.common import TokenReader


class PageBounds(NamedTuple):
    """The bounds of one layer.

    Attributes:
        bounds: Elementwise maximum of the keys of each page, then their minimum, [B, H, X, 2 * D] in the dtype of the
            keys; 0 for a page without a token.
    """

    bounds: Tensor


class BoundsReader(TokenReader, Protocol):
    """A reader whose index has bounds of the keys of each page."""

    __slots__ = ()

    def alloc(
        self, batch: int, heads: int, entries: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> PageBounds:
        return PageBounds(torch.zeros(batch, heads, entries, 2 * head_dim, dtype=dtype, device=device))

    def update(self, index: PageBounds, slots: SlotAccess, changed: Changed) -> None:
        """Compute the bounds of pages that were written; what is known of their slots is shared by the layers."""
        if changed.emptied is not None:  # what the bounds say of an empty slot is never read
            return
        for entries in slots.tiles(changed.entries):
            at, occupied = slots.of_entries(entries)
            keys = slots.keys(at).unflatten(2, occupied.shape[2:])
            _refresh(index, entries, keys, occupied, slots.memo)

    def refresh(self, index: PageBounds, entries: Tensor, keys: Tensor, occupied: Tensor) -> None:
        """Compute the bounds of some pages from their keys; see `Reader.refresh`."""
        _refresh(index, entries, keys, occupied, ALONE)


def _refresh(index: PageBounds, entries: Tensor, keys: Tensor, occupied: Tensor, memo: StepMemo) -> None:
    empty = memo.once(torch.logical_not, occupied)[..., None]
    largest = keys.masked_fill(empty, -torch.inf).amax(3)
    smallest = keys.masked_fill(empty, torch.inf).amin(3)
    # The bounds of a page without a token would be infinite, and 0 times inf is NaN.
    bounds = torch.cat([largest, smallest], -1).masked_fill(memo.once(_without_token, occupied), 0)
    pages = memo.once(flat_slots, entries, index.bounds.shape[2], memo.once)
    write_slots(index.bounds, entries, bounds.to(index.bounds.dtype), pages)


def _without_token(occupied: Tensor) -> Tensor:
    """Which pages [B, H, n] hold no token, by which slots do, [B, H, n, 1] bool."""
    return ~occupied.any(-1, keepdim=True)
