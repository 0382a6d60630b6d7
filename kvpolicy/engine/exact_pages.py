"""Pages that hold every token in full precision."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine.decode import NO_SLOT, assert_compiled
from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.link import Link
from kvpolicy.engine.merging import SlotMerge, merge_evicted, merge_victim
from kvpolicy.engine.page_attention import ExactPages, PageAttention, attend_pages
from kvpolicy.engine.page_slots import (
    flat_index,
    flat_pages,
    of_every_head,
    paged_targets,
    per_slot,
    require_pages,
    set_per_slot,
    slots_per_step,
    victims,
    write_flat,
)
from kvpolicy.engine.pages import Owners, best_slot, owned_by, page_table, place_tokens
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.selection import Selection, finite_priority
from kvpolicy.engine.state import map_slots, map_state, slot_tensors
from kvpolicy.engine.token_batch import BEYOND, SlotData, TokenBatch
from kvpolicy.engine.undo_log import Targets
from kvpolicy.kernels.slot_writes import gather_slots
from kvpolicy.protocols import Layout, State, Tokens, View
from kvpolicy.statistics.windows import Past, ScoreTransform


class ExactPageBody:
    """The pages of a layer without a codec: a new token is written to a page of its head."""

    def __init__(self, layer: LayerContents) -> None:
        """Hold the pages of `layer`."""
        self._layer = layer

    @property
    def owner(self) -> Tensor:
        """The owners of the pages that the head allocator divides, [B, NB]."""
        return self._layer.tensors.paged().owner

    def find_layout(self) -> Layout:
        """The slots of an average head."""
        return Layout(-(-self._layer.tensors.positions[0].numel() // max(1, self._layer.shape.heads)))

    # a prompt

    def held_slots(self) -> tuple[Tensor, State]:
        """Positions [B, H, n] of the slots of each head, -1 for an empty one, and the selector's state of them."""
        tensors = self._layer.tensors
        table = page_table(self.owner, self._layer.shape.heads)
        return table.occupied(tensors.positions), map_slots(table.slots, tensors.state)

    def place(self, pending: PendingPrompt, selected: Selection, past: Past | None, counts: Tensor, size: int) -> None:
        """Lay out the selected tokens in pages.

        Args:
            pending: The prompt.
            selected: The selection among the slots, as `held_slots` has them, and the tokens of the prompt.
            past: The slots, decoded, if they were read.
            counts: Pages of each head, [B, H].
            size: Slots of a page.
        """
        tensors = self._layer.tensors
        keys = pending.keys
        values = pending.values
        if self.owner.shape[1]:  # a first prompt is not copied whole
            past = past or self.past()
            assert past is not None
            keys = torch.cat([past.keys, keys], 2)
            values = torch.cat([past.values, values], 2)
        own = map_state(lambda t: keys.new_zeros(keys.shape[:3], dtype=t.dtype), tensors.counts)
        if past is not None and past.counts is not None:
            own = F.pad(past.counts, (0, pending.keys.shape[2]))
        batch = TokenBatch(keys, values, selected.positions, selected.state, selected.chosen, own)
        if self._layer.spec.merger_traits.when != "never":
            batch = merge_evicted(self._layer, batch, selected, pending, past, slice(0, 0))
        placed = place_tokens(batch.positions, batch.chosen, counts, size)
        tensors.paged().owner = placed.owner
        # Empty slots have a weight of 0, and 0 times an arbitrary number of padding might be NaN.
        tensors.keys = placed.take(batch.keys).masked_fill_(placed.empty[..., None], 0)
        tensors.values = placed.take(batch.values).masked_fill_(placed.empty[..., None], 0)
        tensors.positions = placed.take(batch.positions).masked_fill_(placed.empty, -1)
        state = (batch.state, batch.counts)
        set_per_slot(self._layer, map_slots(lambda t: placed.take(t).masked_fill_(placed.empty, 0), state))

    # reading and writing

    def past(self) -> Past | None:
        """Every slot, [B, H, n, D], where n is that of the head with the most pages; None if there are none."""
        tensors = self._layer.tensors
        if not self.owner.shape[1]:
            return None
        table = page_table(self.owner, self._layer.shape.heads)
        counts = None if tensors.log_counts is None else table.slots(tensors.log_counts)
        occupied = table.occupied(tensors.positions) >= 0
        return Past(table.slots(tensors.keys), table.slots(tensors.values), occupied, counts)

    def step_targets(self) -> Targets:
        """The tensors that a decode step writes to, by name, and the slots of each head."""
        tensors = self._layer.tensors
        written = slots_per_step(self._layer) * self._layer.shape.heads
        vectors = {"keys": tensors.keys, "values": tensors.values}
        return {name: (flat_pages(t), written) for name, t in vectors.items()} | dict(paged_targets(self._layer))

    def write(self, slots: Tensor, data: SlotData, mask: Tensor | None) -> None:
        """Write tokens to slots counted over all pages [B, H, n], in place, where `mask` [B, H, n] is set."""
        tensors = self._layer.tensors
        undo = self._layer.undo
        index = flat_index(self._layer, slots)
        write_flat("keys", tensors.keys, slots, data.keys, mask, undo, index)
        write_flat("values", tensors.values, slots, data.values, mask, undo, index)
        write_flat("positions", tensors.positions, slots, data.positions, mask, undo, index)
        pairs = zip(slot_tensors(per_slot(self._layer)), slot_tensors((data.state, data.counts)), strict=True)
        for number, (target, item) in enumerate(pairs):
            write_flat(f"state.{number}", target, slots, item, mask, undo, index)

    # a decode step

    def _owners(self) -> Owners:
        layer = self._layer
        return Owners.of(self.owner, layer.shape.heads, layer.memo.once, all_used=layer.evicts)

    def attend(self, q: Tensor, transform: ScoreTransform) -> PageAttention:
        """Attend from one token per row to every page; see `attend_pages`."""
        tensors = self._layer.tensors
        pages = ExactPages(tensors.keys, tensors.values)
        empty = None if self._layer.is_full else tensors.positions < 0
        return attend_pages(q, pages, empty, self._owners(), transform, tensors.log_counts)

    def count_read(self, link: Link) -> None:
        """Count on `link` what a decode step reads."""
        tensors = self._layer.tensors
        link.whole((tensors.keys, tensors.values, tensors.positions, tensors.counts, self.owner))

    def free_slot(self, view: View, valid: Tensor | None) -> tuple[Tensor, SlotMerge | None]:
        """A slot for each head's new token, [B, H, 1], counted over all pages: an empty one, else the victim's.

        And the slot that takes in the victim, if tokens are merged in steps.
        """
        layer = self._layer
        owner = self.owner
        heads = layer.shape.heads
        owners = self._owners()
        if layer.evicts:
            slot = best_slot(victims(layer, view, None, owners), owners)
        else:
            require_pages(layer, owners, valid)
            empty = ~view.valid
            free = (empty & (owner < heads)[..., None]).to(torch.int32) * BEYOND
            if layer.can_run_out:
                assert_compiled(lambda: self._has_room(free, owners.owned, valid), NO_SLOT)
            # An empty slot is taken before any token, and a cache that grows has one.
            taken = torch.full_like(free, -1) if layer.spec.grows else victims(layer, view, empty, owners)
            slot = best_slot(torch.where(free > 0, free, taken), owners)
        return slot, self._merge_evicted(slot, valid, view) if layer.spec.merges_in_steps else None

    def _has_room(self, free: Tensor, owned: Tensor, valid: Tensor | None) -> Tensor:
        """Whether each row with a token may evict, or has a free slot in every head, [] bool."""
        has_free = (owned & free.any(-1)[:, None]).any(-1).all(-1)
        fine = self._layer.tensors.paged().complete | has_free
        return (fine if valid is None else fine | ~valid[:, 0]).all()

    def _merge_evicted(self, slots: Tensor, valid: Tensor | None, view: View) -> SlotMerge:
        """Merge the tokens in `slots` [B, H, 1], which new tokens take, into other ones of their heads."""
        layer = self._layer
        tensors = layer.tensors
        heads = layer.shape.heads

        def every(t: Tensor) -> Tensor:
            return of_every_head(t, heads)

        keys, values, positions = (every(t) for t in (tensors.keys, tensors.values, tensors.positions))
        mine = owned_by(self.owner, heads).repeat_interleave(tensors.positions.shape[-1], -1)
        counts = None if tensors.log_counts is None else every(tensors.log_counts)
        at = positions.gather(-1, slots)
        there = (at >= 0) if valid is None else (at >= 0) & valid[:, :, None]
        own = None if counts is None else counts.gather(-1, slots)
        victim = Tokens(gather_slots(keys, slots), gather_slots(values, slots), at, own, there)
        priority = None
        if layer.spec.merger_traits.ranked:
            priority = every(finite_priority(layer.spec.selector.priority(tensors.state, view)))
        held = Tokens(keys, values, positions, counts, mine & (positions >= 0) & (positions != at), priority)
        return merge_victim(layer, victim, held, map_slots(every, tensors.state))

    # between steps

    def buffer_room(self) -> Tensor | None:
        """None: there is no buffer whose tokens must be demoted."""
        return None

    def demote_block(self) -> None:
        """Nothing is ever demoted."""

    def cut(self, size: int) -> None:
        """Cut pages into ones of `size` slots, which belong to the same heads."""
        tensors = self._layer.tensors
        pieces = tensors.positions.shape[-1] // size

        def smaller(t: Tensor) -> Tensor:
            return t.unflatten(2, (pieces, size)).flatten(1, 2)

        tensors.paged().owner = self.owner.repeat_interleave(pieces, 1)
        tensors.keys = smaller(tensors.keys)
        tensors.values = smaller(tensors.values)
        tensors.positions = smaller(tensors.positions)
        set_per_slot(self._layer, map_slots(smaller, per_slot(self._layer)))

    def lengthen(self, owner: Tensor) -> None:
        """Append pages, so that they have these owners [B, NB]; existing pages keep their contents."""
        tensors = self._layer.tensors
        added = owner.shape[1] - self.owner.shape[1]
        tensors.paged().owner = owner
        if added:
            tensors.keys = F.pad(tensors.keys, (0, 0, 0, 0, 0, added))
            tensors.values = F.pad(tensors.values, (0, 0, 0, 0, 0, added))
            tensors.positions = F.pad(tensors.positions, (0, 0, 0, added), value=-1)
            set_per_slot(self._layer, map_slots(lambda t: F.pad(t, (0, 0, 0, added)), per_slot(self._layer)))
