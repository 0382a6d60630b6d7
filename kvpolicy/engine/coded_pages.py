"""Pages that hold codes, and a full-precision buffer of each head."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine import demotion, token_batch
from kvpolicy.engine.decode import NO_SLOT, assert_compiled
from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.link import Link
from kvpolicy.engine.merging import SlotMerge, merge_evicted, merge_victim
from kvpolicy.engine.page_attention import BufferedPages, PageAttention, attend_pages
from kvpolicy.engine.page_codes import CodedPages, by_field, decode_heads, encode
from kvpolicy.engine.page_slots import (
    count_tokens,
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
from kvpolicy.engine.pages import (
    Owners,
    PageTable,
    as_pages,
    best_slot,
    buffer_pages,
    first_free,
    from_pages,
    owned_by,
    page_table,
    paged_layout,
    place_tokens,
    write_pages,
)
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.row_limits import buffer_slots, row_block_of
from kvpolicy.engine.selection import Selection, finite_priority
from kvpolicy.engine.slot_writer import write_masked
from kvpolicy.engine.state import join_states, map_slots, map_state, slot_tensors
from kvpolicy.engine.token_batch import BEYOND, SlotData, TokenBatch
from kvpolicy.engine.undo_log import Targets
from kvpolicy.kernels.slot_writes import flat_slots, gather_slots, needs_no_index
from kvpolicy.protocols import Calibration, Layout, State, Tokens, View
from kvpolicy.statistics.windows import Past, ScoreTransform


class CodedPageBody:
    """The pages of a layer with a codec: they hold codes, and every new token is written to a buffer of its head.

    The pages of a head have a slot for each token that it may keep. The buffer is equally large for all heads, and
    blocks of the oldest tokens are demoted from there to the pages of their head. `keys` and `values` are those of the
    buffer, [B, H, E, D]; positions, owners and state have `NB` pages of codes, and behind them the buffers of all heads
    as whole pages. `codes` has one entry per slot, [B, NB, P, ...], or per head.
    """

    def __init__(self, layer: LayerContents) -> None:
        """Hold the pages of `layer`."""
        self._layer = layer
        self._codec = layer.spec.codec
        self._traits = layer.spec.codec_traits

    @property
    def owner(self) -> Tensor:
        """The owners of the pages that the head allocator divides, [B, NB]: those without the buffers."""
        tensors = self._layer.tensors
        pages = buffer_pages(tensors.keys.shape[2], tensors.positions.shape[-1]) * self._heads
        every = tensors.paged().owner
        return every[:, : every.shape[1] - pages]

    def find_layout(self) -> Layout:
        """The slots of an average head, and those of its buffer."""
        tensors = self._layer.tensors
        return paged_layout(
            tensors.keys.shape[2], self.owner.shape[1], tensors.positions.shape[-1], self._layer.shape.heads
        )

    # a prompt

    def held_slots(self) -> tuple[Tensor, State]:
        """Positions [B, H, n] of the slots of each head, those of its buffer last, and the selector's state of them."""
        tensors = self._layer.tensors
        table = page_table(self.owner, self._heads)
        body, buffer = self._parts(tensors.positions)
        positions = torch.cat([table.occupied(body), buffer], -1)
        coded = map_slots(lambda t: table.slots(self._parts(t)[0]), tensors.state)
        return positions, join_states(coded, map_slots(lambda t: self._parts(t)[1], tensors.state))

    def place(self, pending: PendingPrompt, selected: Selection, past: Past | None, counts: Tensor, size: int) -> None:
        """Lay out the selected tokens in pages and buffers; see `ExactPageBody.place`."""
        tensors = self._layer.tensors
        assert tensors.limits is not None
        table = page_table(self.owner, self._heads)
        coded = table.page.shape[-1] * tensors.positions.shape[-1]
        stays = selected.chosen[..., :coded]
        loose = TokenBatch(
            torch.cat([tensors.keys, pending.keys], 2) if tensors.keys.shape[2] else pending.keys,
            torch.cat([tensors.values, pending.values], 2) if tensors.values.shape[2] else pending.values,
            selected.positions[..., coded:],
            map_slots(lambda t: t[..., coded:], selected.state),
            selected.chosen[..., coded:],
            map_state(lambda t: F.pad(self._parts(t)[1], (0, pending.keys.shape[2])), tensors.counts),
        )
        if self._layer.spec.merger_traits.when != "never":
            loose = merge_evicted(self._layer, loose, selected, pending, past, slice(0, coded))
        else:
            loose = loose.trimmed()
        # By age: in the order of their positions, in which a trimmed batch is.
        moved = demotion.demoted_counts(loose.chosen.sum(-1), tensors.limits, self._traits, pending.idle)
        order = torch.arange(loose.chosen.shape[-1], device=moved.device).expand_as(loose.chosen)
        buffer = token_batch.slots_after(loose, order, moved, 0, self._buffer_size())
        # At least one column, so that there is something to take the contents of empty slots from.
        new = loose.window(0, max(int(moved.max()), 1))
        leaves = order[..., : new.chosen.shape[-1]] < moved[..., None]
        # Codes move with their tokens: nothing is encoded twice.
        fresh = encode(self._codec, tensors.codes[0], self._calibration, new.keys, new.values, leaves, stays.any(-1))
        positions = torch.cat([selected.positions[..., :coded], new.positions], -1)
        placed = place_tokens(positions, torch.cat([stays, leaves], -1), counts, size)

        def moved_codes(name: str, held: Tensor) -> Tensor:
            return placed.take(torch.cat([table.slots(held), getattr(fresh, name)], 2))

        tensors.codes = (by_field(self._codec, tensors.codes[0], moved_codes, lambda name, t: t),)
        coded_counts = map_state(lambda t: table.slots(self._parts(t)[0]), tensors.counts)
        held = (map_slots(lambda t: t[..., :coded], selected.state), coded_counts)
        state = join_states(held, (new.state, new.counts))
        tensors.keys = buffer.keys
        tensors.values = buffer.values
        self._assemble(
            placed.owner,
            placed.take(positions).masked_fill_(placed.empty, -1),
            map_slots(lambda t: placed.take(t).masked_fill_(placed.empty, 0), state),
            buffer.positions,
            (buffer.state, buffer.counts),
        )

    def _assemble(self, owner: Tensor, positions: Tensor, state: State, behind: Tensor, behind_state: State) -> None:
        """Set owners, positions, state and counts: those of pages [B, NB, P], then those of the buffers [B, H, E]."""
        tensors = self._layer.tensors
        size = positions.shape[-1]
        pages = buffer_pages(behind.shape[-1], size)
        head = torch.arange(self._heads, device=owner.device).repeat_interleave(pages)
        tensors.paged().owner = torch.cat([owner, head.expand(owner.shape[0], -1)], 1)
        tensors.positions = torch.cat([positions, as_pages(behind, size, -1)], 1)
        following = slot_tensors(behind_state)
        joined = map_slots(lambda t: torch.cat([t, as_pages(next(following), size)], 1), state)
        set_per_slot(self._layer, joined)

    # reading and writing

    def past(self) -> Past | None:
        """Every slot, decoded, [B, H, n, D]: those of a head's pages, then its buffer; None if there are none."""
        tensors = self._layer.tensors
        if not tensors.paged().owner.shape[1]:
            return None
        table = page_table(self.owner, self._heads)
        keys, values = decode_heads(self._codec, tensors.codes[0], self._calibration, table, tensors.keys.dtype)
        occupied = self.held_slots()[0] >= 0
        counts = None
        if tensors.log_counts is not None:
            coded, buffer = self._parts(tensors.log_counts)
            counts = torch.cat([table.slots(coded), buffer], -1)
        return Past(torch.cat([keys, tensors.keys], 2), torch.cat([values, tensors.values], 2), occupied, counts)

    def step_targets(self) -> Targets:
        """The tensors that a decode step writes to, by name, and the slots of each head."""
        tensors = self._layer.tensors
        heads = self._heads
        # Before "positions": the slot of an evicted token is emptied before the new one is written.
        emptied = {} if self._layer.spec.grows else {"emptied": (flat_pages(tensors.positions), heads)}
        written = slots_per_step(self._layer)
        vectors = {"keys": (tensors.keys, written), "values": (tensors.values, written)}
        return emptied | vectors | dict(paged_targets(self._layer))

    def write(self, slots: Tensor, data: SlotData, mask: Tensor | None) -> None:
        """Write tokens to slots [B, H, n] of each head's buffer, in place, where `mask` [B, H, n] is set."""
        tensors = self._layer.tensors
        undo = self._layer.undo
        index: Tensor | None = None
        if not needs_no_index(tensors.keys, slots):
            index = flat_slots(slots, tensors.keys.shape[2], self._layer.memo.once)
        write_masked("keys", tensors.keys, slots, data.keys, mask, undo, index)
        write_masked("values", tensors.values, slots, data.values, mask, undo, index)
        slots = self._over_all_pages(slots)
        pairs = zip(slot_tensors(per_slot(self._layer)), slot_tensors((data.state, data.counts)), strict=True)
        for number, (target, item) in enumerate(pairs):
            write_flat(f"state.{number}", target, slots, item, mask, undo)
        write_flat("positions", tensors.positions, slots, data.positions, mask, undo)

    def _empty(self, slots: Tensor, mask: Tensor | None) -> None:
        """Empty slots counted over all pages, [B, H, n], where `mask` [B, H, n] is set, or all."""
        nothing = self._layer.memo.once(torch.full, slots.shape, -1, dtype=torch.int32, device=slots.device)
        write_flat("emptied", self._layer.tensors.positions, slots, nothing, mask, self._layer.undo)

    # a decode step

    def attend(self, q: Tensor, transform: ScoreTransform) -> PageAttention:
        """Attend from one token per row to every page and to the buffers; see `attend_pages`."""
        tensors = self._layer.tensors
        empty = tensors.positions < 0
        owners = self._owners()
        head = owners.head[:, : self.owner.shape[1]]
        coded = CodedPages(self._codec, tensors.codes[0], self._calibration, head, self._heads, tensors.values.dtype)
        pages = BufferedPages(coded, tensors.keys, tensors.values, empty.shape[-1])
        none_alone = self._layer.evicts  # a head that evicts holds a token
        return attend_pages(q, pages, empty, owners, transform, tensors.log_counts, none_alone=none_alone)

    def free_slot(self, view: View, valid: Tensor | None) -> tuple[Tensor, SlotMerge | None]:
        """A slot of the buffer for each head's new token, [B, H, 1], after an eviction in heads that are full.

        And the slot of the buffer that takes in what was evicted, if tokens are merged in steps.
        """
        tensors = self._layer.tensors
        owners = self._owners()
        require_pages(self._layer, owners.first(self.owner.shape[1]), valid)
        empty = view.positions < 0
        full = self._full_heads(empty, owners, valid)
        merge = None
        if not self._layer.spec.grows:
            # The evicted token may be coded, and the new one is not: they are in different slots.
            victim = best_slot(victims(self._layer, view, empty, owners), owners)
            if self._layer.spec.merges_in_steps:
                every = torch.ones_like(victim, dtype=torch.bool) if full is None else full
                merge = self._merge_evicted(victim, every, view)
            self._empty(victim, full)
        buffer = self._parts(tensors.positions)[1]
        assert_compiled(lambda: (buffer < 0).any(-1).all(), NO_SLOT)
        return buffer.argmin(-1, keepdim=True), merge  # an empty slot; of equal ones the first

    def _owners(self) -> Owners:
        layer = self._layer
        return Owners.of(layer.tensors.paged().owner, self._heads, layer.memo.once, all_used=layer.evicts)

    def _full_heads(self, empty: Tensor, owners: Owners, valid: Tensor | None) -> Tensor | None:
        """Which heads evict a token for the new one that they get, [B, H, 1] bool; None if all do."""
        if self._layer.evicts:
            return None if valid is None else valid[..., None].expand(-1, self._heads, 1)
        owned = owners.owned
        slots = owned[..., : self.owner.shape[1]].sum(-1) * empty.shape[-1]
        full = count_tokens(~empty, owned) >= slots  # [B, H]
        if valid is not None:
            full = full & valid
        # A head that is full is given pages between steps unless its row has all that it may have.
        assert_compiled(lambda: (self._layer.tensors.paged().complete[:, None] | ~full).all(), NO_SLOT)
        return full[..., None]

    def _merge_evicted(self, slots: Tensor, there: Tensor, view: View) -> SlotMerge:
        """Merge the tokens in `slots` [B, H, 1], counted over all pages, into other ones of the buffers, if `there`."""
        layer = self._layer
        tensors = layer.tensors
        size = tensors.positions.shape[-1]
        pages = self.owner.shape[1]
        # A head's token is in one part only, and every part is asked for one: which part, the host must not know.
        page = (slots // size).clamp_max(pages - 1)
        table = PageTable(page, torch.ones_like(page, dtype=torch.bool))
        coded = decode_heads(self._codec, tensors.codes[0], self._calibration, table, tensors.keys.dtype)
        within = slots % size
        first = self._over_all_pages(torch.zeros_like(slots))
        buffered = (slots - first).clamp(0, tensors.keys.shape[2] - 1)
        is_coded = (slots < pages * size)[..., None]
        keys, values = (
            torch.where(is_coded, gather_slots(of_pages, within), gather_slots(held, buffered))
            for of_pages, held in zip(coded, (tensors.keys, tensors.values), strict=True)
        )

        def every(t: Tensor) -> Tensor:
            return of_every_head(t, self._heads)

        at = every(tensors.positions).gather(-1, slots)
        own = counts = None
        if tensors.log_counts is not None:
            own = every(tensors.log_counts).gather(-1, slots)
            counts = self._parts(tensors.log_counts)[1]
        positions = self._parts(tensors.positions)[1]
        priority = None
        if layer.spec.merger_traits.ranked:
            priority = self._parts(finite_priority(layer.spec.selector.priority(tensors.state, view)))[1]
        targets = (positions >= 0) & (positions != at)
        held = Tokens(tensors.keys, tensors.values, positions, counts, targets, priority)
        state = map_slots(lambda t: self._parts(t)[1], tensors.state)
        return merge_victim(layer, Tokens(keys, values, at, own, there), held, state)

    def count_read(self, link: Link) -> None:
        """Count on `link` what a decode step reads."""
        tensors = self._layer.tensors
        owner = tensors.paged().owner
        link.whole((tensors.codes, tensors.keys, tensors.values, tensors.positions, tensors.counts, owner))

    # between steps

    def demote_block(self) -> None:
        """Demote the oldest tokens of every head with a full buffer. Traceable, no host sync."""
        tensors = self._layer.tensors
        assert tensors.limits is not None
        positions = self._parts(tensors.positions)[1]
        state = map_slots(lambda t: self._parts(t)[1], tensors.state)
        occupied = positions >= 0
        due = occupied.sum(-1) >= tensors.limits.flush_threshold
        order = torch.where(occupied, positions, BEYOND).argsort(dim=-1, stable=True)
        # The width must not depend on data: rows with a smaller block mask the rest of the largest one.
        slots = order[..., : self._layer.largest_block]
        counts = map_state(lambda t: self._parts(t)[1], tensors.counts)
        batch = TokenBatch(tensors.keys, tensors.values, positions, state, occupied, counts).take(slots)
        rank = torch.arange(slots.shape[-1], device=slots.device)
        leaves = due[..., None] & (rank < row_block_of(tensors.limits, self._traits))
        body = self._parts(tensors.positions)[0]
        owner = self.owner
        # Only a head without any code may have its parameters fitted again: codes are read with them.
        has_codes = (owned_by(owner, self._heads) & (body >= 0).any(-1)[:, None]).any(-1)
        fresh = encode(self._codec, tensors.codes[0], self._calibration, batch.keys, batch.values, leaves, has_codes)
        # No token lacks a slot: `free_slot` lets no head hold more tokens, buffer included, than its pages have slots.
        into = first_free(body, owner, self._heads, slots.shape[-1])

        def write(name: str, target: Tensor) -> Tensor:
            write_pages(target, into, getattr(fresh, name), leaves)
            return target

        by_field(self._codec, tensors.codes[0], write, lambda name, t: t)
        write_pages(tensors.positions, into, batch.positions, leaves)
        pairs = zip(slot_tensors(per_slot(self._layer)), slot_tensors((batch.state, batch.counts)), strict=True)
        for target, item in pairs:
            write_pages(target, into, item, leaves)
        self._empty(self._over_all_pages(slots), leaves)

    def buffer_room(self) -> Tensor:
        """Tokens that the buffer of each head takes until a block must be demoted, [B, H]."""
        tensors = self._layer.tensors
        limits = tensors.limits
        assert limits is not None
        return limits.flush_threshold - (self._parts(tensors.positions)[1] >= 0).sum(-1)

    def cut(self, size: int) -> None:
        """Cut pages into ones of `size` slots, which belong to the same heads."""
        tensors = self._layer.tensors
        pieces = tensors.positions.shape[-1] // size

        def smaller(t: Tensor) -> Tensor:
            return t.unflatten(2, (pieces, size)).flatten(1, 2)

        held = per_slot(self._layer)
        owner = self.owner.repeat_interleave(pieces, 1)
        body, behind = self._parts(tensors.positions)
        state = map_slots(lambda t: smaller(self._parts(t)[0]), held)
        behind_state = map_slots(lambda t: self._parts(t)[1], held)
        tensors.codes = (by_field(self._codec, tensors.codes[0], lambda name, t: smaller(t), lambda name, t: t),)
        self._assemble(owner, smaller(body), state, behind, behind_state)

    def lengthen(self, owner: Tensor) -> None:
        """Append pages, so that they have these owners [B, NB]; existing pages keep their contents."""
        tensors = self._layer.tensors
        batch, pages = owner.shape
        old, behind = self._parts(tensors.positions)
        added = pages - old.shape[1]
        # More tokens may need a larger buffer too: an automatic one grows with the row.
        more = self._buffer_size() - tensors.keys.shape[2]

        def longer(name: str, t: Tensor) -> Tensor:
            return torch.cat([t, t.new_zeros(batch, added, *t.shape[2:])], 1)

        held = per_slot(self._layer)
        state = map_slots(lambda t: longer("", self._parts(t)[0]), held)
        behind_state = map_slots(lambda t: F.pad(self._parts(t)[1], (0, more)), held)
        tensors.codes = (by_field(self._codec, tensors.codes[0], longer, lambda name, t: t),)
        tensors.keys = F.pad(tensors.keys, (0, 0, 0, more))
        tensors.values = F.pad(tensors.values, (0, 0, 0, more))
        positions = F.pad(old, (0, 0, 0, added), value=-1)
        self._assemble(owner, positions, state, F.pad(behind, (0, more), value=-1), behind_state)

    def _buffer_size(self) -> int:
        """Slots of each head's buffer; they never become fewer."""
        return max(self._layer.tensors.keys.shape[2], buffer_slots(self._codec, self._layer.capacity))

    def _parts(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """The pages of codes [B, NB, P] and the buffers [B, H, E] of a tensor with one entry per slot."""
        pages = self.owner.shape[1]
        return t[:, :pages], from_pages(t[:, pages:], self._heads, self._layer.tensors.keys.shape[2])

    def _over_all_pages(self, slots: Tensor) -> Tensor:
        """Slots [B, H, n] of each head's buffer, counted over all pages of the row."""
        tensors = self._layer.tensors
        size = tensors.positions.shape[-1]
        first = self.owner.shape[1]
        pages = buffer_pages(tensors.keys.shape[2], size)
        ends = (first + self._heads * pages) * size
        arange = partial(self._layer.memo.once, torch.arange)
        return slots + arange(first * size, ends, pages * size, device=slots.device)[:, None]

    @property
    def _heads(self) -> int:
        return self._layer.shape.heads

    @property
    def _calibration(self) -> Calibration:
        return self._layer.calibrations[0]
