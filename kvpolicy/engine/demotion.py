"""Where demoted tokens go: which leave the buffer or a stage first, which slots they take, and which move on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.row_limits import RowLimits, block_of, is_pinned, residual_of
from kvpolicy.engine.selection import finite_priority
from kvpolicy.engine.state import map_slots, map_state, slot_tensors
from kvpolicy.engine.token_batch import TokenBatch
from kvpolicy.protocols import Ranks, Selector, Stage, StageStore, State, Traits, View


class DemotionOrder(NamedTuple):
    """Criteria for the order of demotion in a layer.

    Attributes:
        selector: Ranks tokens where `Traits.demotion` asks for it.
        traits: The traits of the codec.
        limits: The limits of the rows.
        length: Tokens that each row has seen, [B].
        budget: The most tokens of each row, [B].
        layer_idx: Index of the layer.
        ranks: The ranks that hold the layer's other heads.
    """

    selector: Selector
    traits: Traits
    limits: RowLimits
    length: Tensor
    budget: Tensor
    layer_idx: int
    ranks: Ranks

    def indices(self, positions: Tensor, state: State, candidates: Tensor) -> Tensor:
        """The index of each token, first to leave first, [B, H, n].

        Tokens that are never demoted come after all others, and tokens that are no candidates last.

        Args:
            positions: [B, H, n] int32.
            state: The selector's state of the tokens.
            candidates: Which tokens are candidates, [B, H, n] bool.
        """
        if self.traits.demotion is None:
            order = positions.argsort(dim=-1, stable=True)
        else:
            seen = positions.masked_fill(~candidates, -1)
            view = View(seen, self.length, self._precise_tokens(), self.layer_idx, self.ranks)
            order = self.traits.demotion.order(positions, finite_priority(self.selector.priority(state, view)))
        # Sorted stably by class, so that the order within each class stays.
        last = torch.where(candidates, 0, 2).masked_fill(candidates & self._never_demoted(positions), 1)
        return order.gather(-1, last.gather(-1, order).argsort(dim=-1, stable=True))

    def _precise_tokens(self) -> Tensor:
        """Tokens of each row that stay precise, [B]: the budget that the selector ranks for."""
        precise = (self.limits.flush_threshold - block_of(self.limits, self.traits))[:, 0]
        if self.limits.stage_capacity.shape[1] > 1:  # the first of several stages is the more precise one
            precise = precise + self.limits.stage_capacity[:, 0]
        return torch.minimum(precise.clamp_min(self.selector.min_tokens), self.budget)

    def _never_demoted(self, positions: Tensor) -> Tensor:
        """Pinned tokens and, where it is not the oldest that leave first, the newest."""
        stays = torch.zeros_like(positions, dtype=torch.bool)
        if self.traits.pinned:
            stays = is_pinned(self.limits, positions)
        if self.traits.demotion is not None:
            newest = self.length[:, None] - residual_of(self.limits, self.traits)
            stays = stays | (positions >= newest[..., None])
        return stays


def demoted_counts(counts: Tensor, limits: RowLimits, traits: Traits, idle: Tensor | None) -> Tensor:
    """How many of each head's tokens are demoted after a prompt, [B, H] int64.

    Args:
        counts: Tokens of each head, [B, H].
        limits: Limits of the rows.
        traits: The traits of the codec.
        idle: Rows that got no token, [B] bool: alone they would not have been called, so nothing of theirs is demoted.
    """
    stays = limits.flush_threshold - block_of(limits, traits)
    # In whole groups, since the parameters of a group are fitted when its first tokens are written.
    moved = (counts - stays).clamp_min(0).div(traits.group_size, rounding_mode="floor") * traits.group_size
    return moved if idle is None else moved.masked_fill(idle[:, None], 0)


def free_slots(positions: Tensor, capacity: Tensor, group_size: int) -> Tensor:
    """Slots of a stage in the order in which new tokens take them, [B, H, C].

    Slots of the emptiest group come first, so that groups fill with tokens of one block. A row uses only the slots
    that it would have alone, however many the other rows need.

    Args:
        positions: Positions of the stage's slots, [B, H, C].
        capacity: Slots that each row may use, [B].
        group_size: Slots that share parameters.
    """
    occupied = positions >= 0
    crowd = occupied.unflatten(-1, (-1, group_size)).sum(-1, keepdim=True)
    crowd = crowd.expand(*occupied.shape[:2], -1, group_size).flatten(-2)
    beyond = torch.arange(occupied.shape[-1], device=occupied.device) >= capacity[:, None, None]
    # Empty slots beyond the capacity are for a stage that holds more, since its budget was larger. Stable, so that
    # equally full groups are filled one after the other and not interleaved.
    behind = torch.where(occupied, 2 * group_size, crowd + beyond * group_size)
    return behind.argsort(dim=-1, stable=True)


class Overflow(NamedTuple):
    """Tokens that must move on to the next stage before a block is written to a stage.

    Attributes:
        slots: Slots of the stage, [B, H, n].
        leaves: Which of these are emptied, [B, H, n] bool.
        batch: The tokens for the next stage.
        stays: Which tokens of the block are written to this stage, [B, H, n] bool.
    """

    slots: Tensor
    leaves: Tensor
    batch: TokenBatch
    stays: Tensor


def overflow(
    stage: Stage,
    store: StageStore,
    positions: Tensor,
    state: State,
    capacity: Tensor,
    block: TokenBatch,
    order: DemotionOrder,
    counts: State = (),
) -> Overflow:
    """Find out which tokens of a stage give way to a block; they are read back in full precision.

    If the whole stage is too small for the block, the block's first tokens move on as well.

    Args:
        stage: The stage.
        store: Its tensors.
        positions: Positions of its slots, [B, H, C].
        state: The selector's state of its slots.
        capacity: Slots that each row may use, [B].
        block: The tokens to write; `chosen` says which.
        order: Which tokens leave first.
        counts: Counts of its slots; see `TokenBatch.counts`.
    """
    occupied = positions >= 0
    width = block.chosen.shape[-1]
    # A stage may hold more than its capacity, if the budget has become smaller: then as many leave as come.
    lack = block.chosen.sum(-1) - (capacity[:, None] - occupied.sum(-1)).clamp_min(0)
    index = order.indices(positions, state, occupied)[..., :width]
    # In the codec's key space, like the block: a token on its way through the stages is not rotated in between.
    victims = TokenBatch(
        stage.keys(store, index),
        stage.values(store, index),
        positions.gather(-1, index),
        map_slots(lambda t: t.gather(-1, index), state),
        occupied.gather(-1, index),
        map_state(lambda t: t.gather(-1, index), counts),
    )
    leaves = (torch.arange(index.shape[-1], device=index.device) < lack[..., None]) & victims.chosen
    passes = block.chosen & (block.chosen.long().cumsum(-1) <= (lack - leaves.sum(-1))[..., None])
    # No more tokens move on than the block lacks slots for, so `width` is enough for them.
    moving = _joined(victims._replace(chosen=leaves), block._replace(chosen=passes))
    return Overflow(index, leaves, moving.front(width), block.chosen & ~passes)


def _joined(first: TokenBatch, second: TokenBatch) -> TokenBatch:
    """Two batches one after the other; the keys and values of the second become fp32, as those read from codes are."""
    second = second._replace(keys=second.keys.float(), values=second.values.float())
    following = slot_tensors(second)
    return map_slots(lambda t: torch.cat([t, next(following)], 2), first)  # pyright: ignore[reportReturnType]
