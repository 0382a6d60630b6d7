"""Equally many slots in every head of a layer: a full-precision buffer, and behind it the codec's stages.

Every new token is written to the buffer, in the model's dtype, and blocks of tokens are demoted from there to the
stages (see `kvpolicy.protocols.Layout`). A prompt allocates the slots, and a decode step overwrites one slot per head
in place. The order of slots has no meaning, because keys carry their position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine import layout, merging
from kvpolicy.engine.attention_part import Part
from kvpolicy.engine.decode import NO_ROOM, NO_SLOT, assert_compiled
from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.layer_index import LayerIndex, StepReads
from kvpolicy.engine.layer_tensors import LayerTensors
from kvpolicy.engine.layout import grown_codes, grown_layout, grown_slots, grown_state
from kvpolicy.engine.link import Link
from kvpolicy.engine.merging import SlotMerge
from kvpolicy.engine.partial_attention import attend_occupied
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.row_limits import RowBudget, has_dictionary, pin_tokens
from kvpolicy.engine.selection import Selection, eviction_scores, finite_priority, rank_candidates, select_tokens
from kvpolicy.engine.slot_codes import SlotCodes
from kvpolicy.engine.slot_demoter import SlotDemoter, assign_slots
from kvpolicy.engine.slot_writer import SlotWriter
from kvpolicy.engine.state import map_slots, map_state, slot_tensors
from kvpolicy.engine.token_batch import SlotData, TokenBatch
from kvpolicy.engine.trimming import ranked_again
from kvpolicy.engine.undo_log import Targets
from kvpolicy.protocols import LayerShape, Layout, State, Tokens, View
from kvpolicy.statistics.channel_sums import ChannelSums
from kvpolicy.statistics.statistic import first_of
from kvpolicy.statistics.windows import Past, ScoreTransform


class SlotGeometry:
    """The slots of a layer in which all heads have equally many; see `kvpolicy.engine.geometry.Geometry`.

    Attributes:
        layer: The layer.
        codes: Reads the slots.
        index: The index of the layer's reader.
        reads: Attends to the slots that the reader chooses.
        writer: Writes to the slots.
    """

    def __init__(self, layer: LayerContents) -> None:
        """Arrange the slots of `layer`."""
        self.layer = layer
        self._spec = layer.spec
        self.codes = SlotCodes(layer)
        self.index = LayerIndex(layer, self.codes)
        self.reads = StepReads(layer, self.codes, self.index)
        self.writer = SlotWriter(layer, self.codes, self.index)
        self._demoter = SlotDemoter(layer, self.codes, self.writer, self.index)

    def alloc(self, batch: int, shape: LayerShape, device: torch.device | str) -> LayerTensors:
        """Empty tensors for the layout that is set; on the device `meta` too."""
        return LayerTensors.of_slots(self._spec, batch, shape, self.layer.layout, device)

    def find_layout(self) -> Layout:
        """The layout, from the tensors where they determine it."""
        return self.layer.layout

    # a prompt

    def compress(
        self,
        pending: PendingPrompt,
        budget: RowBudget,
        *,
        massive: Tensor | None = None,
    ) -> None:
        """Bring a prompt under the budget: select, allocate slots, and place the selected tokens.

        Args:
            pending: The prompt, from `attend_prompt`.
            budget: Tokens of each row.
            massive: The prompt's tokens with the largest activations, [B, P] bool, if the codec pins them.
        """
        layer = self.layer
        tensors = layer.tensors
        self.index.is_current = False
        seen_before = tensors.length
        # Unlike in a step, not in place: `seen_before` is the same tensor and must keep the old lengths.
        tensors.length = pending.lengths(seen_before)
        merges = self._spec.merger_traits.when != "never"
        past = self.codes.past() if pending.reads_past or merges else None
        keep = budget.keep.to(tensors.positions.device)
        # The ranking has no name here, so that its statistics are freed before the tokens are placed.
        if pending.trimmed is None:
            selected = select_tokens(
                rank_candidates(layer, self.held_slots(), pending, past, seen_before, keep), pending.idle
            )
        else:
            selected = select_tokens(ranked_again(self._spec.selector, pending.trimmed, keep), pending.idle)
        keys = pending.keys
        values = pending.values
        if layer.layout.exact:  # a first prompt is not copied whole
            keys = torch.cat([tensors.keys.to(keys.device), keys], 2)
            values = torch.cat([tensors.values.to(values.device), values], 2)
        # Before `_allocate`, which empties the positions of the full-precision buffer: its tokens are placed again.
        batch = TokenBatch(keys, values, *self._evict(selected))
        if merges:
            coded = slice(layer.layout.exact, layer.layout.slots)
            batch = merging.merge_evicted(layer, batch, selected, pending, past, coded)
        # A row that has not begun gets its budget now: its first token may come in a decode step of the others.
        self._allocate(None if pending.idle is None else pending.idle & (seen_before > 0), budget)
        # By row, since a row may have had nothing but padding in the prompts before this one.
        first = (seen_before == 0) & (tensors.length > 0)
        if tensors.limits is not None and bool(first.any()):
            pin_tokens(tensors.limits, self._spec.codec_traits, pending.positions(seen_before), massive, first)
        data = self._demoter.place(batch, pending.idle, first)
        assign_slots(tensors, data)
        tensors.keys = data.keys
        tensors.values = data.values
        sums = first_of(ChannelSums, pending.statistics)
        salience = self.index.prompt_salience(None if sums is None else sums.sums, tensors.length - seen_before)
        placed = torch.ones_like(first) if pending.idle is None else ~pending.idle
        self.index.rebuild(first, salience, placed)
        tensors.hold(data.keys, data.values)  # from now on: the index is made from keys on the device
        self.fix_addresses()
        layer.schedule.note(None if pending.idle is None else ~pending.idle, tensors.length, tensors.budget)

    def _evict(self, selected: Selection) -> tuple[Tensor, State, Tensor, State]:
        """Evict from the coded slots what was not selected.

        Args:
            selected: The selection among the slots and the tokens of the prompt.

        Returns:
            Positions, state, choice and counts of the tokens that are not coded, which are placed again: those of the
            full-precision buffer, then those of the prompt.
        """
        layer = self.layer
        tensors = layer.tensors
        slots = tensors.positions.shape[-1]
        exact = layer.layout.exact

        def outside_codes(t: Tensor) -> Tensor:
            return torch.cat([t[..., :exact], t[..., slots:]], -1)

        chosen = outside_codes(selected.chosen)
        if layer.reserved:  # tokens of dictionary slots stay where they are
            chosen[..., :exact] &= self.codes.open_slots()
        # An evicted token leaves its codes behind: only the position says that a slot is empty.
        tensors.positions = selected.positions[..., :slots].masked_fill(~selected.chosen[..., :slots], -1)
        tensors.state = map_slots(lambda t: t[..., :slots], selected.state)
        counts = map_state(lambda t: F.pad(t[..., :exact], (0, chosen.shape[-1] - exact)), tensors.counts)
        return outside_codes(selected.positions), map_slots(outside_codes, selected.state), chosen, counts

    def _allocate(self, idle: Tensor | None, budget: RowBudget) -> None:
        """Make slots for a budget, and set it, but in rows that are `idle` [B] bool."""
        tensors = self.layer.tensors
        self.layer.expect(budget.expected_len.tolist(), idle)
        self._grow_slots()
        most = (budget.keep + budget.extra).to(tensors.positions.device)
        self._set_budget(most if idle is None else torch.where(idle, tensors.budget, most))

    # reading and writing

    def past(self) -> Past | None:
        """Every slot, decoded; None if there are none."""
        return self.codes.past()

    def held_slots(self) -> tuple[Tensor, State]:
        """Positions of the slots, [B, H, S] int32, and the selector's state of them."""
        return self.layer.tensors.positions, self.layer.tensors.state

    def write(self, slots: Tensor, data: SlotData, mask: Tensor | None) -> None:
        """Write new tokens to slots of the full-precision buffer, in place; see `SlotWriter.write`."""
        self.writer.write(slots, data, mask)

    def step_targets(self) -> Targets:
        """The tensors that a decode step writes to, by name, and the slots of each head."""
        return self.writer.step_targets()

    def refresh(self, slots: Tensor) -> None:
        """Update what is computed from slots [B, H, n] after they were written back."""
        # An index depends on what the slots hold alone, so that it is computed again and not kept.
        self.index.refresh_slots(slots, None, emptied=True)

    # a decode step

    def attend(self, q: Tensor, transform: ScoreTransform, want_weights: bool) -> tuple[Tensor, Tensor | None]:
        """Attend from one token per row to the slots that the reader chooses; see `StepReads.attend`."""
        return self.reads.attend(q, transform, want_weights)

    def attend_part(self, queries: Tensor, transform: ScoreTransform, *, whole: bool) -> Part:
        """Attend from many queries of each head to every slot, codes as codes; see `Geometry.attend_part`."""
        tensors = self.layer.tensors
        exact = (tensors.keys, tensors.values)
        occupied = None if whole else tensors.positions >= 0
        return attend_occupied(queries, exact, self.codes.view() or (), occupied, transform, tensors.log_counts)

    def count_read(self, link: Link) -> None:
        """Count on `link` what a decode step reads, and writes to host memory."""
        self.reads.count_read(link)
        self.writer.count_stored(link)

    def free_slot(self, view: View, valid: Tensor | None) -> tuple[Tensor, SlotMerge | None]:
        """A slot of the full-precision buffer for each head's new token, [B, H, 1], and where an evicted one goes."""
        layer = self.layer
        tensors = layer.tensors
        if self._spec.grows:
            assert_compiled(lambda: self._has_room(view, valid), NO_ROOM)
            if layer.shared is not None and layer.in_order:
                return layer.memo.once(_newest_slot, view.length, view.positions.shape[1]), None
            return self._empty_slot(), None
        if layer.is_full:
            slot = eviction_scores(self._spec.selector, tensors.state, view, None).argmax(-1, keepdim=True)
            if not self._spec.merges_in_steps:
                return slot, None
            return slot, self._merge_evicted(slot, torch.ones_like(slot, dtype=torch.bool), valid, view)
        empty = view.positions < 0
        if layer.evicts:  # every head is full
            full = None if valid is None else valid[:, :, None].expand(-1, empty.shape[1], 1)
            return self._evict_coded(view, empty, full)
        full = (~empty).sum(-1, keepdim=True) >= tensors.budget[:, None, None]
        if not sum(layer.layout.coded):
            # The new token takes the evicted one's slot. A row without a token writes nothing, wherever it points.
            scores = eviction_scores(self._spec.selector, tensors.state, view, empty)
            # Of several free slots, any will do: the order of slots has no meaning. Scores have no ties at the top,
            # since a head holds a position once.
            slot = torch.where(full, scores, empty).argmax(-1, keepdim=True)
            merge = self._merge_evicted(slot, full, valid, view) if self._spec.merges_in_steps else None
            if layer.may_exceed_plan:
                assert_compiled(lambda: (full | empty.any(-1, keepdim=True)).all(), NO_SLOT)
            return slot, merge
        return self._evict_coded(view, empty, full if valid is None else full & valid[:, :, None])

    def _evict_coded(self, view: View, empty: Tensor, full: Tensor | None) -> tuple[Tensor, SlotMerge | None]:
        """Evict a token of each head that is `full` [B, H, 1], or of all; see `free_slot`."""
        # The evicted token may be coded, and the new one is not: they are in different slots.
        victim = eviction_scores(self._spec.selector, self.layer.tensors.state, view, empty).argmax(-1, keepdim=True)
        merge = None
        if self._spec.merges_in_steps:
            every = torch.ones_like(victim, dtype=torch.bool) if full is None else full
            merge = self._merge_evicted(victim, every, None, view)
        self.writer.write(victim, None, full)
        return self._empty_slot(), merge

    def _empty_slot(self) -> Tensor:
        """The first empty slot of each head's full-precision buffer, [B, H, 1]."""
        layer = self.layer
        positions = layer.tensors.positions[..., : layer.layout.exact]
        if layer.reserved:
            positions = positions.masked_fill(~self.codes.open_slots(), 0)
        assert_compiled(lambda: (positions < 0).any(-1).all(), NO_SLOT)
        return positions.argmin(-1, keepdim=True)  # of equal ones the first

    def _has_room(self, view: View, valid: Tensor | None) -> Tensor:
        """Whether no head of a row with a token holds its budget, [] bool."""
        has_room = (view.valid.sum(-1) < self.layer.tensors.budget[:, None]).all(-1, keepdim=True)
        return (has_room if valid is None else has_room | ~valid).all()

    def _merge_evicted(self, victim: Tensor, evicted: Tensor, valid: Tensor | None, view: View) -> SlotMerge:
        """Merge the token in slot `victim` [B, H, 1] into another one, in the heads where it is `evicted` [B, H, 1].

        Nothing is written: what is returned is written with the new token.
        """
        layer = self.layer
        tensors = layer.tensors
        if valid is not None:
            evicted = evicted & valid[:, :, None]
        exact = (tensors.keys, tensors.values)
        token = merging.slot_tokens(victim, evicted, exact, self.codes.view(), tensors.positions, tensors.counts)
        positions = tensors.positions[..., : layer.layout.exact]
        counts = map_state(lambda t: t[..., : layer.layout.exact], tensors.counts)
        # A head holds a position once. Positions, since numbers of slots would be int64, and are slower to compare.
        targets = (positions >= 0) & (positions != token.positions)
        if layer.reserved:  # codes refer to the tokens in dictionary slots, which must therefore stay as they are
            targets = targets & self.codes.open_slots()
        priority = None
        if self._spec.merger_traits.ranked:
            priority = finite_priority(self._spec.selector.priority(tensors.state, view))[..., : layer.layout.exact]
        held = Tokens(*exact, positions, counts if isinstance(counts, Tensor) else None, targets, priority)
        return merging.merge_victim(layer, token, held, tensors.state)

    # demotion

    def full_rows(self) -> Tensor | None:
        """Rows with a head whose full-precision buffer is full, [B] bool; None if no codec demotes tokens."""
        limits = self.layer.tensors.limits
        return None if limits is None else (self.codes.buffered() >= limits.flush_threshold).any(-1)

    def demote(self) -> None:
        """Demote a block of every head with a full buffer, or code all of its tokens again."""
        demotion = self._spec.codec_traits.demotion
        if demotion is not None and demotion.recodes:
            self._demoter.recode()
        else:
            self._demoter.demote_block()

    # growing

    def count_free_steps(self) -> float:
        """Decode steps until tokens must be demoted, or slots added."""
        layer = self.layer
        tensors = layer.tensors
        if not layer.can_run_out:
            return layout.UNLIMITED
        occupied = (tensors.positions >= 0).sum(-1)
        room = None
        # Without coded slots, a full row evicts in place, so that only a growing one ends where its slots end.
        if tensors.limits is not None and (self._spec.grows or sum(layer.layout.coded)):
            # A row that never demotes has a threshold beyond any count, and ends where its slots end.
            size = self.codes.open_slots().sum(-1).expand_as(occupied)
            room = torch.minimum(size, tensors.limits.flush_threshold) - self.codes.buffered()
        return layout.free_steps(occupied, tensors.budget, layer.expected_len, grows=self._spec.grows, buffer_room=room)

    def tokens_needed(self) -> list[int]:
        """Tokens that each row must be given slots for before the next step."""
        budget = self.layer.tensors.budget.tolist()
        return layout.slots_needed(self.layer.expected_len, budget, self._row_counts(), grows=self._spec.grows)

    def tokens_lacking(self, new: int) -> list[int]:
        """Tokens that each row must be given slots for so that `new` more fit at once."""
        counts = zip(self._row_counts(), self.layer.expected_len, strict=True)
        return [max(0, held + new - expected) for held, expected in counts]

    def extend(self, more: list[int]) -> int:
        """Add so many slots to each row; in a growing cache, a row may hold as many tokens as it has slots."""
        layer = self.layer
        tensors = layer.tensors
        old = layer.capacity
        layer.expected_len = [length + tokens for length, tokens in zip(layer.expected_len, more, strict=True)]
        if max(layer.expected_len) > layer.capacity:
            layer.capacity = max(layer.expected_len)
            self._lengthen()
        slots = tensors.budget.new_tensor(layer.expected_len)
        self._set_budget(torch.maximum(tensors.budget, slots) if self._spec.grows else tensors.budget)
        self.index.complete()
        self.fix_addresses()
        return layer.capacity - old

    def begin_rows(self, tokens: int) -> None:
        """Make slots for `tokens` in each row of a layer that has none yet."""
        layer = self.layer
        rows = len(layer.expected_len)
        layer.expected_len = [tokens] * rows
        layer.capacity = tokens
        self._lengthen()
        traits = self._spec.codec_traits
        # From the beginning, as the slots of a dictionary lower the flush thresholds of the rows that have one.
        layer.reserved = traits.pinned if traits.pins == "newest" and sum(layer.layout.coded) else 0

    def widen(self, tokens: int) -> None:
        """Add slots to all rows, so that one of them may have `tokens`; budgets stay."""
        self.layer.capacity = tokens
        self._lengthen()
        self._set_budget(self.layer.tensors.budget)
        self.fix_addresses()

    def set_row_budgets(self, budget: Tensor) -> None:
        """Let each row hold `budget` [B] tokens, in the tensors that are there."""
        self.layer.set_budget_in_place(budget)
        self.index.set_limit()

    def _lengthen(self) -> None:
        """Grow the slots to the capacity, and keep what they hold."""
        layer = self.layer
        tensors = layer.tensors
        old = layer.layout.exact
        # `_grow_slots` empties the buffer, since a prompt places all tokens anew. Here they stay in place.
        positions = tensors.positions[..., :old]
        before = map_slots(lambda t: t[..., :old], (tensors.state, tensors.counts))
        self._grow_slots()
        tensors.positions[..., :old] = positions
        for target, item in zip(slot_tensors((tensors.state, tensors.counts)), slot_tensors(before), strict=True):
            target[..., :old] = item
        padding = (0, 0, 0, layer.layout.exact - old)
        tensors.hold(F.pad(tensors.keys, padding), F.pad(tensors.values, padding))
        self.index.rebuild()

    def _grow_slots(self) -> None:
        """Make the layout fit the capacity; slots of the full-precision buffer come out empty, but for dictionaries."""
        layer = self.layer
        tensors = layer.tensors
        old = layer.layout
        layer.layout = grown_layout(old, self._spec.codec.layout(layer.capacity))
        tensors.positions, tensors.state = grown_slots(
            tensors.positions, tensors.state, old, layer.layout, layer.reserved
        )
        tensors.counts = grown_state(tensors.counts, old, layer.layout, layer.reserved)
        if layer.reserved and tensors.limits is not None:
            tensors.positions[..., : layer.reserved].masked_fill_(~has_dictionary(tensors.limits), -1)
        if layer.layout.coded != old.coded:
            batch, heads, _, dim = tensors.keys.shape
            tensors.codes = grown_codes(
                self._spec.codec, tensors.codes, layer.layout.coded, (batch, heads, dim), tensors.positions.device
            )

    def _set_budget(self, budget: Tensor) -> None:
        """Let each row hold `budget` [B] tokens; one that has slots for more of them reads more."""
        self.layer.set_budget(budget)
        self.index.set_limit()

    def _row_counts(self) -> list[int]:
        """Tokens in each row's fullest head."""
        return self.tokens_by_head().amax(-1).tolist()

    # sizes

    def tokens_by_head(self) -> Tensor:
        """Tokens that each head holds, [B, H] int64."""
        return (self.layer.tensors.positions >= 0).sum(-1)

    def tokens_counted(self) -> Tensor:
        """Tokens of each row that its budget is taken up by, those of its fullest head, [B] int64."""
        return self.tokens_by_head().amax(-1)

    def head_positions(self) -> Tensor:
        """Positions of the tokens of each head, [B, H, n] int32, -1 for an empty slot."""
        return self.layer.tensors.positions

    def describe(self) -> str:
        """The slots, as a `repr` shows them."""
        layer = self.layer
        _, heads, slots = layer.tensors.positions.shape
        coded = f", coded={layer.layout.coded}" if layer.layout.coded else ""
        return f"heads={heads}, slots={slots}, exact={layer.layout.exact}{coded}"

    # rows and numbers

    def fix_addresses(self) -> None:
        """Mark every tensor as static for CUDA graphs, and show new ones to the layers behind this one."""
        self.layer.fix_addresses()
        self.index.show()

    def numbers(self) -> dict[str, Any]:
        """The numbers of the layer on the host, as JSON values."""
        return self.layer.numbers() | ({"reading": self.index.numbers()} if self.layer.tensors.reads else {})

    def set_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Restore the result of `numbers`."""
        self.layer.set_numbers(numbers)
        if self.layer.tensors.reads:
            self.index.set_numbers(numbers["reading"])


def _newest_slot(length: Tensor, heads: int) -> Tensor:
    """The slot of each row's newest token where slots are in order of their tokens, [B, H, 1] int64."""
    return (length - 1).clamp_min(0)[:, None, None].expand(-1, heads, 1)
