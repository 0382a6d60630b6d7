"""The operations on the slots of one layer: take in a prompt, take in a token, demote."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine import capacity, decode, demotion, merging, token_batch
from kvpolicy.engine.attention import ScoreTransform, attend
from kvpolicy.engine.channel_sums import ChannelSums, LargestQueries
from kvpolicy.engine.decode import NO_ROOM, NO_SLOT, assert_async, eviction_scores, update_state
from kvpolicy.engine.demotion_order import DemotionOrder
from kvpolicy.engine.growing import LayerGrowth
from kvpolicy.engine.host import on_host
from kvpolicy.engine.merging import SlotMerge
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.prompt_statistics import PromptStatistics, prompt_needs, see_prompt
from kvpolicy.engine.prompt_tiles import PromptTiles
from kvpolicy.engine.query_moments import mean_rotation, new_token
from kvpolicy.engine.rollback import copied_tensors, note_counters, undoable
from kvpolicy.engine.row_limits import RowBudget as RowBudget
from kvpolicy.engine.row_limits import block_of, has_dictionary, is_pinned, pin_tokens
from kvpolicy.engine.selection import Selection, select_tokens
from kvpolicy.engine.state import map_slots, map_state, select_state
from kvpolicy.engine.token_batch import BEYOND, SlotData, TokenBatch
from kvpolicy.protocols import Forward, Seen, State, View


class LayerStore(LayerGrowth):
    """The slots of one layer under a policy.

    Everything that a layer holds is here, and nothing else changes it. A prompt goes through `attend_prompt` and
    `compress`, a decode step through `append`; between steps the owner calls `count_step`, which demotes full blocks,
    and `ensure_capacity`. See `LayerSlots` for the tensors.
    """

    # a prompt

    @on_host
    def attend_prompt(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None,
        transform: ScoreTransform,
        forward: Forward | None = None,
        held: PendingPrompt | None = None,
    ) -> tuple[Tensor, PendingPrompt]:
        """Attend from a prompt or chunk to the slots and to itself; `compress` must follow.

        Args:
            q: [B, Hq, P, D].
            k: [B, H, P, D].
            v: [B, H, P, D].
            valid: Which of the P tokens are not padding, [B, P] bool; None if all are.
            transform: From products to attention weights.
            forward: The arguments of the attention module, if the selector needs them.
            held: Earlier chunks of the prompt, which are not compressed yet, or None.

        Returns:
            The output [B, Hq, P, D], and the prompt, earlier chunks included.
        """
        past = self.past() if held is None else held.after(self.past())
        out, attn_sum = attend(q, k, v, transform, past, valid, prompt_needs(self).attn_sum)
        pending = see_prompt(self, q, k, v, valid, transform, forward, held, attn_sum)
        return out, self.end_prompt(pending, held)

    @on_host
    def begin_tiles(
        self, q: Tensor, k: Tensor, columns: int, valid: Tensor | None, held: PendingPrompt | None = None
    ) -> PromptTiles:
        """Prepare for a prompt in tiles, each attended to by `PromptTiles.attend`; `end_prompt` must follow.

        Args:
            q: The queries of the first tile, [B, Hq, T, D].
            k: Its keys, [B, H, T, D].
            columns: Tokens of the prompt.
            valid: Which of them are not padding, [B, P] bool; None if all are.
            held: Earlier chunks of the prompt, which are not compressed yet, or None.
        """
        past = self.past() if held is None else held.after(self.past())
        statistics = PromptStatistics(self, valid, columns, held)
        return PromptTiles(k, q.shape[1], columns, valid, past, statistics, prompt_needs(self).attn_sum)

    @on_host
    def end_prompt(self, pending: PendingPrompt, held: PendingPrompt | None) -> PendingPrompt:
        """Count a prompt's columns, and join it with the chunks before; `compress` must follow."""
        self.columns.add_(pending.keys.shape[2])
        self.scale = pending.transform.scale
        return pending if held is None else held.joined(pending)

    @on_host
    def compress(
        self,
        pending: PendingPrompt,
        budget: RowBudget,
        *,
        massive: Tensor | None = None,
        rope_offset: Tensor | None = None,
    ) -> None:
        """Bring a prompt under the budget: select, allocate slots, and place the selected tokens.

        Args:
            pending: The prompt, from `attend_prompt`.
            budget: Tokens of each row.
            massive: The prompt's tokens with the largest activations, [B, P] bool, if the codec pins them.
            rope_offset: Offset of the rotary positions from the rows' positions, [B], if keys are coded unrotated.
        """
        self.note_sizes(pending.keys.shape[2])
        self.record(pending, rope_offset)
        self._index_is_current = False
        seen_before = self.length
        # Unlike in a step, not in place: `seen_before` is the same tensor and must keep the old lengths.
        self.length = pending.lengths(seen_before)
        merges = self.merger.traits.when != "never"
        past = self.past() if pending.reads_past or merges else None
        selected = select_tokens(
            self.selector,
            self.positions,
            self.state,
            pending,
            past,
            seen_before=seen_before,
            length=self.length,
            keep=budget.keep.to(self.positions.device),
            layer_idx=self.layer_idx,
            ranks=self.ranks,
        )
        keys, values = pending.keys, pending.values
        if self.layout.exact:  # a first prompt is not copied whole
            keys = torch.cat([self.keys, keys], 2)
            values = torch.cat([self.values, values], 2)
        # Before `_allocate`, which empties the positions of the full-precision buffer: its tokens are placed again.
        batch = TokenBatch(keys, values, *self._evict(selected))
        if merges:
            coded = slice(self.layout.exact, self.layout.slots)
            joined = merging.join_prompt(past, pending)
            batch = merging.merge_prompt(
                self.merger, self.merged, batch, selected, joined, coded, self.length, self.ranks
            )
        # A row that has not begun gets its budget now: its first token may come in a decode step of the others.
        self._allocate(None if pending.idle is None else pending.idle & (seen_before > 0), budget)
        # By row, since a row may have had nothing but padding in the prompts before this one.
        first = (seen_before == 0) & (self.length > 0)
        if self.limits is not None and bool(first.any()):
            pin_tokens(self.limits, self.codec.traits, pending.positions(seen_before), massive, first)
        data = self._place(batch, pending.idle, first)
        self._assign_first(data)
        self.keys, self.values = data.keys, data.values
        sums = pending.statistic(ChannelSums)
        salience = self.prompt_salience(None if sums is None else sums.sums, self.length - seen_before)
        self._rebuild_index(first, salience)
        self.fix_addresses()
        self.schedule.note(None if pending.idle is None else ~pending.idle, self.length, self.budget)
        # No buffer is full here, since `_place` demotes what it must: this call counts the free steps.
        self.demote()

    def _evict(self, selected: Selection) -> tuple[Tensor, State, Tensor, State]:
        """Evict from the coded slots what was not selected.

        Args:
            selected: The selection among the slots and the tokens of the prompt.

        Returns:
            Positions, state, choice and counts of the tokens that are not coded, which are placed again: those of the
            full-precision buffer, then those of the prompt.
        """
        slots = self.positions.shape[-1]
        exact = self.layout.exact

        def outside_codes(t: Tensor) -> Tensor:
            return torch.cat([t[..., :exact], t[..., slots:]], -1)

        chosen = outside_codes(selected.chosen)
        if self.reserved:  # tokens of dictionary slots stay where they are
            chosen[..., :exact] &= self._open_slots()
        # An evicted token leaves its codes behind: only the position says that a slot is empty.
        self.positions = selected.positions[..., :slots].masked_fill(~selected.chosen[..., :slots], -1)
        self.state = map_slots(lambda t: t[..., :slots], selected.state)
        counts = map_state(lambda t: F.pad(t[..., :exact], (0, chosen.shape[-1] - exact)), self.counts)
        return outside_codes(selected.positions), map_slots(outside_codes, selected.state), chosen, counts

    def record(self, pending: PendingPrompt, rope_offset: Tensor | None) -> None:
        """Update the limits that a prompt determines; a prompt in several chunks is recorded after each."""
        if self.limits is None:
            return
        if rope_offset is not None:
            self.limits.rope_offset.copy_(rope_offset)
        queries = pending.statistic(LargestQueries)
        if queries is not None and queries.absmax is not None:
            # Ranks that replicate a KV head have different queries of it, and must still write the same codes.
            largest = self.ranks.largest(queries.absmax)
            self.limits.query_absmax.copy_(torch.maximum(self.limits.query_absmax, largest))

    def _allocate(self, idle: Tensor | None, budget: RowBudget) -> None:
        """Make slots for a budget, and set it, but in rows that are `idle` [B] bool."""
        merged = capacity.merge_expected(
            self.expected_len, budget.expected_len.tolist(), None if idle is None else idle.tolist()
        )
        self.expected_len = merged
        self.capacity = max(*merged, self.capacity)
        self._grow_slots()
        most = (budget.keep + budget.extra).to(self.positions.device)
        self._set_budget(most if idle is None else torch.where(idle, self.budget, most))

    def _place(self, batch: TokenBatch, idle: Tensor | None, first: Tensor | None) -> SlotData:
        """Demote the tokens that leave first, and lay out the others in the full-precision buffer.

        Args:
            batch: The tokens.
            idle: Rows that got no token, [B] bool: alone they would not have been called, so nothing is demoted.
            first: Rows that got their first tokens, [B] bool, some of which may become the dictionary.

        Returns:
            The contents of the full-precision buffer, which are still to be assigned.
        """
        if self.limits is None or not sum(self.layout.coded):  # without coded slots, there is no dictionary
            ordered = batch.take(batch.by_position()[..., : self.layout.exact])
            return token_batch.first_slots(ordered, ~ordered.chosen, self.layout.exact)
        # Few tokens of a long prompt are chosen, and everything below sorts or copies the batch.
        batch = batch.trimmed()
        if first is not None and self._reserve_dictionary(batch, first):
            batch = batch._replace(chosen=batch.chosen & ~is_pinned(self.limits, batch.positions))
        order = self._demotion_order().indices(batch.positions, batch.state, batch.chosen)
        counts = batch.chosen.sum(-1)
        moved = demotion.demoted_counts(counts, self.limits, self.codec.traits, idle)
        self._demote_tokens(batch.take_order(order), moved)
        # A row without a dictionary may use the dictionary slots for any token, as it would alone.
        start = self.reserved * has_dictionary(self.limits) if self.reserved else 0
        data = token_batch.slots_after(batch, order, moved, start, self.layout.exact)
        if self.reserved:
            data = token_batch.with_dictionary(data, self._buffer(), self.reserved, self._open_slots())
        return data

    def _assign_first(self, data: SlotData, rows: Tensor | None = None) -> None:
        """Write positions, state and counts to the first slots of `rows` [B, 1, 1], or of all rows."""
        token_batch.assign_first(self.positions, data.positions, rows)
        token_batch.assign_first_state((self.state, self.counts), (data.state, data.counts), rows)

    def _reserve_dictionary(self, batch: TokenBatch, first: Tensor) -> bool:
        """Move each row's newest tokens to the dictionary slots, once, if the codec uses them as atoms."""
        traits = self.codec.traits
        if traits.pins != "newest" or not traits.pinned or not bool(first.any()):
            return False
        assert self.limits is not None
        rows = first[:, None, None]
        width = min(traits.pinned, batch.positions.shape[-1])
        # Among the tokens that this head kept, so heads may have different atoms.
        by_age = torch.where(batch.chosen, batch.positions, -1).argsort(dim=-1, descending=True, stable=True)
        newest = batch.take(by_age[..., :width])
        # Alone in a batch, a row without codes would have no dictionary either.
        empty = ~newest.chosen | (self.limits.flush_threshold == BEYOND)[..., None]
        token_batch.assign_first(self.limits.pins, newest.positions.masked_fill(empty, -1), rows)
        # The atoms must be in place before the first token is coded with them.
        data = token_batch.first_slots(newest, empty, traits.pinned)
        self._assign_first(data, rows)
        keys, values = data.keys, data.values
        if self.reserved:
            keys = torch.where(rows[..., None], keys, self.keys[:, :, : self.reserved])
            values = torch.where(rows[..., None], values, self.values[:, :, : self.reserved])
        self.keys, self.values = keys, values
        self.reserved = traits.pinned
        # The dictionary takes slots of the buffer, which lowers the flush thresholds of its rows.
        self._set_budget(self.budget)
        return True

    # demotion

    def demote(self) -> None:
        """Demote blocks of the oldest tokens until no head's full-precision buffer is full."""
        if self._is_full():
            with undoable(self):
                while self._is_full():
                    self.recode() if self.codec.traits.recode_all else self.demote_block()
        self.free_steps = self._count_free_steps()

    def demote_block(self) -> None:
        """Demote the first block to leave, in every head with a full buffer. Traceable, no host sync."""
        assert self.limits is not None
        _, _, positions, state, counts = self._buffer()
        occupied = (positions >= 0) & self._open_slots()
        due = occupied.sum(-1) >= self.limits.flush_threshold
        order = self._demotion_order().indices(positions, state, occupied)
        # The width must not depend on data: rows with a smaller block mask the rest of the largest one.
        slots = order[..., : self.largest_block]
        batch = TokenBatch(self.keys, self.values, positions, state, occupied, counts).take(slots)
        rank = torch.arange(slots.shape[-1], device=slots.device)
        batch = batch._replace(chosen=due[..., None] & (rank < self._row_block()))
        self.write(slots, None, batch.chosen)
        self._insert(0, self._in_key_space(batch))

    def recode(self) -> None:
        """Code all tokens again in every head with a full full-precision buffer."""
        assert self.limits is not None
        due = self._buffered() >= self.limits.flush_threshold
        past = self.past()
        assert past is not None
        self._index_is_current = False
        positions = self.positions.clone()
        state, counts = map_state(torch.clone, (self.state, self.counts))
        moving = past.occupied & due[..., None]
        moving[..., : self.layout.exact] &= self._open_slots()
        # Emptied first: codecs fit parameters again only in heads without an occupied slot, and `_demote_tokens` fills
        # the stages of an empty head at once, without passing its tokens from stage to stage.
        self.positions.masked_fill_(moving, -1)
        data = self._place(TokenBatch(past.keys, past.values, positions, state, moving, counts), None, None)
        self._assign_first(data)
        # `_place` works on all heads; those that were not due get back what they had.
        again = due[..., None]
        for held, new in ((self.keys, data.keys), (self.values, data.values)):
            held.copy_(torch.where(again[..., None], new, held))
        self.positions.copy_(torch.where(again, self.positions, positions))
        decode.assign_state(self.state, select_state(again, self.state, state))
        decode.assign_state(self.counts, select_state(again, self.counts, counts))
        self._rebuild_index()

    def _row_block(self) -> Tensor | int:
        """Tokens of each row that are demoted at a time, [B, 1, 1] or one number for all rows."""
        assert self.limits is not None
        block = block_of(self.limits, self.codec.traits)
        return block[..., None] if isinstance(block, Tensor) else block

    def _demotion_order(self) -> DemotionOrder:
        assert self.limits is not None
        return DemotionOrder(
            self.selector, self.codec.traits, self.limits, self.length, self.budget, self.layer_idx, self.ranks
        )

    def _in_key_space(self, batch: TokenBatch) -> TokenBatch:
        return batch._replace(keys=self._codec_keys(batch.keys, batch.positions))

    def _demote_tokens(self, batch: TokenBatch, moved: Tensor) -> None:
        """Write each head's first `moved` [B, H] tokens to the stages."""
        most = int(moved.max())
        if not most:
            return
        batch = self._in_key_space(batch).window(0, most)
        is_empty_head = ~(self.positions[..., self.layout.exact :] >= 0).any(-1)
        if bool(is_empty_head.any()):
            self._fill_stages(batch, moved.where(is_empty_head, 0))
        # Heads that hold codes already get the tokens block by block, as in decode.
        later = torch.where(is_empty_head, 0, moved)[..., None]
        block = self._row_block()
        rank = torch.arange(self.largest_block, device=moved.device)
        for number in range(int((-(-later // block)).max())):
            token = number * block + rank
            chosen = (rank < block) & (token < later)
            part = batch.take(token.clamp_max(most - 1).expand_as(chosen))
            self._insert(0, part._replace(chosen=chosen))

    def _fill_stages(self, batch: TokenBatch, end: Tensor) -> None:
        """Fill empty stages with each head's first `end` [B, H] tokens, the first stage with the last of them."""
        assert self.limits is not None
        for stage in range(len(self.layout.coded)):
            start = (end - self.limits.stage_capacity[:, stage, None]).clamp_min(0)
            size = int((end - start).max())
            if size:
                slots = torch.arange(size, device=end.device).expand(*end.shape, -1)
                part = batch.take_order((start[..., None] + slots).clamp_max(batch.positions.shape[-1] - 1))
                self.write(slots, part.data, slots < (end - start)[..., None], stage)
            end = start
        assert not bool(end.any()), "a layout has too few slots for its tokens"

    def _insert(self, stage: int, batch: TokenBatch) -> None:
        """Write the chosen tokens of a batch to a stage; what it has no slot for moves on to the next stage first."""
        assert self.limits is not None
        at = self._stage_range(stage)
        limit = self.limits.stage_capacity[:, stage]
        if any(self.layout.coded[stage + 1 :]):
            state = map_slots(lambda t: t[..., at], self.state)
            counts = map_state(lambda t: t[..., at], self.counts)
            store = self.stage_store(stage)
            order = self._demotion_order()
            over = demotion.overflow(
                self.codec.stages[stage], store, self.positions[..., at], state, limit, batch, order, counts
            )
            self.write(over.slots, None, over.leaves, stage)
            self._insert(stage + 1, over.batch)
            batch = batch._replace(chosen=over.stays)
        slots = demotion.free_slots(self.positions[..., at], limit, self.codec.traits.group_size)
        if len(self.layout.coded) > 1:
            # Slots are paired with tokens by index. Tokens that moved on leave gaps in a block, and a stage may have
            # fewer slots than a block has tokens, so the tokens that stay come first.
            batch = batch.front(min(batch.chosen.shape[-1], slots.shape[-1]))
        self.write(slots[..., : batch.chosen.shape[-1]], batch.data, batch.chosen, stage)

    # a decode step

    def append(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, transform: ScoreTransform) -> Tensor:
        """Write one token per row, evicting where the budget is full, and attend from it. Traceable, no host sync.

        Args:
            q: [B, Hq, 1, D].
            k: [B, H, 1, D].
            v: [B, H, 1, D].
            valid: Which rows have a token that is not padding, [B, 1] bool; None if all have.
            transform: From products to attention weights.

        Returns:
            [B, Hq, 1, D].
        """
        if self.undo is not None:
            self.undo.begin(copied_tensors(self))
        position = self.length.to(torch.int32)[:, None, None]  # of the new token: as many came before it
        self.length.add_(1 if valid is None else valid[:, 0].long())
        self.columns.add_(1)
        # The length counts the new token by now: windows include it, but it is no candidate for eviction itself.
        # The view shares `positions`: once the token is written, `update_state` sees it in the same view.
        view = self._view()
        slot, merge = self._free_slot(view, valid)
        self.link.start()  # what selectors and mergers read to evict is not counted: only attention and its index
        # The slot still has the statistics of the token that it held before.
        state = map_slots(lambda t: torch.zeros_like(slot, dtype=t.dtype), self.state)
        counts = map_state(lambda t: torch.zeros_like(slot, dtype=t.dtype), self.counts)
        data = SlotData(k.detach(), v.detach(), position.expand_as(slot), state, counts)
        if merge is not None:
            slot, data = merging.with_merge(slot, data, merge)
        self.write(slot, data, None if valid is None else valid[:, None].expand_as(slot))
        needs = self.selector.needs
        out, weights = self._attend(q, transform, needs.decode_attn)
        self.link.stop()
        if needs.decode_attn or needs.vectors:
            view = view._replace(token=new_token(q, k, v, position[:, 0], needs, self.query_rope))
            update_state(self.selector, self.state, weights if needs.decode_attn else None, view, valid)
        if self.undo is not None:
            self.undo.end()
        return out

    def _free_slot(self, view: View, valid: Tensor | None) -> tuple[Tensor, SlotMerge | None]:
        """A slot of the full-precision buffer for each head's new token, [B, H, 1], and where an evicted one goes."""
        occupied = view.valid
        full = occupied.sum(-1, keepdim=True) >= self.budget[:, None, None]
        if not self.grows and not sum(self.layout.coded):
            # The new token takes the evicted one's slot. A row without a token writes nothing, wherever it points.
            scores = eviction_scores(self.selector, self.state, view)
            # Of several free slots, any will do: the order of slots has no meaning. Scores have no ties at the top,
            # since a head holds a position once.
            slot = torch.where(full, scores, ~occupied).argmax(-1, keepdim=True)
            merge = self.merge_evicted(slot, full, valid, view)
            if self.can_run_out:
                assert_async((full | ~occupied.all(-1, keepdim=True)).all(), NO_SLOT)
            return slot, merge
        merge = None
        if valid is not None:
            full = full & valid[:, :, None]
        if self.grows:
            assert_async(~full.any(), NO_ROOM)
        else:
            # The evicted token may be coded, and the new one is not: they are in different slots.
            victim = eviction_scores(self.selector, self.state, view).argmax(-1, keepdim=True)
            merge = self.merge_evicted(victim, full, None, view)
            self.write(victim, None, full)
        free = self.positions[..., : self.layout.exact] < 0
        if self.reserved:
            free = free & self._open_slots()
        if self.can_run_out:
            assert_async(free.any(-1).all(), NO_SLOT)
        return free.to(torch.uint8).argmax(-1, keepdim=True), merge

    # between steps

    def count_step(self) -> None:
        """Count one decode step: rank the slots again where it is time, and demote a block if a buffer is full."""
        # A counter on the host: asking the device how full the buffers are would synchronize in every step.
        if self.schedule.count_step():
            with undoable(self):
                self.rerank()
        self.free_steps -= 1
        self._count_unsorted_step()
        if self.free_steps < 1:
            self.demote()
        note_counters(self)

    def rerank(self) -> None:
        """Rank all slots together in the rows where it is time; see `Needs.rerank_every`."""
        due = self.schedule.due(self.length, self.budget)
        past = self.past() if bool(due.any()) else None
        if past is not None:
            view = View(self.positions, self.length, self.budget, self.layer_idx, self.ranks)
            rotation = mean_rotation(self.query_rope)
            seen = Seen(None, None, mean_rotation=rotation, scale=self.scale, keys=past.keys, values=past.values)
            decode.rank_again(self.selector, self.state, seen, view, due)
        self.schedule.note(due, self.length, self.budget)

    def ensure_capacity(self) -> int:
        """Add slots if the next step has none: in a growing cache, or one that was announced too few tokens.

        Returns:
            How many tokens were added to the longest row.
        """
        if self.free_steps >= 1:
            return 0
        needed = capacity.slots_needed(self.expected_len, self.budget.tolist(), self._row_counts(), grows=self.grows)
        with undoable(self, ahead=1):
            added = self._extend(needed)
            self.demote()
        return added
