"""Demotion of tokens from the full-precision buffer of a layer to the stages of its codec."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.engine import decode, demotion, token_batch
from kvpolicy.engine.demotion import DemotionOrder
from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.layer_index import LayerIndex
from kvpolicy.engine.layer_tensors import LayerTensors
from kvpolicy.engine.row_limits import has_dictionary, is_pinned, row_block_of
from kvpolicy.engine.slot_codes import SlotCodes
from kvpolicy.engine.slot_writer import SlotWriter
from kvpolicy.engine.state import map_slots, map_state, select_state
from kvpolicy.engine.token_batch import BEYOND, SlotData, TokenBatch


class SlotDemoter:
    """Places the tokens of a prompt, and demotes tokens to the stages of a layer when its buffer is full."""

    def __init__(self, layer: LayerContents, codes: SlotCodes, writer: SlotWriter, index: LayerIndex) -> None:
        """Demote tokens of `layer`."""
        self._layer = layer
        self._spec = layer.spec
        self._codes = codes
        self._writer = writer
        self._index = index

    def place(self, batch: TokenBatch, idle: Tensor | None, first: Tensor | None) -> SlotData:
        """Demote the tokens that leave first, and lay out the others in the full-precision buffer.

        Args:
            batch: The tokens.
            idle: Rows that got no token, [B] bool: alone they would not have been called, so nothing is demoted.
            first: Rows that got their first tokens, [B] bool, some of which may become the dictionary.

        Returns:
            The contents of the full-precision buffer, which are still to be assigned.
        """
        layer = self._layer
        tensors = layer.tensors
        if tensors.limits is None or not sum(layer.layout.coded):  # without coded slots, there is no dictionary
            ordered = batch.take(batch.by_position()[..., : layer.layout.exact])
            return token_batch.first_slots(ordered, ~ordered.chosen, layer.layout.exact)
        # Few tokens of a long prompt are chosen, and everything below sorts or copies the batch.
        batch = batch.trimmed()
        if first is not None and self._reserve_dictionary(batch, first):
            batch = batch._replace(chosen=batch.chosen & ~is_pinned(tensors.limits, batch.positions))
        order = self._demotion_order().indices(batch.positions, batch.state, batch.chosen)
        counts = batch.chosen.sum(-1)
        moved = demotion.demoted_counts(counts, tensors.limits, self._spec.codec_traits, idle)
        self._demote_tokens(batch.take_order(order), moved)
        # A row without a dictionary may use the dictionary slots for any token, as it would alone.
        start = layer.reserved * has_dictionary(tensors.limits) if layer.reserved else 0
        data = token_batch.slots_after(batch, order, moved, start, layer.layout.exact)
        if layer.reserved:
            data = token_batch.with_dictionary(data, self._codes.buffer(), layer.reserved, self._codes.open_slots())
        return data

    def _reserve_dictionary(self, batch: TokenBatch, first: Tensor) -> bool:
        """Move each row's newest tokens to the dictionary slots, once, if the codec uses them as atoms."""
        layer = self._layer
        tensors = layer.tensors
        traits = self._spec.codec_traits
        if traits.pins != "newest" or not traits.pinned or not bool(first.any()):
            return False
        assert tensors.limits is not None
        rows = first[:, None, None]
        width = min(traits.pinned, batch.positions.shape[-1])
        # Among the tokens that this head kept, so heads may have different atoms.
        by_age = torch.where(batch.chosen, batch.positions, -1).argsort(dim=-1, descending=True, stable=True)
        newest = batch.take(by_age[..., :width])
        # Alone in a batch, a row without codes would have no dictionary either.
        empty = ~newest.chosen | (tensors.limits.flush_threshold == BEYOND)[..., None]
        token_batch.assign_first(tensors.limits.pins, newest.positions.masked_fill(empty, -1), rows)
        # The atoms must be in place before the first token is coded with them.
        data = token_batch.first_slots(newest, empty, traits.pinned)
        assign_slots(tensors, data, rows)
        keys = data.keys
        values = data.values
        if layer.reserved:
            keys = torch.where(rows[..., None], keys, tensors.keys[:, :, : layer.reserved])
            values = torch.where(rows[..., None], values, tensors.values[:, :, : layer.reserved])
        tensors.keys = keys
        tensors.values = values
        layer.reserved = traits.pinned
        # The dictionary takes slots of the buffer, which lowers the flush thresholds of its rows.
        layer.set_budget(tensors.budget)
        return True

    def demote_block(self) -> None:
        """Demote the first block to leave, in every head with a full buffer. Traceable, no host sync."""
        tensors = self._layer.tensors
        assert tensors.limits is not None
        _, _, positions, state, counts = self._codes.buffer()
        occupied = (positions >= 0) & self._codes.open_slots()
        due = occupied.sum(-1) >= tensors.limits.flush_threshold
        order = self._demotion_order().indices(positions, state, occupied)
        # The width must not depend on data: rows with a smaller block mask the rest of the largest one.
        slots = order[..., : self._layer.largest_block]
        batch = TokenBatch(tensors.keys, tensors.values, positions, state, occupied, counts).take(slots)
        rank = torch.arange(slots.shape[-1], device=slots.device)
        batch = batch._replace(chosen=due[..., None] & (rank < row_block_of(tensors.limits, self._spec.codec_traits)))
        self._writer.write(slots, None, batch.chosen)
        self._insert(0, self._with_coded_keys(batch))

    def recode(self) -> None:
        """Code all tokens again in every head with a full full-precision buffer."""
        tensors = self._layer.tensors
        assert tensors.limits is not None
        due = self._codes.buffered() >= tensors.limits.flush_threshold
        past = self._codes.past()
        assert past is not None
        self._index.is_current = False
        positions = tensors.positions.clone()
        state, counts = map_state(torch.clone, (tensors.state, tensors.counts))
        moving = past.occupied & due[..., None]
        moving[..., : self._layer.layout.exact] &= self._codes.open_slots()
        # Emptied first: codecs fit parameters again only in heads without an occupied slot, and `_demote_tokens` fills
        # the stages of an empty head at once, without passing its tokens from stage to stage.
        tensors.positions.masked_fill_(moving, -1)
        data = self.place(TokenBatch(past.keys, past.values, positions, state, moving, counts), None, None)
        assign_slots(tensors, data)
        # `place` works on all heads of a row; those that were not due get back what they had.
        again = due[..., None]
        for held, new in ((tensors.keys, data.keys), (tensors.values, data.values)):
            held.copy_(torch.where(again[..., None], new, held))
        tensors.positions.copy_(torch.where(again, tensors.positions, positions))
        decode.assign_state(tensors.state, select_state(again, tensors.state, state))
        decode.assign_state(tensors.counts, select_state(again, tensors.counts, counts))
        self._index.is_current = True
        self._index.fill()

    def _demotion_order(self) -> DemotionOrder:
        tensors = self._layer.tensors
        assert tensors.limits is not None
        return DemotionOrder(
            self._spec.selector,
            self._spec.codec_traits,
            tensors.limits,
            tensors.length,
            tensors.budget,
            self._spec.layer_idx,
            self._layer.ranks,
        )

    def _with_coded_keys(self, batch: TokenBatch) -> TokenBatch:
        return batch._replace(keys=self._codes.in_key_space(batch.keys, batch.positions))

    def _demote_tokens(self, batch: TokenBatch, moved: Tensor) -> None:
        """Write each head's first `moved` [B, H] tokens to the stages."""
        layer = self._layer
        tensors = layer.tensors
        assert tensors.limits is not None
        most = int(moved.max())
        if not most:
            return
        batch = self._with_coded_keys(batch).window(0, most)
        is_empty_head = ~(tensors.positions[..., layer.layout.exact :] >= 0).any(-1)
        if bool(is_empty_head.any()):
            self._fill_stages(batch, moved.where(is_empty_head, 0))
        # Heads that hold codes already get the tokens block by block, as in decode.
        later = torch.where(is_empty_head, 0, moved)[..., None]
        block = row_block_of(tensors.limits, self._spec.codec_traits)
        rank = torch.arange(layer.largest_block, device=moved.device)
        for number in range(int((-(-later // block)).max())):
            token = number * block + rank
            chosen = (rank < block) & (token < later)
            part = batch.take(token.clamp_max(most - 1).expand_as(chosen))
            self._insert(0, part._replace(chosen=chosen))

    def _fill_stages(self, batch: TokenBatch, end: Tensor) -> None:
        """Fill empty stages with each head's first `end` [B, H] tokens, the first stage with the last of them."""
        tensors = self._layer.tensors
        assert tensors.limits is not None
        for stage in range(len(self._layer.layout.coded)):
            start = (end - tensors.limits.stage_capacity[:, stage, None]).clamp_min(0)
            size = int((end - start).max())
            if size:
                slots = torch.arange(size, device=end.device).expand(*end.shape, -1)
                part = batch.take_order((start[..., None] + slots).clamp_max(batch.positions.shape[-1] - 1))
                self._writer.write(slots, part.data, slots < (end - start)[..., None], stage)
            end = start
        assert not bool(end.any()), "a layout has too few slots for its tokens"

    def _insert(self, stage: int, batch: TokenBatch) -> None:
        """Write the chosen tokens of a batch to a stage; what it has no slot for moves on to the next stage first."""
        layer = self._layer
        tensors = layer.tensors
        assert tensors.limits is not None
        at = self._codes.stage_slots(stage)
        limit = tensors.limits.stage_capacity[:, stage]
        if any(layer.layout.coded[stage + 1 :]):
            state = map_slots(lambda t: t[..., at], tensors.state)
            counts = map_state(lambda t: t[..., at], tensors.counts)
            store = self._codes.stage_store(stage)
            order = self._demotion_order()
            over = demotion.overflow(
                self._spec.stages[stage], store, tensors.positions[..., at], state, limit, batch, order, counts
            )
            self._writer.write(over.slots, None, over.leaves, stage)
            self._insert(stage + 1, over.batch)
            batch = batch._replace(chosen=over.stays)
        slots = demotion.free_slots(tensors.positions[..., at], limit, self._spec.codec_traits.group_size)
        if len(layer.layout.coded) > 1:
            # Slots are paired with tokens by index. Tokens that moved on leave gaps in a block, and a stage may have
            # fewer slots than a block has tokens, so the tokens that stay come first.
            batch = batch.front(min(batch.chosen.shape[-1], slots.shape[-1]))
        self._writer.write(slots[..., : batch.chosen.shape[-1]], batch.data, batch.chosen, stage)


def assign_slots(tensors: LayerTensors, data: SlotData, rows: Tensor | None = None) -> None:
    """Write positions, state and counts to the first slots of `rows` [B, 1, 1], or of all rows."""
    token_batch.assign_first(tensors.positions, data.positions, rows)
    token_batch.assign_first_state((tensors.state, tensors.counts), (data.state, data.counts), rows)
