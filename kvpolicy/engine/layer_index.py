"""The index of a layer's reader: when it is made, and that it follows the slots."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.layer_slots import LayerSlots
from kvpolicy.engine.layer_tensors import alloc_index
from kvpolicy.engine.reading import (
    Board,
    ReadShape,
    channel_salience,
    choice_size,
    chooses,
    entries_of,
    read_shape,
    row_entries,
)
from kvpolicy.engine.slot_codes import SlotCodes
from kvpolicy.engine.state import carry_over, map_slots, slot_tensors
from kvpolicy.engine.state import tensors as all_tensors
from kvpolicy.engine.token_batch import BEYOND
from kvpolicy.protocols import Changed
from kvpolicy.statistics.channel_sums import AbsoluteSums


class LayerIndex:
    """Keeps the index by which a layer's reader chooses the slots of a step.

    If the reader reads all slots, there is no index.

    Attributes:
        shape: Read plan of a decode step; None for all slots.
        board: Where a layer that chooses shows its choice; None unless layers of the cache follow others.
        same_slots: Whether the layer holds the same tokens in the same slots as the one that chooses for it.
        is_current: Whether the index is kept up to date; while a prompt is placed, entries wait until all slots are
            written.
    """

    def __init__(self, layer: LayerContents, codes: SlotCodes) -> None:
        """Index the slots of `layer`, whose coded ones `codes` reads."""
        self._layer = layer
        self._codes = codes
        self._spec = layer.spec
        self._reader = layer.spec.reader
        fitted = layer.spec.reader_traits.fitted
        self._fitted = fitted if chooses(self._reader, layer.spec.layer_idx) else None
        self.shape: ReadShape | None = None
        self.board: Board | None = None
        self.same_slots = False
        self.is_current = False

    def rebuild(
        self, first: Tensor | None = None, salience: Tensor | None = None, placed: Tensor | None = None
    ) -> None:
        """Make the index fit the layout, and compute every entry.

        Args:
            first: Rows that had their first prompt, [B] bool; None if no row had.
            salience: The salience of the channels of that prompt, [B, H, D], if the reader needs it.
            placed: Rows that had a prompt, [B] bool, or None: there, what is fitted to keys is found again.
        """
        layer = self._layer
        tensors = layer.tensors
        if not tensors.reads:
            return
        shape = self._find_shape()
        shown = choice_size(self._reader, self._spec.codec, layer.layout, self._spec.layer_idx)
        held = tensors.reads.choice.slots.shape[-1] if tensors.reads.choice else 0
        if shape != self.shape or shown != held:
            self.shape = shape
            old = tensors.reads
            tensors.reads = alloc_index(self._spec, tensors.keys.shape[0], layer.shape, layer.layout, tensors.device)
            # What was fitted to prompts, such as channels or clusters, is carried over.
            for new, fitted in zip(all_tensors(tensors.reads), all_tensors(old), strict=True):
                carry_over(new, fitted)
        if first is not None and salience is not None and tensors.reads.index:
            self._reader.fit(tensors.reads.index, salience, first)
        self.is_current = True
        # Also where this layer reads everything: one behind it that has more slots may still follow its choice.
        self.show()
        if shape is not None:
            self.same_slots = shape.followed > 0 and self._holds_the_same()
            self.set_limit()
            self.fill(placed)

    def fill(self, placed: Tensor | None = None) -> None:
        """Compute every entry of the index; `placed` as in `rebuild`."""
        self._update(Changed(placed=placed))

    def _update(self, changed: Changed) -> None:
        reads = self._layer.tensors.reads
        if self.shape is not None and reads and reads.index:
            self._reader.update(reads.index, LayerSlots(self._layer, self._codes, self.shape), changed)

    def complete(self) -> None:
        """Make the index again if a row lacks a part that is fitted to it, after the layer was given more slots."""
        if self.shape is not None and self._is_missing(self.shape, 0):
            self.rebuild()

    def _is_missing(self, shape: ReadShape, steps: int) -> bool:
        reads = self._layer.tensors.reads
        if self._fitted is None or not reads:  # without waiting for the device
            return False
        return self._fitted.is_missing(reads.index, LayerSlots(self._layer, self._codes, shape), steps)

    def show(self) -> None:
        """Show the layers behind this one where its choice and its positions are; they may be new tensors."""
        tensors = self._layer.tensors
        if self.board is not None and tensors.reads and tensors.reads.choice:
            self.board.choice = tensors.reads.choice
            self.board.positions = tensors.positions

    def _holds_the_same(self) -> bool:
        """Whether this layer and the one that chooses for it hold the same tokens in the same slots, and will.

        Tokens that a selector keeps for their position alone are the same in every layer from then on.
        """
        shown = None if self.board is None else self.board.positions
        return not self._spec.statistics and shown is not None and torch.equal(shown, self._layer.tensors.positions)

    def fit_layout(self) -> None:
        """Set the read plan to that of the layout."""
        self.shape = self._find_shape()

    def _find_shape(self) -> ReadShape | None:
        return read_shape(self._reader, self._spec.codec, self._layer.layout, self._spec.layer_idx)

    def set_limit(self) -> None:
        """Let each row read as many entries as it would alone, of the slots that it has."""
        reads = self._layer.tensors.reads
        if self.shape is not None and reads:
            rows = row_entries(self._reader, self._spec.codec, self.shape, self._layer.expected_len)
            reads.limit.copy_(reads.limit.new_tensor(rows))

    def numbers(self) -> list[Any]:
        """The numbers of the index on the host, as JSON values."""
        return [self.same_slots, self.is_current, self._layer.steps_unsorted]

    def set_numbers(self, numbers: list[Any]) -> None:
        """Restore the result of `numbers`, after the layout was set."""
        self.same_slots, self.is_current, self._layer.steps_unsorted = numbers
        self.fit_layout()

    def prompt_salience(self, sums: AbsoluteSums | None, count: Tensor) -> Tensor | None:
        """The salience of the channels in a prompt of `count` [B] tokens, [B, H, D] fp32, if the reader needs it."""
        layer, tensors = self._layer, self._layer.tensors
        if sums is not None:
            return channel_salience(sums, count, layer.ranks)
        salience = self._spec.reader_traits.salience
        if salience is None or not (tensors.reads and tensors.reads.index):
            return None
        loaded = salience.load_salience(self._spec.layer_idx, layer.ranks.held)
        return loaded.to(count.device).expand(count.shape[0], -1, -1)

    def refresh_slots(self, slots: Tensor, stage: int | None, emptied: bool = False) -> None:
        """Recompute the entries of slots [B, H, n] of the layer that were written or emptied.

        Args:
            slots: The slots, counted from the first one of the layer.
            stage: Their stage; None for slots of the full-precision buffer, or of any stage if they may be `emptied`.
            emptied: Whether slots may have been emptied, and not only written.
        """
        coded, shape = self._layer.layout.coded, self.shape
        if shape is None or not self.is_current:
            return
        part = 0
        if sum(coded):
            if stage is None:  # the full-precision buffer has no entries then
                if emptied:
                    self._update(Changed(emptied=slots))
                return
            # Stages without slots are no parts (`_chosen_shape`), so a part may have another number than its stage.
            part = sum(size > 0 for size in coded[:stage])
        start, _ = shape.parts[part]
        self._update(Changed(entries_of(shape, part, slots - start)))

    def count_unsorted_step(self) -> bool:
        """Count a step that wrote slots; whether what `renew` does is due."""
        traits = self._spec.reader_traits
        is_sorted = traits.ordered and not self._spec.grows
        if self.shape is None or not (is_sorted or self._fitted is not None):
            return False
        self._layer.steps_unsorted += 1
        steps = self._layer.steps_unsorted
        return steps >= traits.resort or self._is_missing(self.shape, steps)

    def renew(self) -> None:
        """Sort the slots again, and find again what is fitted to them; see `count_unsorted_step`."""
        if self._layer.steps_unsorted < self._spec.reader_traits.resort:  # for rows that lack it alone
            return self.rebuild()
        self._layer.steps_unsorted = 0
        placed = torch.ones_like(self._layer.tensors.length, dtype=torch.bool)
        if self._spec.reader_traits.ordered and not self._spec.grows:
            self.sort_slots(placed)
        else:
            self.rebuild(placed=placed)

    def sort_slots(self, placed: Tensor | None = None) -> None:
        """Sort the slots of each head by position, in place, and `rebuild`; no coded slot is moved."""
        tensors = self._layer.tensors
        order = torch.where(tensors.positions >= 0, tensors.positions, BEYOND).argsort(dim=-1, stable=True)
        # Every slot is in full precision here: a policy that evicts may not combine a codec with an `ordered` reader.
        for held in (tensors.keys, tensors.values):
            held.copy_(held.gather(2, order.to(held.device)[..., None].expand(held.shape)))
        tensors.positions.copy_(tensors.positions.gather(-1, order))
        per_slot = (tensors.state, tensors.counts)
        in_order = map_slots(lambda t: t.gather(-1, order), per_slot)
        for held, new in zip(slot_tensors(per_slot), slot_tensors(in_order), strict=True):
            held.copy_(new)
        self.rebuild(placed=placed)
