"""Per-row limits of a layer with a codec that has stages."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.token_batch import BEYOND
from kvpolicy.protocols import Codec, Layout, Traits, traits_for


class RowBudget(NamedTuple):
    """Tokens of each row of one layer, [B] int64 each.

    Attributes:
        keep: The most tokens to keep of the prompt.
        extra: Tokens that may be added later without an eviction.
        expected_len: The most tokens that the row will hold, as far as is known: what is allocated.
        last: The most tokens that the row will ever have without `extra`, kept or not, as far as is known; needed if
            heads have budgets of their own.
        added: Tokens of each row's prompt if all of them are kept beside all that is held; None if tokens compete.
    """

    keep: Tensor
    extra: Tensor
    expected_len: Tensor
    last: Tensor | None = None
    added: Tensor | None = None


class RowLimits(NamedTuple):
    """Limits and positions of each row; no row depends on the others.

    Attributes:
        flush_threshold: Tokens in the full-precision buffer (dictionary slots not counted) at which a head's oldest
            block is demoted, [B, 1] int64.
        block: Tokens that are demoted at a time, [B, 1] int64; empty if they are the same for any row, `Traits.block`.
        residual: The newest tokens that are never demoted, [B, 1] int64; empty as `block` is.
        stage_capacity: Slots of each stage that the row may use, [B, stages] int64; empty in pages, which have a slot
            for every token of their head.
        pins: Positions that stay in full precision, [B, H or 1, pinned] int32, -1 for none.
        rope_offset: Offset of the rotary positions from a row's positions, [B] int64; empty unless keys are unrotated.
        statistics: The tensors of the codec's statistics, in their order; see `KeptStatistic`.
    """

    flush_threshold: Tensor
    block: Tensor
    residual: Tensor
    stage_capacity: Tensor
    pins: Tensor
    rope_offset: Tensor
    statistics: tuple[Tensor, ...]


def buffer_slots(codec: Codec, tokens: int) -> int:
    """Slots of a head's full-precision buffer if its codes are in pages: those of the residual and of one block.

    Args:
        codec: The codec.
        tokens: The most tokens of a row.
    """
    traits = traits_for(codec, tokens)
    return traits.residual + traits.block


def alloc_limits(
    codec: Codec, batch: int, heads: int, head_dim: int, device: torch.device | str, *, paged: bool = False
) -> RowLimits | None:
    """Limits before any budget is known; None for a codec without stages."""
    traits = codec.traits
    stages = len(codec.stages)
    if not stages:
        return None
    pin_heads = heads if traits.pins == "newest" else 1  # heads may have kept different tokens
    unrotated = traits.key_space == "unrotated"
    # Sizes do not decrease with the tokens of a row, so if they are equal at both ends, no row differs.
    sized = batch if traits_for(codec, 0) != traits else 0
    return RowLimits(
        flush_threshold=torch.full((batch, 1), BEYOND, dtype=torch.int64, device=device),
        block=torch.full((sized, 1), traits.block, dtype=torch.int64, device=device),
        residual=torch.full((sized, 1), traits.residual, dtype=torch.int64, device=device),
        stage_capacity=torch.zeros(0 if paged else batch, stages, dtype=torch.int64, device=device),
        pins=torch.full((batch, pin_heads, traits.pinned), -1, dtype=torch.int32, device=device),
        rope_offset=torch.zeros(batch if unrotated else 0, dtype=torch.int64, device=device),
        statistics=tuple(each.empty(batch, heads, head_dim, device) for each in codec.statistics),
    )


def with_tokens(limits: RowLimits, codec: Codec, tokens: list[int], reserved: int) -> RowLimits:
    """The limits of rows that may hold `tokens` each: a row gets the slots that it would have alone in a batch.

    Args:
        limits: The limits so far.
        codec: The codec.
        tokens: The most tokens of each row.
        reserved: Dictionary slots.
    """
    if not limits.stage_capacity.shape[0]:
        threshold = [[buffer_slots(codec, count)] for count in tokens]
        return _with_sizes(limits, codec, tokens)._replace(flush_threshold=limits.flush_threshold.new_tensor(threshold))
    layouts = [codec.layout(count) for count in tokens]
    has_dictionary = (limits.pins[:, 0] >= 0).any(-1).tolist() if reserved else [False] * len(layouts)
    threshold = [
        # A row without coded slots of its own never demotes, even if the layer has some for longer rows.
        [layout.exact - reserved * own if sum(layout.coded) else BEYOND]
        for layout, own in zip(layouts, has_dictionary, strict=True)
    ]
    limits = _with_sizes(limits, codec, tokens)
    return limits._replace(
        flush_threshold=limits.flush_threshold.new_tensor(threshold),
        stage_capacity=limits.stage_capacity.new_tensor(stage_slots(layouts, limits.stage_capacity.shape[1])),
    )


def stage_slots(layouts: list[Layout], stages: int) -> list[list[int]]:
    """Coded slots of each of `stages` stages, by layout; the layout of a row with few tokens has none."""
    return [[*layout.coded, *[0] * (stages - len(layout.coded))] for layout in layouts]


def _with_sizes(limits: RowLimits, codec: Codec, tokens: list[int]) -> RowLimits:
    """The limits with the block and the residual of rows that may hold `tokens` each."""
    if not limits.block.shape[0]:
        return limits
    sizes = [traits_for(codec, count) for count in tokens]
    return limits._replace(
        block=limits.block.new_tensor([[traits.block] for traits in sizes]),
        residual=limits.residual.new_tensor([[traits.residual] for traits in sizes]),
    )


def block_of(limits: RowLimits, traits: Traits) -> Tensor | int:
    """Tokens of each row that are demoted at a time, [B, 1] or one number for all rows."""
    return limits.block if limits.block.shape[0] else traits.block


def row_block_of(limits: RowLimits, traits: Traits) -> Tensor | int:
    """The same to compare with the tokens of each head, [B, 1, 1] or one number for all rows."""
    block = block_of(limits, traits)
    return block[..., None] if isinstance(block, Tensor) else block


def residual_of(limits: RowLimits, traits: Traits) -> Tensor | int:
    """The newest tokens of each row that are never demoted, [B, 1] or one number for all rows."""
    return limits.residual if limits.residual.shape[0] else traits.residual


def pin_tokens(limits: RowLimits, traits: Traits, positions: Tensor, massive: Tensor | None, first: Tensor) -> None:
    """Fix, in place, which tokens of the first prompt are never demoted (the newest are chosen by each head later).

    Args:
        limits: Limits of the rows; their pins are set.
        traits: The traits of the codec.
        positions: Positions of the prompt's tokens, [B, P] int32, -1 for padding.
        massive: Which of them hold the largest activations, [B, P] bool, if the codec asks for these.
        first: Rows that had no token before, [B] bool; the others keep their pins.
    """
    if traits.pins in ("none", "newest"):
        return
    if traits.pins == "massive":
        assert massive is not None, "the largest activations were not recorded"
        positions = positions.masked_fill(~massive, -1)
    else:
        positions = positions.masked_fill(positions >= traits.pinned, -1)
    pins = positions.sort(dim=-1, descending=True).values[:, : traits.pinned]
    held = limits.pins[:, 0, : pins.shape[1]]
    held.copy_(torch.where(first[:, None], pins, held))


def is_pinned(limits: RowLimits, positions: Tensor) -> Tensor:
    """Which positions [B, H, n] are pinned, [B, H, n] bool."""
    # An unused pin is -1, as is the position of an empty slot: callers mask by what is occupied.
    return (positions[..., None] == limits.pins[:, :, None]).any(-1)


def has_dictionary(limits: RowLimits) -> Tensor:
    """Rows with dictionary slots, [B, 1, 1] bool: those that had room for codes when their first prompt was placed."""
    return limits.pins[:, :1, :1] >= 0
