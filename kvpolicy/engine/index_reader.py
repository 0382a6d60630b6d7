"""Decode steps that read a part of a layer's slots: the index, and attention to what the reader chooses."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine.attention_part import Part
from kvpolicy.engine.columns import CodedColumns, ExactColumns, Rest, attend_columns
from kvpolicy.engine.in_place_attention import attend_in_place
from kvpolicy.engine.key_products import KeyProducts
from kvpolicy.engine.layer_clusters import LayerClusters
from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.layer_tensors import alloc_index
from kvpolicy.engine.link import Link
from kvpolicy.engine.reading import (
    Board,
    Choice,
    Chosen,
    ReadShape,
    ReadState,
    channel_salience,
    choice_size,
    choose,
    chooses,
    entries_of,
    entry_slots,
    every_slot,
    follow,
    key_codes,
    largest_counts,
    log_tokens,
    read_shape,
    row_entries,
    show,
    unscanned,
)
from kvpolicy.engine.rebuilt_keys import RebuiltKeys
from kvpolicy.engine.slot_codes import SlotCodes
from kvpolicy.engine.state import carry_over, map_slots, slot_tensors
from kvpolicy.engine.state import tensors as all_tensors
from kvpolicy.engine.summaries import Summaries
from kvpolicy.engine.token_batch import BEYOND
from kvpolicy.kernels.mixed_values import mixed_values
from kvpolicy.kernels.products import coordinates
from kvpolicy.kernels.row_sums import sums_in_place
from kvpolicy.statistics.channel_sums import AbsoluteSums
from kvpolicy.statistics.windows import ScoreTransform

REBUILD_SLOTS = 8192
"""Slots of each head that are decoded at a time when an index is made."""


class IndexReader:
    """Attends from a step to the slots of a layer that its reader chooses, and keeps the reader's index.

    If the reader reads all slots, there is no index, and nothing is chosen.

    Attributes:
        shape: Read plan of a decode step; None for all slots.
        board: Where a layer that chooses shows its choice; None unless layers of the cache follow others.
        same_slots: Whether the layer holds the same tokens in the same slots as the one that chooses for it.
        is_current: Whether the index is kept up to date; while a prompt is placed, entries wait until all slots are
            written.
    """

    def __init__(self, layer: LayerContents, codes: SlotCodes) -> None:
        """Read the slots of `layer`, whose coded ones `codes` reads."""
        self._layer = layer
        self._codes = codes
        self._spec = layer.spec
        self._reader = layer.spec.reader
        self._link = layer.link
        self._products = KeyProducts(layer, codes)
        self._summaries = Summaries(layer, codes)
        self._clusters = LayerClusters(layer, codes)
        self._rebuilt = RebuiltKeys(layer)
        self.shape: ReadShape | None = None
        self.board: Board | None = None
        self.same_slots = False
        self.is_current = False

    # attention

    def attend(
        self, q: Tensor, transform: ScoreTransform, want_weights: bool, beside: Part | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from one token per row [B, Hq, 1, D] to the slots that the reader chooses.

        Attention `beside` them, to other keys, takes part in the softmax of a layer that reads everything.

        Returns:
            The output [B, Hq, 1, D], and the attention weights of all slots [B, H, G, S] fp32, or None; slots that were
            not read have a weight of 0.
        """
        tensors = self._layer.tensors
        self._link.whole((tensors.positions, tensors.counts))
        coded = self._codes.view()
        chosen, scanned = self._read(q, transform)
        if chosen is None or self.shape is None:
            exact = (tensors.keys, tensors.values)
            codes = tensors.codes if coded is not None else ()
            if self._spec.host:
                exact = self._link.all_vectors(exact, tensors.device)
            else:
                shared = () if self._layer.group is None else self._layer.shared_codes
                every = (exact, tensors.codes, shared)
                self._link.whole(every if scanned is None else unscanned(exact, codes))
            occupied = tensors.positions >= 0
            counts = tensors.log_counts
            buffer = ExactColumns(*exact, scanned if coded is None else None)
            stages = coded or ()
            if coded is not None and scanned is not None:
                stages = coded.known(scanned)
            return attend_columns(q, buffer, stages, occupied, transform, want_weights, counts, beside=beside)
        occupied = (self._of_read(tensors.positions, chosen) >= 0) & self._of_read(None, chosen)
        counts = None if tensors.log_counts is None else self._of_read(tensors.log_counts, chosen)
        estimate = self._clusters.estimate if self._clusters.are_used else self._summaries.estimate
        rest = None if chosen.scores is None else partial(estimate, chosen)
        if coded is not None:
            buffer = ExactColumns(tensors.keys, tensors.values)
            others = [self._decode_chosen(coded, chosen.slots, self.shape)]
            out, weights = attend_columns(q, buffer, others, occupied, transform, want_weights, counts, rest)
        else:
            out, weights = self._attend_rows(q, chosen, occupied, transform, want_weights, counts, rest)
        return out, self._to_slots(weights, chosen) if want_weights and weights is not None else None

    def _attend_rows(
        self,
        q: Tensor,
        chosen: Chosen,
        occupied: Tensor,
        transform: ScoreTransform,
        want_weights: bool,
        counts: Tensor | None,
        rest: Rest | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to chosen slots in full precision, as `attend_columns` does."""
        tensors = self._layer.tensors
        slots = chosen.slots
        group = q.shape[1] // slots.shape[1]
        rebuilt = self._rebuilt.read(chosen) if self._rebuilt.are_used else None
        if self._spec.host:
            if rebuilt is None:
                keys, values = self._link.loaded_rows((tensors.keys, tensors.values), slots)
            else:
                keys = rebuilt
                (values,) = self._link.loaded_rows((tensors.values,), slots)
            if sums_in_place(group, values):  # as without `host`, so that no result depends on where they lie
                every = torch.arange(slots.shape[-1], device=slots.device).expand(slots.shape)
                return attend_in_place(q, keys, values, every, occupied, transform, counts, rest)
            return attend_columns(q, ExactColumns(keys, values), (), occupied, transform, want_weights, counts, rest)
        keys = self._link.rows(tensors.keys, slots) if rebuilt is None else rebuilt
        if sums_in_place(group, tensors.values):
            self._link.count_vectors(tensors.values, slots.shape[-1])
            held = mixed_values(tensors.keys, tensors.values)
            return attend_in_place(q, keys, held, slots, occupied, transform, counts, rest)
        values = self._link.rows(tensors.values, slots)
        return attend_columns(q, ExactColumns(keys, values), (), occupied, transform, want_weights, counts, rest)

    def _read(self, q: Tensor, transform: ScoreTransform) -> tuple[Chosen | None, Tensor | None]:
        """Choose the slots that a step reads, and show the choice to the layers behind this one.

        Returns:
            The slots that are read besides a codec's full-precision buffer, or None for all slots; and the products of
            queries with all keys if they were computed to choose, and all slots are read then.
        """
        tensors = self._layer.tensors
        shape = self.shape
        if not tensors.reads:
            return None, None
        if shape is not None and shape.followed:
            board: Any = self.board  # not asserted to be one, since a compiler would trace the assertion
            self._link.whole(board.choice)
            return self._follow(shape, tensors.reads, board.choice), None
        scanned = None
        if shape is not None and self._reads_all and self._spec.reader_traits.scans_keys:
            scanned = self._products(self._queries(q))
        chosen = None if shape is None else self._choose(q, tensors.reads, shape, transform, scanned)
        if tensors.reads.choice:
            shown = every_slot(self._layer.layout, tensors.positions) if chosen is None else chosen
            show(tensors.reads.choice, shown, tensors.positions)
        return None if self._reads_all else chosen, scanned

    def _follow(self, shape: ReadShape, reads: ReadState, choice: Choice) -> Chosen:
        tensors = self._layer.tensors
        return follow(shape, reads.limit, choice, tensors.positions, tensors.length, self.same_slots)

    @property
    def _reads_all(self) -> bool:
        """Whether the layer reads everything after it has chosen for the layers behind it."""
        return self._spec.reader_traits.choosers_read_all and chooses(self._reader, self._spec.layer_idx)

    @property
    def _channels_read(self) -> int:
        """Channels of every key that a step reads to score it; 0 for none, or all."""
        return self._spec.reader_traits.channels_read(self._layer.tensors.keys.shape[-1])

    def _queries(self, q: Tensor) -> Tensor:
        """Queries [B, Hq, 1, D] by KV head, [B, H, G, D]."""
        return q.squeeze(2).unflatten(1, (self._layer.tensors.positions.shape[1], -1))

    def _choose(
        self,
        q: Tensor,
        reads: ReadState,
        shape: ReadShape,
        transform: ScoreTransform,
        scanned: Tensor | None = None,
    ) -> Chosen:
        """The slots that a step reads besides a codec's full-precision buffer; `scanned` are known products."""
        tensors = self._layer.tensors
        products: Any = self._products if scanned is None else lambda _: scanned.clone()  # the engine changes scores
        self._link.whole(self._rebuilt.scored(reads.index))
        score = transform.finish(self._reader.score(reads.index, self._indexed(self._queries(q)), products))
        estimated = None
        clusters = None
        if self._clusters.are_used:
            clusters = self._clusters.tokens(shape, reads.index, score.shape[-1])
        if self._summaries.size:
            estimated = score + log_tokens(shape, tensors.log_counts, tensors.positions)[:, :, None]
        if tensors.log_counts is not None and clusters is None:
            # As attention adds them: a slot that stands for many tokens is needed more than its key says.
            score = score + largest_counts(shape, tensors.log_counts, tensors.positions)[:, :, None]
        chosen = choose(
            shape,
            reads.limit,
            score,
            tensors.positions,
            tensors.length,
            self._spec.reader_traits.recent,
            self._layer.ranks,
            # Slots that lie together are copied together. The layers behind this one need the order of need, however.
            in_slots_order=not reads.choice,
            sinks=self._spec.reader_traits.sinks,
            clusters=clusters,
        )
        if clusters is not None:
            estimated = self._clusters.unread(score, clusters, chosen)
        return chosen._replace(scores=estimated)

    def _decode_chosen(self, coded: CodedColumns, slots: Tensor, shape: ReadShape) -> ExactColumns:
        tensors = self._layer.tensors
        self._link.whole((tensors.keys, tensors.values))
        self._count_decoded(self._link, shape)
        return ExactColumns(coded.keys_at(slots, tensors.keys.dtype), coded.values_at(slots, tensors.values.dtype))

    def _of_read(self, per_slot: Tensor | None, chosen: Chosen) -> Tensor:
        """Gather the read slots of a tensor [B, H, S], in the order in which they are attended to, [B, H, n].

        Without a tensor: whether a slot is to be attended to.
        """
        part = chosen.chosen if per_slot is None else per_slot.gather(-1, chosen.slots)
        if not sum(self._layer.layout.coded):
            return part
        exact = self._layer.layout.exact
        every = part.new_ones(*part.shape[:2], exact) if per_slot is None else per_slot[..., :exact]
        return torch.cat([every, part], -1)

    def _to_slots(self, weights: Tensor, chosen: Chosen) -> Tensor:
        """Attention weights of what was read, [B, H, G, n], as those of all slots, [B, H, G, S]."""
        layer = self._layer
        slots = chosen.slots
        if sum(layer.layout.coded):
            first = torch.arange(layer.layout.exact, device=slots.device).expand(*slots.shape[:2], -1)
            slots = torch.cat([first, slots], -1)
        every = weights.new_zeros(*weights.shape[:3], layer.layout.slots)
        # A sum, since slots that are not read may be named twice, with weights of 0.
        return every.scatter_add(-1, slots[:, :, None].expand(weights.shape), weights)

    def count_read(self, link: Link) -> None:
        """Count on `link` what a decode step reads, of tensors that may be on the device meta."""
        tensors = self._layer.tensors
        shape = self.shape
        buffer = (tensors.keys, tensors.values)
        link.whole((tensors.positions, tensors.counts))
        if shape is None or not tensors.reads:
            link.whole((tensors.codes, self._layer.shared_codes))
            link.count_all_vectors(buffer)
            return
        index = tensors.reads.index
        link.whole(self.board.choice if shape.followed and self.board is not None else self._rebuilt.scored(index))
        # The entries of the slots that are written are recomputed from their keys, and blocks from their values.
        written = 2 if self._spec.merges_in_steps else 1
        channels = 0 if shape.followed else self._channels_read
        refreshed = shape.page * written if index and not channels else 0
        summarized = shape.page * self._summaries.size * written
        is_coded = sum(self._layer.layout.coded) > 0
        # Coded slots are written between steps, and assigned to clusters there.
        link.whole(() if is_coded or shape.followed else self._clusters.centers(index))
        if self._reads_all:  # keys that were scanned to choose are not read again
            link.count_vectors(tensors.keys, 0 if is_coded else refreshed)
            link.whole(key_codes(tensors.codes) if is_coded and channels else ())
            link.count_channels(tensors.keys, 0 if is_coded else channels)
            link.whole((buffer, tensors.codes))
            return
        scans = self._spec.reader_traits.scans_keys and not shape.followed
        if is_coded:
            link.whole((buffer, key_codes(tensors.codes) if scans or channels else ()))
            self._count_decoded(link, shape)
            if self._summaries.size and not self._spec.grows:  # where a step evicts, a coded slot may be emptied
                self._summaries.count_coded(link, shape, 1)
            return
        link.whole(tensors.keys if scans else ())
        link.count_vectors(tensors.keys, refreshed)
        link.count_channels(tensors.keys, channels)
        self._rebuilt.count_read(link, index, shape.slots)
        link.count_vectors(tensors.values, summarized + shape.slots)

    def _count_decoded(self, link: Link, shape: ReadShape) -> None:
        """Count on `link` the codes of the slots that a step decodes."""
        group_size = self._spec.codec_traits.group_size
        for codes, size in zip(self._layer.tensors.codes, self._layer.layout.coded, strict=True):
            if size:
                link.count_stage(codes, size, min(shape.slots, size), group_size, shape.page)

    # the index

    def rebuild(
        self, first: Tensor | None = None, salience: Tensor | None = None, placed: Tensor | None = None
    ) -> None:
        """Make the index fit the layout, and compute every entry.

        Args:
            first: Rows that had their first prompt, [B] bool; None if no row had.
            salience: The salience of the channels of that prompt, [B, H, D], if the reader needs it.
            placed: Rows that had a prompt, [B] bool, or None: there, clusters and bases of keys are found again.
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
        tensors, shape = self._layer.tensors, self.shape
        if shape is None:
            return
        self._clusters.find(shape, tensors.reads, placed)
        self._rebuilt.find(shape, tensors.reads, placed)
        every = torch.arange(shape.entries, device=tensors.device).expand(*tensors.keys.shape[:2], -1)
        for entries in every.split(max(REBUILD_SLOTS // shape.page, 1), -1):
            self._refresh_entries(shape, tensors.reads, entries)
        self._summaries.rebuild(shape, tensors.reads, REBUILD_SLOTS)

    def find_missing_clusters(self) -> None:
        """Find the clusters of rows that are read in part from now on, after they were given more slots."""
        if self._clusters.are_missing(self.shape):
            self.rebuild()

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
        coded, reads, shape = self._layer.layout.coded, self._layer.tensors.reads, self.shape
        if shape is None or not reads or not self.is_current:
            return
        part = 0
        if sum(coded):
            if stage is None:  # the full-precision buffer has no entries then
                if emptied:
                    self._summaries.refresh_emptied(shape, reads, slots)
                return
            # Stages without slots are no parts (`_chosen_shape`), so a part may have another number than its stage.
            part = sum(size > 0 for size in coded[:stage])
        start, _ = shape.parts[part]
        self.refresh(shape, reads, entries_of(shape, part, slots - start))

    def refresh(self, shape: ReadShape, reads: ReadState | tuple[()], entries: Tensor) -> None:
        """Recompute entries [B, H, n] from what their slots hold, and the summaries of their blocks."""
        self._refresh_entries(shape, reads, entries)
        self._summaries.refresh(shape, reads, entries)

    def _refresh_entries(self, shape: ReadShape, reads: ReadState | tuple[()], entries: Tensor) -> None:
        tensors = self._layer.tensors
        if not reads or not reads.index or self._channels_read:
            return
        slots, inside = entry_slots(shape, entries)
        flat = slots.flatten(2)
        coded = self._codes.view()
        keys = self._link.rows(tensors.keys, flat) if coded is None else coded.keys_at(flat, tensors.keys.dtype)
        self._link.whole(self._clusters.centers(reads.index))
        occupied = inside & (tensors.positions.gather(-1, flat) >= 0).view_as(inside)
        self._reader.refresh(reads.index, entries, self._indexed(keys).unflatten(2, inside.shape[2:]), occupied)
        self._rebuilt.project(reads, entries, flat, keys, occupied)

    def _indexed(self, vectors: Tensor) -> Tensor:
        """Queries or keys [B, H, n, D] as the reader takes them, in the basis of the layer if it has one."""
        basis = self._layer.basis
        return coordinates(vectors, basis) if isinstance(basis, Tensor) else vectors

    def count_unsorted_step(self) -> bool:
        """Count a step that wrote slots; whether what `renew` does is due."""
        traits = self._spec.reader_traits
        is_sorted = traits.ordered and not self._spec.grows
        if self.shape is None or not (is_sorted or self._clusters.are_used or self._rebuilt.are_used):
            return False
        self._layer.steps_unsorted += 1
        if self._layer.steps_unsorted >= traits.resort:
            return True
        # A row may begin in a step. Of its first tokens, as many are read as they are stored.
        return self._layer.steps_unsorted % traits.recent == 0 and self._rebuilt.are_missing()

    def renew(self) -> None:
        """Sort the slots again, and find their clusters or the basis of their keys; see `count_unsorted_step`."""
        if self._layer.steps_unsorted < self._spec.reader_traits.resort:  # for rows without a basis alone
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
