"""Decode steps that read a part of a layer's slots: the index, and attention to what the reader chooses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine.attention import ScoreTransform, attend_slots
from kvpolicy.engine.codec_view import ChosenSlots, CodecView
from kvpolicy.engine.link import Link
from kvpolicy.engine.merging import merges_in_steps
from kvpolicy.engine.reading import (
    AbsoluteSums,
    Board,
    Choice,
    Chosen,
    ReadShape,
    ReadState,
    alloc_reads,
    channel_salience,
    choice_size,
    choose,
    chooses,
    count_step,
    entries_of,
    entry_slots,
    every_slot,
    follow,
    key_codes,
    largest_counts,
    read_shape,
    row_entries,
    show,
    unscanned,
)
from kvpolicy.engine.rollback import undoable
from kvpolicy.engine.slots import LayerSlots
from kvpolicy.engine.state import map_slots, slot_tensors, tensors
from kvpolicy.engine.token_batch import BEYOND
from kvpolicy.kernels.products import products
from kvpolicy.protocols import LoadsSalience, Needs, State

REBUILD_SLOTS = 8192
"""Slots of each head that are decoded at a time when an index is made."""


class LayerReading(LayerSlots):
    """The slots of a layer and the index of its reader. `LayerStore` operates on them.

    If the reader reads all slots, this class only attends to them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make an empty store; see `LayerSlots`."""
        super().__init__(*args, **kwargs)
        # Set by the owner of a cache in which layers follow the choices of others.
        self.board: Board | None = None
        self._same_slots = False
        self._index_is_current = False  # while a prompt is placed, entries wait until all slots are written

    # attention

    def _attend(self, q: Tensor, transform: ScoreTransform, want_weights: bool) -> tuple[Tensor, Tensor | None]:
        """Attend from one token per row [B, Hq, 1, D] to the slots that the reader chooses.

        Returns:
            The output [B, Hq, 1, D], and the attention weights of all slots [B, H, G, S] fp32, or None; slots that were
            not read have a weight of 0.
        """
        self.link.whole((self.positions, self.counts))
        coded = self.coded_view()
        chosen, scanned = self._read(q, transform)
        if chosen is None or self.read_shape is None:
            exact = (self.keys, self.values)
            codes = self.codes if coded is not None else ()
            self.link.whole((exact, self.codes) if scanned is None else unscanned(exact, codes))
            occupied = self.positions >= 0
            return attend_slots(q, exact, coded, occupied, transform, want_weights, self.log_counts, scanned)
        if coded is None:
            buffer = self.link.rows(self.keys, chosen.slots), self.link.rows(self.values, chosen.slots)
            part = None
        else:
            buffer = self.keys, self.values
            part = self._decode_chosen(coded, chosen.slots, self.read_shape)
        occupied = (self._of_read(self.positions, chosen) >= 0) & self._of_read(None, chosen)
        counts = None if self.log_counts is None else self._of_read(self.log_counts, chosen)
        out, weights = attend_slots(q, buffer, part, occupied, transform, want_weights, counts)
        return out, None if weights is None else self._to_slots(weights, chosen)

    def _read(self, q: Tensor, transform: ScoreTransform) -> tuple[Chosen | None, Tensor | None]:
        """Choose the slots that a step reads, and show the choice to the layers behind this one.

        Returns:
            The slots that are read besides a codec's full-precision buffer, or None for all slots; and the products of
            `_products` if they were computed to choose, and all slots are read then.
        """
        shape = self.read_shape
        if not self.reads:
            return None, None
        if shape is not None and shape.followed:
            board: Any = self.board  # not asserted to be one, since a compiler would trace the assertion
            self.link.whole(board.choice)
            return self._follow(shape, self.reads, board.choice), None
        scanned = None
        if shape is not None and self._reads_all and self.reader.traits.scans_keys:
            scanned = self._products(self._queries(q))
        chosen = None if shape is None else self._choose(q, self.reads, shape, transform, scanned)
        if self.reads.choice:
            shown = every_slot(self.layout, self.positions) if chosen is None else chosen
            show(self.reads.choice, shown, self.positions)
        return None if self._reads_all else chosen, scanned

    def _follow(self, shape: ReadShape, reads: ReadState, choice: Choice) -> Chosen:
        return follow(shape, reads.limit, choice, self.positions, self.length, self._same_slots)

    @property
    def _reads_all(self) -> bool:
        """Whether the layer reads everything after it has chosen for the layers behind it."""
        return self.reader.traits.choosers_read_all and chooses(self.reader, self.layer_idx)

    def _queries(self, q: Tensor) -> Tensor:
        """Queries [B, Hq, 1, D] by KV head, [B, H, G, D]."""
        return q.squeeze(2).unflatten(1, (self.positions.shape[1], -1))

    def _choose(
        self,
        q: Tensor,
        reads: ReadState,
        shape: ReadShape,
        transform: ScoreTransform,
        scanned: Tensor | None = None,
    ) -> Chosen:
        """The slots that a step reads besides a codec's full-precision buffer; `scanned` are known products."""
        products = self._products if scanned is None else lambda _: scanned.clone()  # the engine changes scores
        self.link.whole(reads.index)
        score = transform.finish(self.reader.score(reads.index, self._queries(q), products))
        if self.log_counts is not None:
            # As attention adds them: a slot that stands for many tokens is needed more than its key says.
            score = score + largest_counts(shape, self.log_counts, self.positions)[:, :, None]
        return choose(shape, reads.limit, score, self.positions, self.length, self.reader.traits.recent, self.ranks)

    def _products(self, queries: Tensor) -> Tensor:
        """Products of queries [B, H, G, D] with the key of every slot that the reader divides, [B, H, G, S] fp32."""
        coded = self.coded_view()
        if coded is None:
            self.link.whole(self.keys)
            return products(queries, self.keys)
        self.link.whole(key_codes(self.codes))
        return torch.cat(coded.score(queries), -1)

    def _decode_chosen(self, coded: CodecView, slots: Tensor, shape: ReadShape) -> ChosenSlots:
        self.link.whole((self.keys, self.values))
        group_size = self.codec.traits.group_size
        for codes, size in zip(self.codes, self.layout.coded, strict=True):
            if size:
                self.link.count_stage(codes, size, min(shape.slots, size), group_size, shape.page)
        # In fp32, as stages decode: attention converts them as it does where all slots are read.
        return ChosenSlots(coded.keys_at(slots, torch.float32), coded.values_at(slots, torch.float32))

    def _of_read(self, per_slot: Tensor | None, chosen: Chosen) -> Tensor:
        """Gather the read slots of a tensor [B, H, S], in the order in which they are attended to, [B, H, n].

        Without a tensor: whether a slot is to be attended to.
        """
        part = chosen.chosen if per_slot is None else per_slot.gather(-1, chosen.slots)
        if not sum(self.layout.coded):
            return part
        exact = self.layout.exact
        every = part.new_ones(*part.shape[:2], exact) if per_slot is None else per_slot[..., :exact]
        return torch.cat([every, part], -1)

    def _to_slots(self, weights: Tensor, chosen: Chosen) -> Tensor:
        """Attention weights of what was read, [B, H, G, n], as those of all slots, [B, H, G, S]."""
        slots = chosen.slots
        if sum(self.layout.coded):
            first = torch.arange(self.layout.exact, device=slots.device).expand(*slots.shape[:2], -1)
            slots = torch.cat([first, slots], -1)
        every = weights.new_zeros(*weights.shape[:3], self.layout.slots)
        # A sum, since slots that are not read may be named twice, with weights of 0.
        return every.scatter_add(-1, slots[:, :, None].expand(weights.shape), weights)

    @property
    def moved(self) -> int:
        """Bytes that the last decode step read; the number that a step would read if none has been counted."""
        if self.link.moved or not self.is_initialized:
            return self.link.moved
        expected = Link()
        expected.start()
        count_step(
            expected,
            self.reader,
            self.read_shape,
            self.reads,
            (self.keys, self.values),
            (self.positions, self.counts),
            self.codes,
            self.layout.coded,
            self.codec.traits.group_size,
            None if self.board is None else self.board.choice,
            reads_all=self._reads_all,
            merges=merges_in_steps(self.merger, self.grows),
        )
        return expected.moved

    # the index

    def _rebuild_index(self, first: Tensor | None = None, salience: Tensor | None = None) -> None:
        """Make the index fit the layout, and compute every entry.

        Args:
            first: Rows that had their first prompt, [B] bool; None if no row had.
            salience: The salience of the channels of that prompt, [B, H, D], if the reader needs it.
        """
        if not self.reads:
            return
        shape = read_shape(self.reader, self.codec, self.layout, self.layer_idx)
        batch, heads, _, dim = self.keys.shape
        shown = choice_size(self.reader, self.codec, self.layout, self.layer_idx)
        held = self.reads.choice.slots.shape[-1] if self.reads.choice else 0
        if shape != self.read_shape or shown != held:
            self.read_shape = shape
            old = self.reads
            like = self.keys.dtype, self.keys.device
            self.reads = alloc_reads(self.reader, shape, batch, heads, dim, *like, self.layer_idx, shown)
            # What was fitted to the first prompt does not depend on the number of entries.
            for new, fitted in zip(tensors(self.reads), tensors(old), strict=True):
                if new.shape == fitted.shape:
                    new.copy_(fitted)
        if first is not None and salience is not None and self.reads.index:
            self.reader.fit(self.reads.index, salience, first)
        self._index_is_current = True
        # Also where this layer reads everything: one behind it that has more slots may still follow its choice.
        self._show()
        if shape is None:
            return
        self._same_slots = shape.followed > 0 and self._holds_the_same()
        self._set_limit(shape, self.reads)
        step = max(REBUILD_SLOTS // shape.page, 1)
        for start in range(0, shape.entries, step):
            entries = torch.arange(start, min(start + step, shape.entries), device=self.keys.device)
            self._refresh(shape, self.reads, entries.expand(batch, heads, -1))

    def _show(self) -> None:
        """Show the layers behind this one where its choice and its positions are; they may be new tensors."""
        if self.board is not None and self.reads and self.reads.choice:
            self.board.choice = self.reads.choice
            self.board.positions = self.positions

    def _holds_the_same(self) -> bool:
        """Whether this layer and the one that chooses for it hold the same tokens in the same slots, and will.

        Tokens that a selector keeps for their position alone are the same in every layer from then on.
        """
        shown = None if self.board is None else self.board.positions
        return self.selector.needs == Needs() and shown is not None and torch.equal(shown, self.positions)

    def fix_addresses(self) -> None:
        """Mark every tensor as static for CUDA graphs, and show new ones to the layers behind this one."""
        super().fix_addresses()
        self._show()

    def empty_parts(self) -> dict[str, State]:
        """Tensors on the device `meta`, or empty ones, like those of `parts`, for the layout that is set."""
        parts = super().empty_parts()
        if not self.reads:
            return parts
        batch, heads, _, dim = self.keys.shape
        shown = choice_size(self.reader, self.codec, self.layout, self.layer_idx)
        like = self.keys.dtype, torch.device("meta")
        reads = alloc_reads(self.reader, self.read_shape, batch, heads, dim, *like, self.layer_idx, shown)
        return parts | {"reads": reads}

    def numbers(self) -> dict[str, Any]:
        """The numbers of the layer on the host, as JSON values."""
        reading = [self._same_slots, self._index_is_current, self.steps_unsorted]
        return super().numbers() | ({"reading": reading} if self.reads else {})

    def set_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Restore the result of `numbers`."""
        super().set_numbers(numbers)
        if self.reads:
            self._same_slots, self._index_is_current, self.steps_unsorted = numbers["reading"]
            self.read_shape = read_shape(self.reader, self.codec, self.layout, self.layer_idx)

    def _lengthen(self) -> None:
        """Grow the slots to the capacity, and keep what they hold."""
        super()._lengthen()
        self._rebuild_index()

    def _set_limit(self, shape: ReadShape, reads: ReadState) -> None:
        rows = row_entries(self.reader, self.codec, shape, self.expected_len)
        reads.limit.copy_(reads.limit.new_tensor(rows))

    def _set_budget(self, budget: Tensor) -> None:
        """Let each row hold `budget` [B] tokens; one that has slots for more of them reads more."""
        super()._set_budget(budget)
        if self.read_shape is not None and self.reads:
            self._set_limit(self.read_shape, self.reads)

    @property
    def measures_salience(self) -> bool:
        """Whether the reader needs the salience of the channels in a prompt."""
        return (
            bool(self.reads and self.reads.index) and self.reader.traits.salience and not self.reader.traits.calibrated
        )

    def prompt_salience(self, sums: AbsoluteSums | None, count: Tensor) -> Tensor | None:
        """The salience of the channels in a prompt of `count` [B] tokens, [B, H, D] fp32, if the reader needs it."""
        if sums is not None:
            return channel_salience(sums, count, self.ranks)
        if not (self.reads and self.reads.index and self.reader.traits.salience):
            return None
        assert isinstance(self.reader, LoadsSalience)  # see `policy.combination.check_abilities`
        salience = self.reader.load_salience(self.layer_idx, self.ranks.held)
        return salience.to(count.device).expand(count.shape[0], -1, -1)

    def refresh_slots(self, slots: Tensor, stage: int | None) -> None:
        """Recompute the entries of slots [B, H, n] of the layer that were written or emptied."""
        shape = self.read_shape
        if shape is None or not self.reads or not self._index_is_current:
            return
        part = 0
        if sum(self.layout.coded):
            if stage is None:  # the full-precision buffer has no entries then
                return
            # Stages without slots are no parts (`_chosen_shape`), so a part may have another number than its stage.
            part = sum(size > 0 for size in self.layout.coded[:stage])
        start, _ = shape.parts[part]
        self._refresh(shape, self.reads, entries_of(shape, part, slots - start))

    def _refresh(self, shape: ReadShape, reads: ReadState, entries: Tensor) -> None:
        """Recompute entries [B, H, n] from the keys that their slots hold."""
        if not reads.index:
            return
        slots, inside = entry_slots(shape, entries)
        flat = slots.flatten(2)
        coded = self.coded_view()
        keys = self.link.rows(self.keys, flat) if coded is None else coded.keys_at(flat, self.keys.dtype)
        occupied = inside & (self.positions.gather(-1, flat) >= 0).view_as(inside)
        self.reader.refresh(reads.index, entries, keys.unflatten(2, inside.shape[2:]), occupied)

    def _count_unsorted_step(self) -> None:
        """Count a step that overwrote slots, and sort them by position again when it is time."""
        traits = self.reader.traits
        if self.read_shape is None or not traits.ordered or self.grows:
            return
        self.steps_unsorted += 1
        if self.steps_unsorted >= traits.resort:
            with undoable(self):
                self._sort_slots()

    def _sort_slots(self) -> None:
        """Sort the slots of each head by position, in place, and compute the index again; no coded slot is moved."""
        self.steps_unsorted = 0
        order = torch.where(self.positions >= 0, self.positions, BEYOND).argsort(dim=-1, stable=True)
        # Every slot is in full precision here: a policy that evicts may not combine a codec with an `ordered` reader.
        vectors = order[..., None].expand(self.keys.shape)
        self.keys.copy_(self.keys.gather(2, vectors))
        self.values.copy_(self.values.gather(2, vectors))
        self.positions.copy_(self.positions.gather(-1, order))
        per_slot = (self.state, self.counts)
        in_order = map_slots(lambda t: t.gather(-1, order), per_slot)
        for held, new in zip(slot_tensors(per_slot), slot_tensors(in_order), strict=True):
            held.copy_(new)
        self._rebuild_index()
