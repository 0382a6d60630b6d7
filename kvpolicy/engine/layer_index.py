"""The index of a layer's reader, and the decode steps that read by it: some slots of the layer, or all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine.attention_part import Part
from kvpolicy.engine.columns import CodedColumns, ExactColumns, attend_columns
from kvpolicy.engine.in_place_attention import attend_in_place
from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.layer_slots import KeyProducts, LayerSlots
from kvpolicy.engine.layer_tensors import alloc_index
from kvpolicy.engine.link import Link
from kvpolicy.engine.reading import (
    Board,
    Choice,
    ReadShape,
    ReadState,
    channel_salience,
    choice_size,
    chooses,
    every_slot,
    follow,
    key_codes,
    read_shape,
    row_entries,
    show,
    unscanned,
    written_entries,
)
from kvpolicy.engine.slot_codes import SlotCodes
from kvpolicy.engine.state import carry_over, map_slots, slot_tensors
from kvpolicy.engine.state import tensors as all_tensors
from kvpolicy.engine.token_batch import BEYOND
from kvpolicy.kernels.mixed_values import mixed_values
from kvpolicy.kernels.row_sums import sums_in_place
from kvpolicy.kernels.slot_writes import flat_slots
from kvpolicy.protocols import Changed, Read
from kvpolicy.statistics.channel_sums import AbsoluteSums
from kvpolicy.statistics.windows import ScoreTransform


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
        self._alike: tuple[ReadShape, list[int], bool] | None = None

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

    def reads_alike(self, shape: ReadShape) -> bool:
        """Whether every row is known to read as many entries as `shape` says; not asked of a compiled step."""
        if torch.compiler.is_compiling():
            return False
        tokens = self._layer.expected_len
        if self._alike is None or self._alike[:2] != (shape, tokens):
            rows = row_entries(self._reader, self._spec.codec, shape, tokens)
            self._alike = (shape, [*tokens], min(rows) >= shape.chosen)
        return self._alike[2]

    def numbers(self) -> list[Any]:
        """The numbers of the index on the host, as JSON values."""
        # One number, since the rows of a cache that is saved have had the same steps.
        return [self.same_slots, self.is_current, max(self._layer.steps_unsorted, default=0)]

    def set_numbers(self, numbers: list[Any]) -> None:
        """Restore the result of `numbers`, after the layout was set."""
        self.same_slots, self.is_current, steps = numbers
        self._layer.steps_unsorted = [steps] * len(self._layer.expected_len)
        self.fit_layout()

    def prompt_salience(self, sums: AbsoluteSums | None, count: Tensor) -> Tensor | None:
        """The salience of the channels in a prompt of `count` [B] tokens, [B, H, D] fp32, if the reader needs it."""
        layer = self._layer
        tensors = self._layer.tensors
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
        coded = self._layer.layout.coded
        shape = self.shape
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
        self._update(Changed(self._layer.memo.once(written_entries, shape, part, slots)))

    def count_unsorted_step(self) -> bool:
        """Count a step that wrote slots; whether what `renew` does is due."""
        traits = self._spec.reader_traits
        is_sorted = traits.ordered and not self._spec.grows
        if self.shape is None or not (is_sorted or self._fitted is not None):
            return False
        self._layer.steps_unsorted = [steps + 1 for steps in self._layer.steps_unsorted]
        steps = max(self._layer.steps_unsorted)
        return steps >= traits.resort or self._is_missing(self.shape, steps)

    def renew(self) -> None:
        """Sort the slots again, and find again what is fitted to them; see `count_unsorted_step`."""
        due = [steps >= self._spec.reader_traits.resort for steps in self._layer.steps_unsorted]
        if not any(due):  # for rows that lack it alone
            return self.rebuild()
        rows = zip(due, self._layer.steps_unsorted, strict=True)
        self._layer.steps_unsorted = [0 if is_due else steps for is_due, steps in rows]
        placed = torch.tensor(due, device=self._layer.tensors.device)
        if self._spec.reader_traits.ordered and not self._spec.grows:
            self.sort_slots(placed)
        else:
            self.rebuild(placed=placed)

    def sort_slots(self, placed: Tensor | None = None) -> None:
        """Sort the slots of each head by position, in place, and `rebuild`; no coded slot is moved.

        Args:
            placed: Rows whose slots are sorted, [B] bool; None for all of them.
        """
        tensors = self._layer.tensors
        order = torch.where(tensors.positions >= 0, tensors.positions, BEYOND).argsort(dim=-1, stable=True)
        if placed is not None:
            order = torch.where(placed[:, None, None], order, torch.arange(order.shape[-1], device=order.device))
        # Every slot is in full precision here: a policy that evicts may not combine a codec with an `ordered` reader.
        for held in (tensors.keys, tensors.values):
            held.copy_(held.gather(2, order.to(held.device)[..., None].expand(held.shape)))
        tensors.positions.copy_(tensors.positions.gather(-1, order))
        per_slot = (tensors.state, tensors.counts)
        in_order = map_slots(lambda t: t.gather(-1, order), per_slot)
        for held, new in zip(slot_tensors(per_slot), slot_tensors(in_order), strict=True):
            held.copy_(new)
        self.rebuild(placed=placed)


class StepReads:
    """Attends from a step to the slots of a layer that its reader chooses, or to all, and counts what is read."""

    def __init__(self, layer: LayerContents, codes: SlotCodes, index: LayerIndex) -> None:
        """Read the slots of `layer`, whose coded ones `codes` reads, by its `index`."""
        self._layer = layer
        self._codes = codes
        self._index = index
        self._spec = layer.spec
        self._reader = layer.spec.reader
        self._link = layer.link
        # A layer that chooses for those behind it may read everything itself.
        self._reads_all = layer.spec.reader_traits.choosers_read_all and chooses(
            layer.spec.reader, layer.spec.layer_idx
        )

    def attend(
        self, q: Tensor, transform: ScoreTransform, want_weights: bool, beside: Part | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from one token per row [B, Hq, 1, D] to the slots that the reader chooses.

        Attention `beside` them, to other keys, takes part in the softmax of a layer that reads everything.

        Returns:
            The output [B, Hq, 1, D], and the attention weights of all slots [B, H, G, S] fp32, or None; slots that were
            not read have a weight of 0.
        """
        # Bytes are counted where they are read: positions and counts by every reader, vectors by what was chosen.
        tensors = self._layer.tensors
        self._link.whole((tensors.positions, tensors.counts))
        coded = self._codes.view()
        read, scanned = self._read(q, transform, tensors.reads) if tensors.reads else (None, None)
        # Without a choice all slots are read, less what the reader has already scored in a scan.
        if read is None:
            exact = (tensors.keys, tensors.values)
            codes = tensors.codes if coded is not None else ()
            if self._spec.host:
                exact = self._link.all_vectors(exact, tensors.device)
            else:
                shared = () if self._layer.group is None else self._layer.shared_codes
                every = (exact, tensors.codes, shared)
                self._link.whole(every if scanned is None else unscanned(exact, codes))
            empty = mask = None
            if self._layer.shared is not None and self._layer.in_order:
                empty = self._layer.memo.once(_behind, self._layer.length, tensors.positions.shape[-1])
                mask = self._layer.memo.once(_hiding, empty, q.dtype)
            elif not self._layer.is_full:
                empty = tensors.positions < 0
            counts = tensors.log_counts
            buffer = ExactColumns(*exact, scanned if coded is None else None)
            stages = coded or ()
            if coded is not None and scanned is not None:
                stages = coded.known(scanned)
            return attend_columns(q, buffer, stages, empty, transform, want_weights, counts, beside=beside, mask=mask)
        # Of a fixed number of slots, those that are empty or were not chosen take no part in the softmax.
        occupied = self._of_read(None, read)
        if not read.none_empty:
            occupied = (self._of_read(tensors.positions, read) >= 0) & occupied
        counts = None if tensors.log_counts is None else self._of_read(tensors.log_counts, read)
        if coded is not None:
            buffer = ExactColumns(tensors.keys, tensors.values)
            others = [self._decode(coded, read.slots)]
            out, weights = attend_columns(q, buffer, others, ~occupied, transform, want_weights, counts, read.rest)
        else:
            out, weights = self._attend_rows(q, read, occupied, transform, want_weights, counts)
        return out, self._to_slots(weights, read) if want_weights and weights is not None else None

    def _attend_rows(
        self,
        q: Tensor,
        read: Read,
        occupied: Tensor,
        transform: ScoreTransform,
        want_weights: bool,
        counts: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to chosen slots in full precision, as `attend_columns` does."""
        tensors = self._layer.tensors
        memo = self._layer.memo
        slots = read.slots
        keys = None if read.keys is None else read.keys()
        index: Tensor | None = None  # found once for keys and values
        if self._spec.host:
            loaded = self._link.loaded_rows(
                (tensors.values,) if keys is not None else (tensors.keys, tensors.values), slots
            )
            keys = loaded[0] if keys is None else keys
            held = loaded[-1]
            values = mixed_values(keys, held)
        else:
            index = flat_slots(slots, tensors.positions.shape[-1], memo.once)
            keys = self._link.rows(tensors.keys, slots, index) if keys is None else keys
            values = None
            held = tensors.values
        if sums_in_place(q.shape[1] // slots.shape[1], held):  # with `host` too, so that no result depends on it
            if values is None:
                self._link.count_vectors(held, slots.shape[-1])
                held = mixed_values(tensors.keys, held)
            else:
                held = values
                slots = torch.arange(slots.shape[-1], device=slots.device).expand(slots.shape)
                index = None
            # A row that has a token reads at least the newest one.
            shared = self._layer.shared
            some = read.none_empty and shared is not None and not shared.lengths_with
            return attend_in_place(
                q, keys, held, slots, occupied, transform, counts, read.rest, index=index, memo=memo, none_alone=some
            )
        values = self._link.rows(tensors.values, slots, index) if values is None else values
        buffer = ExactColumns(keys, values)
        return attend_columns(q, buffer, (), ~occupied, transform, want_weights, counts, read.rest)

    def _read(self, q: Tensor, transform: ScoreTransform, reads: ReadState) -> tuple[Read | None, Tensor | None]:
        """Choose the slots that a step reads, and show the choice to the layers behind this one.

        Returns:
            What is read besides a codec's full-precision buffer, or None for all slots; and the products of queries
            with all keys if they were computed to choose, and all slots are read then.
        """
        tensors = self._layer.tensors
        shape = self._index.shape
        if shape is not None and shape.followed:
            board: Any = self._index.board  # not asserted to be one, since a compiler would trace the assertion
            self._link.whole(board.choice)
            return self._follow(shape, reads, board.choice), None
        scanned = None
        if shape is not None and self._reads_all and self._spec.reader_traits.scans_keys:
            scanned = KeyProducts(self._layer, self._codes)(self._queries(q))
        read = None if shape is None else self._choose(q, reads, shape, transform, scanned)
        if reads.choice:
            shown = every_slot(self._layer.layout, tensors.positions) if read is None else read
            show(reads.choice, shown, tensors.positions)
        return None if self._reads_all else read, scanned

    def _follow(self, shape: ReadShape, reads: ReadState, choice: Choice) -> Read:
        tensors = self._layer.tensors
        return follow(shape, reads.limit, choice, tensors.positions, self._layer.length, self._index.same_slots)

    def _choose(
        self, q: Tensor, reads: ReadState, shape: ReadShape, transform: ScoreTransform, scanned: Tensor | None
    ) -> Read:
        """Let the reader choose; `scanned` are the products with all keys, if they are known."""
        slots = LayerSlots(
            self._layer, self._codes, shape, transform, scanned, reads_alike=self._index.reads_alike(shape)
        )
        return self._reader.choose(reads.index, slots, slots.coordinates(self._queries(q)))

    def _queries(self, q: Tensor) -> Tensor:
        """Queries [B, Hq, 1, D] by KV head, [B, H, G, D]."""
        return q.squeeze(2).unflatten(1, (self._layer.tensors.positions.shape[1], -1))

    def _decode(self, coded: CodedColumns, slots: Tensor) -> ExactColumns:
        tensors = self._layer.tensors
        self._link.whole((tensors.keys, tensors.values))
        self._count_decoded(self._link, self._index.shape)
        return ExactColumns(coded.keys_at(slots, tensors.keys.dtype), coded.values_at(slots, tensors.values.dtype))

    def _of_read(self, per_slot: Tensor | None, read: Read) -> Tensor:
        """Gather the read slots of a tensor [B, H, S], in the order in which they are attended to, [B, H, n].

        Without a tensor: whether a slot is to be attended to.
        """
        part = read.chosen if per_slot is None else per_slot.gather(-1, read.slots)
        if not sum(self._layer.layout.coded):
            return part
        exact = self._layer.layout.exact
        every = part.new_ones(*part.shape[:2], exact) if per_slot is None else per_slot[..., :exact]
        return torch.cat([every, part], -1)

    def _to_slots(self, weights: Tensor, read: Read) -> Tensor:
        """Attention weights of what was read, [B, H, G, n], as those of all slots, [B, H, G, S]."""
        layer = self._layer
        slots = read.slots
        if sum(layer.layout.coded):
            first = torch.arange(layer.layout.exact, device=slots.device).expand(*slots.shape[:2], -1)
            slots = torch.cat([first, slots], -1)
        every = weights.new_zeros(*weights.shape[:3], layer.layout.slots)
        # A sum, since slots that are not read may be named twice, with weights of 0.
        return every.scatter_add(-1, slots[:, :, None].expand(weights.shape), weights)

    def count_read(self, link: Link) -> None:
        """Count on `link` what a decode step reads, of tensors that may be on the device meta."""
        tensors = self._layer.tensors
        shape = self._index.shape
        buffer = (tensors.keys, tensors.values)
        link.whole((tensors.positions, tensors.counts))
        if shape is None or not tensors.reads:
            link.whole((tensors.codes, self._layer.shared_codes))
            link.count_all_vectors(buffer)
            return
        board = self._index.board
        if not shape.followed:
            self._count_choice(link, shape, tensors.reads)
        elif board is not None:
            link.whole(board.choice)
        if self._reads_all:
            link.whole((buffer, tensors.codes))
        elif sum(self._layer.layout.coded):
            link.whole(buffer)
            self._count_decoded(link, shape)
        else:
            # A reader that rebuilds keys has counted which of them it reads.
            rebuilds = self._spec.reader_traits.rebuilds is not None and not shape.followed
            link.count_vectors(tensors.keys, 0 if rebuilds else shape.slots)
            link.count_vectors(tensors.values, shape.slots)

    def _count_choice(self, link: Link, shape: ReadShape, reads: ReadState) -> None:
        """Count on `link` what is read to choose: of the index, and of the keys that are scanned."""
        self._reader.count_step(reads.index, LayerSlots(self._layer, self._codes, shape, link=link))
        tensors = self._layer.tensors
        traits = self._spec.reader_traits
        channels = traits.channels_read(tensors.keys.shape[-1])
        scans = traits.scans_keys and not self._reads_all  # keys that were scanned are not read again
        if sum(self._layer.layout.coded):
            link.whole(key_codes(tensors.codes) if scans or channels else ())
            return
        link.whole(tensors.keys if scans else ())
        link.count_channels(tensors.keys, channels)

    def _count_decoded(self, link: Link, shape: ReadShape | None) -> None:
        """Count on `link` the codes of the slots that a step decodes."""
        assert shape is not None
        layer = self._layer
        group_size = self._spec.codec_traits.group_size
        link.count_stages(layer.tensors.codes, layer.layout.coded, shape.slots, group_size, shape.page)


def _behind(length: Tensor, slots: int) -> Tensor:
    """Which slots are behind the tokens of a row, [B, 1, S] bool."""
    return torch.arange(slots, device=length.device) >= length[:, None, None]


def _hiding(empty: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask that is added to scores, -inf for empty slots."""
    return torch.zeros_like(empty, dtype=dtype).masked_fill_(empty, -torch.inf)
