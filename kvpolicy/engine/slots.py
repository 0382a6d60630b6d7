"""The slots of one layer: its tensors and their invariants.

A layer's slots are a full-precision buffer in the model's dtype, where every new token is written, and the codec's
stages, to which tokens are demoted in blocks (see `kvpolicy.protocols.Layout`). A prefill allocates the slots, and a
decode step overwrites one slot per head in place. The order of slots has no meaning, because keys carry their position.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine import capacity, merging
from kvpolicy.engine.attention import Past
from kvpolicy.engine.codec_view import CodecView, StagePart
from kvpolicy.engine.contents import LayerContents
from kvpolicy.engine.layout import grown_codes, grown_layout, grown_slots, grown_state
from kvpolicy.engine.merging import SlotMerge
from kvpolicy.engine.rotary import SlotRotary
from kvpolicy.engine.row_limits import has_dictionary, with_tokens
from kvpolicy.engine.selection import finite_priority
from kvpolicy.engine.state import map_slots, map_state, slot_tensors
from kvpolicy.engine.token_batch import SlotData
from kvpolicy.kernels.slot_writes import gather_slots, write_slots
from kvpolicy.protocols import (
    StageStore,
    Tokens,
    View,
    traits_for,
)


class LayerSlots(LayerContents):
    """How the slots of a layer are written, grown and read. `LayerStore` operates on them."""

    # writing

    def write(self, slots: Tensor, data: SlotData | None, mask: Tensor | None, stage: int | None = None) -> None:
        """Write tokens to slots, or empty slots, in place: every change of a slot in a decode step goes through here.

        Args:
            slots: Slots of each head, [B, H, n] int64, counted from the first slot, or from the first one of `stage`.
            data: The tokens, keys in the codec's key space if they are coded; None to empty the slots.
            mask: Which of the slots are written, [B, H, n] bool; None for all.
            stage: The stage that codes the tokens; None for the full-precision buffer.
        """
        if data is None:
            slots = slots if stage is None else slots + self._stage_range(stage).start
            self._write_rows(self.positions, slots, torch.full_like(slots, -1, dtype=torch.int32), mask)
            self.refresh_slots(slots, stage)
            return
        if stage is None:
            self._write_rows(self.keys, slots, data.keys, mask)
            self._write_rows(self.values, slots, data.values, mask)
        else:
            assert mask is not None
            at = self._stage_range(stage)
            # Read before the new positions are written: codecs fit parameters where a head or a group was empty.
            occupied = self.positions[..., at] >= 0
            store = self.stage_store(stage)
            self.codec.stages[stage].write(store, data.keys, data.values, slots, mask, occupied)
            slots = slots + at.start
        self._write_rows(self.positions, slots, data.positions, mask)
        for target, item in zip(
            slot_tensors((self.state, self.counts)), slot_tensors((data.state, data.counts)), strict=True
        ):
            self._write_rows(target, slots, item, mask)
        self.refresh_slots(slots, stage)

    def _write_rows(self, target: Tensor, slots: Tensor, data: Tensor, mask: Tensor | None) -> None:
        if mask is not None:
            # A masked token writes back what its slot holds. This is safe because `slots` are distinct within a head,
            # masked or not, or have the same data and mask: a masked duplicate of a written slot could undo the write.
            written = mask.reshape(*mask.shape, *(1,) * (target.dim() - 3))
            data = torch.where(written, data, gather_slots(target, slots))
        if self.undo is not None and self.undo.has_room:  # block work is undone by a copy of the layer
            self.undo.record(target, slots)
        write_slots(target, slots, data)

    def step_targets(self) -> list[tuple[Tensor, int]]:
        """The tensors that a decode step writes to, in this order, and the slots of each head."""
        written = 2 if merging.merges_in_steps(self.merger, self.grows) else 1
        emptied = [(self.positions, 1)] if sum(self.layout.coded) and not self.grows else []
        per_slot = (self.keys, self.values, self.positions, *slot_tensors((self.state, self.counts)))
        return [*emptied, *((target, written) for target in per_slot)]

    def refresh_slots(self, slots: Tensor, stage: int | None) -> None:
        """Recompute the index entries of slots [B, H, n] that were written, counted from the layer's first slot."""

    def merge_evicted(self, victim: Tensor, evicted: Tensor, valid: Tensor | None, view: View) -> SlotMerge | None:
        """Merge the token in slot `victim` [B, H, 1] into another one, in the heads where it is `evicted` [B, H, 1].

        Nothing is written: what is returned is written with the new token. None if nothing is merged in decoding.
        """
        if not merging.merges_in_steps(self.merger, self.grows):
            return None
        if valid is not None:
            evicted = evicted & valid[:, :, None]
        exact = (self.keys, self.values)
        token = merging.slot_tokens(victim, evicted, exact, self.coded_view(), self.positions, self.counts)
        positions = self.positions[..., : self.layout.exact]
        counts = map_state(lambda t: t[..., : self.layout.exact], self.counts)
        # A head holds a position once. Positions, since numbers of slots would be int64, and are slower to compare.
        targets = (positions >= 0) & (positions != token.positions)
        if self.reserved:  # codes refer to the tokens in dictionary slots, which must therefore stay as they are
            targets = targets & self._open_slots()
        priority = None
        if self.merger.traits.ranked:
            priority = finite_priority(self.selector.priority(self.state, view))[..., : self.layout.exact]
        held = Tokens(*exact, positions, counts if isinstance(counts, Tensor) else None, targets, priority)
        merge = self.merger.merge_token(self.merged, token, held)
        data = SlotData(
            keys=gather_slots(self.keys, merge.slot) if merge.keys is None else merge.keys.to(self.keys.dtype),
            values=merge.values.to(self.values.dtype),
            positions=self.positions.gather(-1, merge.slot),
            state=map_slots(lambda t: t.gather(-1, merge.slot), self.state),
            counts=map_state(lambda t: t.gather(-1, merge.slot), self.counts) if merge.counts is None else merge.counts,
        )
        return SlotMerge(merge.slot, merge.write_mask & evicted, data)

    # growing

    def _lengthen(self) -> None:
        """Grow the slots to the capacity, and keep what they hold."""
        old = self.layout.exact
        # `_grow_slots` empties the buffer, since a prompt places all tokens anew. Here they stay in place.
        positions = self.positions[..., :old]
        before = map_slots(lambda t: t[..., :old], (self.state, self.counts))
        self._grow_slots()
        self.positions[..., :old] = positions
        for target, item in zip(slot_tensors((self.state, self.counts)), slot_tensors(before), strict=True):
            target[..., :old] = item
        padding = (0, 0, 0, self.layout.exact - old)
        self.keys = F.pad(self.keys, padding)
        self.values = F.pad(self.values, padding)

    def _grow_slots(self) -> None:
        """Make the layout fit the capacity; slots of the full-precision buffer come out empty, but for dictionaries."""
        old = self.layout
        self.layout = grown_layout(old, self.codec.layout(self.capacity))
        self.positions, self.state = grown_slots(self.positions, self.state, old, self.layout, self.reserved)
        self.counts = grown_state(self.counts, old, self.layout, self.reserved)
        if self.reserved and self.limits is not None:
            self.positions[..., : self.reserved].masked_fill_(~has_dictionary(self.limits), -1)
        if self.layout.coded != old.coded:
            batch, heads, _, dim = self.keys.shape
            self.codes = grown_codes(
                self.codec, self.codes, self.layout.coded, (batch, heads, dim), self.positions.device
            )

    def _set_budget(self, budget: Tensor) -> None:
        """Let each row hold `budget` [B] tokens."""
        self.budget = budget
        tokens = budget.tolist()
        if self.limits is not None:
            # A budget may exceed all tokens that are expected, and slots are allocated for no more than those.
            allocated = [min(pair) for pair in zip(tokens, self.expected_len, strict=True)]
            self.limits = with_tokens(self.limits, self.codec, allocated, self.reserved)
            self.largest_block = max(traits_for(self.codec, count).block for count in allocated)
        self._may_exceed_plan = not self.grows and capacity.may_exceed_plan(self.expected_len, tokens)

    def _row_counts(self) -> list[int]:
        """Tokens in each row's fullest head."""
        return self.tokens_by_head().amax(-1).tolist()

    def _buffered(self) -> Tensor:
        """Tokens of each head in the full-precision buffer, the dictionary left out, [B, H]."""
        return ((self.positions[..., : self.layout.exact] >= 0) & self._open_slots()).sum(-1)

    def _is_full(self) -> bool:
        """Whether the full-precision buffer of a head is full, so that a block must be demoted."""
        return self.limits is not None and bool((self._buffered() >= self.limits.flush_threshold).any())

    def _buffer(self) -> SlotData:
        """The full-precision buffer; its keys and values may be shorter until a prompt is placed."""
        exact = self.layout.exact
        state = map_slots(lambda t: t[..., :exact], self.state)
        counts = map_state(lambda t: t[..., :exact], self.counts)
        return SlotData(self.keys, self.values, self.positions[..., :exact], state, counts)

    def _view(self) -> View:
        """The slots as the selector sees them in a step."""
        return View(self.positions, self.length, self.budget, self.layer_idx, self.ranks)

    # reading

    def coded_view(self) -> CodecView | None:
        """The coded slots as a decode step attends to them; None if there are none."""
        return CodecView(self._stage_parts()) if sum(self.layout.coded) else None

    def past(self) -> Past | None:
        """Every slot, decoded; None if there are none."""
        if not self.layout.slots:
            return None
        parts = [(self.keys, self.values), *CodecView(self._stage_parts()).read(self.keys.dtype)]
        keys = torch.cat([pair[0] for pair in parts], 2)
        values = torch.cat([pair[1] for pair in parts], 2)
        return Past(keys, values, self.positions >= 0, self.log_counts)

    def _stage_parts(self) -> list[StagePart]:
        sizes = enumerate(self.layout.coded)
        return [
            StagePart(
                self.codec.stages[stage],
                self.stage_store(stage),
                self._slot_rotary(stage),
                size,
                self._stage_range(stage).start,
            )
            for stage, size in sizes
            if size
        ]

    def _stage_range(self, stage: int) -> slice:
        """The slots of a stage."""
        start = self.layout.starts()[stage]
        return slice(start, start + self.layout.coded[stage])

    def stage_store(self, stage: int) -> StageStore:
        """The tensors of a stage, as the codec takes them."""
        wanted = self.limits is not None and self.codec.traits.query_absmax
        absmax = self.limits.query_absmax if self.limits is not None and wanted else None
        return StageStore(self.codes[stage], self.calibrations[stage], self._atoms(), absmax)

    def _slot_rotary(self, stage: int) -> SlotRotary | None:
        if self.rope is None or self.limits is None:
            return None
        positions = self.positions[..., self._stage_range(stage)]
        return SlotRotary(self.rope, positions, self.length - 1, self.limits.rope_offset)

    def _atoms(self) -> tuple[Tensor, Tensor] | None:
        """Keys, in the codec's key space, and values of the dictionary slots, [B, H, W, D]; 0 for an empty slot."""
        if not self.reserved or self.limits is None:
            return None
        # By pins and not by positions: codes refer to an atom even after its own token was evicted.
        empty = (self.limits.pins < 0)[..., None]
        keys = self.keys[:, :, : self.reserved].masked_fill(empty, 0)
        values = self.values[:, :, : self.reserved].masked_fill(empty, 0)
        return self._codec_keys(keys, self.limits.pins).to(keys.dtype), values

    def _codec_keys(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys [B, H, n, D] at positions [B, H, n] in the codec's key space."""
        if self.rope is None or self.limits is None:
            return keys
        return self.rope.unrotate(keys, positions + self.limits.rope_offset[:, None, None])

    def _open_slots(self) -> Tensor:
        """Slots of the full-precision buffer that any token may take, [B or 1, 1, E] bool: all but dictionary slots."""
        slots = torch.arange(self.layout.exact, device=self.positions.device)[None, None]
        if not self.reserved or self.limits is None:
            return slots >= 0
        return (slots >= self.reserved) | ~has_dictionary(self.limits)
