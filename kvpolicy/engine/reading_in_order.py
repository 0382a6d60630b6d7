"""What a step reads of a layer whose slot n holds token n: which entries hold tokens is known from the length alone.

The layers of an eager step have the same lengths, so that all of this is made once, by the `StepMemo` of the step. What
is read equals what `kvpolicy.engine.reading.choose` finds from the positions of the slots.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvpolicy.engine.reading import FIRST, NEWEST, RECENT, ReadShape
from kvpolicy.kernels.in_memory import in_memory
from kvpolicy.kernels.largest import largest
from kvpolicy.protocols import ALONE, Read, StepMemo


def choose_in_order(
    shape: ReadShape,
    needs: Callable[[Tensor], Tensor],
    length: Tensor,
    recent: int,
    memo: StepMemo,
    in_slots_order: bool = False,
    *,
    sinks: int = 0,
) -> Read:
    """Choose as `choose`, where every row reads `shape.chosen` entries of one part that begins at slot 0.

    Args:
        shape: Read plan of the layer.
        needs: See `choose`; it is given which entries hold no token as [B, 1, X] bool.
        length: Tokens that each row has seen, the same tensor in all layers of the step, [B] int64.
        recent: See `choose`.
        memo: What the layers of the step compute alike.
        in_slots_order: See `choose`.
        sinks: See `choose`.
    """
    level = memo.once(_levels, length, shape.page, shape.entries, recent, sinks)
    empty = memo.once(_empty_entries, length, shape.page, shape.entries)
    need = torch.where(memo.once(torch.ne, level, 0), level, needs(empty))
    order = memo.once(torch.arange, shape.entries, device=length.device)
    entries = largest(in_memory(need), order.expand_as(need), shape.chosen)
    if in_slots_order:
        entries = entries.sort(-1).values
    places = _places(shape, entries, memo)
    chosen = places < length[:, None, None, None]
    # An entry holds a token if its first slot does.
    return Read(_slots(shape, places), chosen.flatten(2), entries, chosen[..., 0], none_empty=True)


def _empty_entries(length: Tensor, page: int, entries: int) -> Tensor:
    """Which entries hold no token, [B, 1, X] bool."""
    return torch.arange(0, entries * page, page, device=length.device) >= length[:, None, None]


def _levels(length: Tensor, page: int, entries: int, recent: int, sinks: int) -> Tensor:
    """How much entries are needed for what they hold, [B, 1, X] fp32.

    It is 0 where queries decide, and -inf for an entry without a token.
    """
    start = torch.arange(0, entries * page, page, device=length.device)
    behind = length[:, None, None]
    always = start > behind - (recent + page)
    level = torch.where(always | (start < sinks) if sinks else always, RECENT, 0.0)
    level[..., :1] = FIRST
    level.masked_fill_(start >= behind - page, NEWEST)
    return level.masked_fill_(start >= behind, -torch.inf)


def slots_of(shape: ReadShape, entries: Tensor) -> Tensor:
    """The slots of entries [B, H, ...] of one part that begins at slot 0, [B, H, n]; the last one is repeated."""
    return _slots(shape, _places(shape, entries))


def held_by(shape: ReadShape, entries: Tensor, length: Tensor) -> Tensor:
    """Which slots of entries [B, H, ...] hold a token of it, [B, H, ..., page] bool."""
    places = _places(shape, entries)
    return places < length.view(-1, *[1] * (places.dim() - 1))


def _places(shape: ReadShape, entries: Tensor, memo: StepMemo = ALONE) -> Tensor:
    """Where tokens of entries [B, H, ...] are, [B, H, ..., page]; of the last one also behind the end of the part."""
    within = memo.once(torch.arange, shape.page, device=entries.device)
    return torch.add(within, entries[..., None], alpha=shape.page)


def _slots(shape: ReadShape, places: Tensor) -> Tensor:
    """The slots at places [B, H, ..., page], [B, H, n]; a place behind the end repeats the last slot, unread."""
    ((_, size),) = shape.parts
    slots = places.flatten(2)
    return slots.clamp_max(size - 1) if size % shape.page else slots
