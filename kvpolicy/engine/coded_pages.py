"""The slots of a layer with a budget for each head and encoded tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine import demotion, token_batch
from kvpolicy.engine.attention import Past, ScoreTransform
from kvpolicy.engine.decode import NO_SLOT, assert_async
from kvpolicy.engine.link import Link
from kvpolicy.engine.page_attention import attend_pages
from kvpolicy.engine.page_codes import CodedPages, alloc_codes, by_field, decode_heads, encode
from kvpolicy.engine.paged_store import PagedStore, flat_pages
from kvpolicy.engine.pages import (
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
from kvpolicy.engine.row_limits import alloc_limits, buffer_slots
from kvpolicy.engine.selection import Selection
from kvpolicy.engine.state import join_states, map_slots, slot_tensors
from kvpolicy.engine.store import LayerStore
from kvpolicy.engine.token_batch import BEYOND, SlotData, TokenBatch
from kvpolicy.protocols import SINGLE_RANK, Codec, DecodeMode, HeadAllocator, Layout, Ranks, Selector, State, View


class CodedPagedStore(PagedStore):
    """The slots of one layer in pages that hold codes, and a full-precision buffer of each head.

    The pages of a head have a slot for each token that it may keep. Every new token is written to the buffer, which is
    equally large for all heads, and blocks of the oldest tokens are demoted from there to the pages of their head.
    `keys` and `values` are those of the buffer, [B, H, E, D]; positions, owners and state have `NB` pages of codes, and
    behind them the buffers of all heads as whole pages. `codes` has one entry per slot, [B, NB, P, ...], or per head.
    """

    def initialize(self, keys: Tensor, ranks: Ranks = SINGLE_RANK, group: int = 1) -> None:
        """Allocate a layer without pages, like `keys` [B, H, P, D], the first, with `group` query heads for each."""
        super().initialize(keys, ranks, group)
        batch, heads, _, dim = keys.shape
        self.keys = keys.new_empty(batch, heads, 0, dim)
        self.values = keys.new_empty(batch, heads, 0, dim)
        self.codes = (alloc_codes(self.codec, batch, heads, 0, 0, dim, keys.device),)
        self.limits = alloc_limits(self.codec, batch, heads, dim, keys.device, paged=True)

    # a prompt

    def _held_slots(self) -> tuple[Tensor, State]:
        table = page_table(self._body_owner, self.heads)
        body, buffer = self._parts(self.positions)
        positions = torch.cat([table.occupied(body), buffer], -1)
        coded = map_slots(lambda t: table.slots(self._parts(t)[0]), self.state)
        return positions, join_states(coded, map_slots(lambda t: self._parts(t)[1], self.state))

    def _place_selected(
        self, pending: PendingPrompt, selected: Selection, past: Past | None, counts: Tensor, size: int
    ) -> None:
        assert self.limits is not None
        table = page_table(self._body_owner, self.heads)
        coded = table.page.shape[-1] * self.positions.shape[-1]
        stays = selected.chosen[..., :coded]
        loose = TokenBatch(
            torch.cat([self.keys, pending.keys], 2) if self.keys.shape[2] else pending.keys,
            torch.cat([self.values, pending.values], 2) if self.values.shape[2] else pending.values,
            selected.positions[..., coded:],
            map_slots(lambda t: t[..., coded:], selected.state),
            selected.chosen[..., coded:],
        ).trimmed()
        # By age: in the order of their positions, in which a trimmed batch is.
        moved = demotion.demoted_counts(loose.chosen.sum(-1), self.limits, self.codec.traits, pending.idle)
        order = torch.arange(loose.chosen.shape[-1], device=moved.device).expand_as(loose.chosen)
        buffer = token_batch.slots_after(loose, order, moved, 0, self._buffer_size())
        # At least one column, so that there is something to take the contents of empty slots from.
        new = loose.window(0, max(int(moved.max()), 1))
        leaves = order[..., : new.chosen.shape[-1]] < moved[..., None]
        # Codes move with their tokens: nothing is encoded twice.
        fresh = encode(self.codec, self.codes[0], self.calibrations[0], new.keys, new.values, leaves, stays.any(-1))
        positions = torch.cat([selected.positions[..., :coded], new.positions], -1)
        placed = place_tokens(positions, torch.cat([stays, leaves], -1), counts, size)

        def moved_codes(name: str, held: Tensor) -> Tensor:
            return placed.take(torch.cat([table.slots(held), getattr(fresh, name)], 2))

        self.codes = (by_field(self.codec, self.codes[0], moved_codes, lambda name, t: t),)
        state = join_states(map_slots(lambda t: t[..., :coded], selected.state), new.state)
        self.keys = buffer.keys
        self.values = buffer.values
        self._assemble(
            placed.owner,
            placed.take(positions).masked_fill_(placed.empty, -1),
            map_slots(lambda t: placed.take(t).masked_fill_(placed.empty, 0), state),
            buffer.positions,
            buffer.state,
        )

    def _assemble(self, owner: Tensor, positions: Tensor, state: State, behind: Tensor, behind_state: State) -> None:
        """Set owners, positions and state: those of pages [B, NB, P], then those of the buffers [B, H, E]."""
        size = positions.shape[-1]
        pages = buffer_pages(behind.shape[-1], size)
        head = torch.arange(self.heads, device=owner.device).repeat_interleave(pages)
        self.owner = torch.cat([owner, head.expand(owner.shape[0], -1)], 1)
        self.positions = torch.cat([positions, as_pages(behind, size, -1)], 1)
        following = slot_tensors(behind_state)
        self.state = map_slots(lambda t: torch.cat([t, as_pages(next(following), size)], 1), state)

    def empty_parts(self) -> dict[str, State]:
        """Tensors on the device `meta`, or empty ones, like those of `parts`, for the pages that are set."""
        batch, heads, _, dim = self.keys.shape
        nowhere = torch.device("meta")
        pages, size = self._page_shape
        buffer = self.keys.new_empty(batch, heads, self.layout.exact, dim, device=nowhere)
        coded = pages - heads * buffer_pages(self.layout.exact, size)
        codes = (alloc_codes(self.codec, batch, heads, coded, size, dim, nowhere),)
        return super().empty_parts() | {"keys": buffer, "values": buffer, "codes": codes}

    def find_layout(self) -> Layout:
        """The slots of an average head, and those of its buffer."""
        return paged_layout(self.keys.shape[2], self._body_owner.shape[1], self.positions.shape[-1], self.heads)

    # reading and writing

    def past(self) -> Past | None:
        """Every slot, decoded, [B, H, n, D]: those of a head's pages, then its buffer; None if there are none."""
        if not self.owner.shape[1]:
            return None
        table = page_table(self._body_owner, self.heads)
        keys, values = decode_heads(self.codec, self.codes[0], self.calibrations[0], table, self.keys.dtype)
        occupied = self._held_slots()[0] >= 0
        return Past(torch.cat([keys, self.keys], 2), torch.cat([values, self.values], 2), occupied)

    def step_targets(self) -> list[tuple[Tensor, int]]:
        """Tensors that a step writes slots of, in the order of the writes, and the heads of each."""
        paged = [(flat_pages(target), self.heads) for target in (*slot_tensors(self.state), self.positions)]
        emptied = [] if self.grows else [paged[-1]]
        return [*emptied, (self.keys, 1), (self.values, 1), *paged]

    def write(self, slots: Tensor, data: SlotData | None, mask: Tensor | None, stage: int | None = None) -> None:
        """Write tokens to slots, or empty slots, in place.

        Args:
            slots: [B, H, n] int64: slots of each head's buffer, or without data, slots counted over all pages.
            data: The tokens; None to empty the slots.
            mask: Which of the slots are written, [B, H, n] bool; None for all.
            stage: Unused: only `demote_block` writes codes.
        """
        assert stage is None
        if data is not None:
            LayerStore._write_rows(self, self.keys, slots, data.keys, mask)
            LayerStore._write_rows(self, self.values, slots, data.values, mask)
            slots = self._over_all_pages(slots)
            for target, item in zip(slot_tensors(self.state), slot_tensors(data.state), strict=True):
                self._write_rows(target, slots, item, mask)
        positions = torch.full_like(slots, -1, dtype=torch.int32) if data is None else data.positions
        self._write_rows(self.positions, slots, positions, mask)

    # a decode step

    def _attend(self, q: Tensor, transform: ScoreTransform, want_weights: bool) -> tuple[Tensor, Tensor | None]:
        self._count_read(self.link)
        owner = self._body_owner
        pages = CodedPages(self.codec, self.codes[0], self.calibrations[0], owner, self.heads, self.values.dtype)
        buffer = (self.keys, self.values)
        occupied = self.positions >= 0
        out, weights = attend_pages(q, pages, occupied, self.owner, self.heads, transform, buffer)
        return out, weights if want_weights else None

    def _free_slot(self, view: View, valid: Tensor | None) -> tuple[Tensor, None]:
        """A slot of the buffer for each head's new token, [B, H, 1], after an eviction in heads that are full."""
        size = self.positions.shape[-1]
        self._require_pages(owned_by(self._body_owner, self.heads), valid)
        held = self.tokens_by_head()
        full = held >= self._pages_by_head() * size  # [B, H]
        if valid is not None:
            full = full & valid
        # A head that is full is given pages between steps unless its row has all that it may have.
        assert_async((self.complete[:, None] | ~full).all(), NO_SLOT)
        if not self.grows:
            # The evicted token may be coded, and the new one is not: they are in different slots.
            victim = best_slot(self._victims(view), self.owner, self.heads)
            self.write(victim, None, full[..., None])
        free = self._parts(self.positions)[1] < 0
        assert_async(free.any(-1).all(), NO_SLOT)
        return free.to(torch.uint8).argmax(-1, keepdim=True), None

    def _count_read(self, link: Link) -> None:
        link.whole((self.codes, self.keys, self.values, self.positions, self.owner))

    # demotion

    def demote_block(self) -> None:
        """Demote the oldest tokens of every head with a full buffer. Traceable, no host sync."""
        assert self.limits is not None
        positions = self._parts(self.positions)[1]
        state = map_slots(lambda t: self._parts(t)[1], self.state)
        occupied = positions >= 0
        due = occupied.sum(-1) >= self.limits.flush_threshold
        order = torch.where(occupied, positions, BEYOND).argsort(dim=-1, stable=True)
        # The width must not depend on data: rows with a smaller block mask the rest of the largest one.
        slots = order[..., : self.largest_block]
        batch = TokenBatch(self.keys, self.values, positions, state, occupied).take(slots)
        rank = torch.arange(slots.shape[-1], device=slots.device)
        leaves = due[..., None] & (rank < self._row_block())
        body = self._parts(self.positions)[0]
        owner = self._body_owner
        # Only a head without any code may have its parameters fitted again: codes are read with them.
        has_codes = (owned_by(owner, self.heads) & (body >= 0).any(-1)[:, None]).any(-1)
        fresh = encode(self.codec, self.codes[0], self.calibrations[0], batch.keys, batch.values, leaves, has_codes)
        # No token lacks a slot: `_free_slot` lets no head hold more tokens, buffer included, than its pages have slots.
        into = first_free(body, owner, self.heads, slots.shape[-1])

        def write(name: str, target: Tensor) -> Tensor:
            write_pages(target, into, getattr(fresh, name), leaves)
            return target

        by_field(self.codec, self.codes[0], write, lambda name, t: t)
        write_pages(self.positions, into, batch.positions, leaves)
        for target, item in zip(slot_tensors(self.state), slot_tensors(batch.state), strict=True):
            write_pages(target, into, item, leaves)
        self.write(self._over_all_pages(slots), None, leaves)

    def _buffered(self) -> Tensor:
        return (self._parts(self.positions)[1] >= 0).sum(-1)

    def _count_free_steps(self) -> float:
        assert self.limits is not None
        return min(super()._count_free_steps(), int((self.limits.flush_threshold - self._buffered()).min()))

    # capacity

    def _lengthen_pages(self, owner: Tensor) -> None:
        batch, pages = owner.shape
        old, behind = self._parts(self.positions)
        added = pages - old.shape[1]
        # More tokens may need a larger buffer too: an automatic one grows with the row.
        more = self._buffer_size() - self.keys.shape[2]

        def longer(name: str, t: Tensor) -> Tensor:
            return torch.cat([t, t.new_zeros(batch, added, *t.shape[2:])], 1)

        state = map_slots(lambda t: longer("", self._parts(t)[0]), self.state)
        behind_state = map_slots(lambda t: F.pad(self._parts(t)[1], (0, more)), self.state)
        self.codes = (by_field(self.codec, self.codes[0], longer, lambda name, t: t),)
        self.keys = F.pad(self.keys, (0, 0, 0, more))
        self.values = F.pad(self.values, (0, 0, 0, more))
        positions = F.pad(old, (0, 0, 0, added), value=-1)
        self._assemble(owner, positions, state, F.pad(behind, (0, more), value=-1), behind_state)

    def _buffer_size(self) -> int:
        """Slots of each head's buffer; they never become fewer."""
        return max(self.keys.shape[2], buffer_slots(self.codec, self.capacity))

    # sizes

    def _parts(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """The pages of codes [B, NB, P] and the buffers [B, H, E] of a tensor with one entry per slot."""
        pages = self._body_owner.shape[1]
        return t[:, :pages], from_pages(t[:, pages:], self.heads, self.keys.shape[2])

    @property
    def _body_owner(self) -> Tensor:
        pages = buffer_pages(self.keys.shape[2], self.positions.shape[-1]) * self.heads
        return self.owner[:, : self.owner.shape[1] - pages]

    def _over_all_pages(self, slots: Tensor) -> Tensor:
        """Slots [B, H, n] of each head's buffer, counted over all pages of the row."""
        size = self.positions.shape[-1]
        first = self._body_owner.shape[1]
        pages = buffer_pages(self.keys.shape[2], size)
        head = torch.arange(self.heads, device=slots.device)[:, None]
        return slots + (first + head * pages) * size


def paged_store(
    layer_idx: int, selector: Selector, codec: Codec, decode: DecodeMode, head_allocator: HeadAllocator
) -> PagedStore:
    """An empty store of a layer with a budget for each head, for any codec."""
    kind = CodedPagedStore if codec.stages else PagedStore
    return kind(layer_idx, selector, codec, decode, head_allocator)
