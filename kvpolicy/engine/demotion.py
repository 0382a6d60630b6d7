"""Moving tokens from the exact part to a codec's stages, and from one stage to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine.capacity import exact_count
from kvpolicy.engine.codec_view import codec_keys, stage_range, store_of
from kvpolicy.engine.slots import FAR, Loose, frozen_rows, is_pinned, leaving_order, open_slots
from kvpolicy.engine.state import map_state, tensors
from kvpolicy.protocols import StageStore

if TYPE_CHECKING:
    from kvpolicy.hf.layer import PolicyLayer


def settle_loose(
    layer: PolicyLayer, loose: Loose, idle: Tensor | None = None, first: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Give every chosen token a slot: those that leave first are coded, the others stay exact.

    Args:
        layer: Whose slots.
        loose: The tokens.
        idle: Rows that got no token, [B] bool, of which nothing is coded: alone they would not have been called.
        first: Rows that got their first tokens, [B] bool, of which some may be frozen.

    Returns:
        The exact keys and values, [B, H, E, D].
    """
    if not sum(layer.layout.coded):  # then nothing is frozen either
        some = loose.take(_by_position(loose)[..., : layer.layout.exact])
        return _put_first(layer, some, ~some.chosen, layer.layout.exact)
    loose = _drop_unchosen(loose)
    if _freeze(layer, loose, first):
        loose = loose._replace(chosen=loose.chosen & ~is_pinned(layer, loose.positions))
    count = loose.chosen.sum(-1)  # [B, H]
    order = leaving_order(layer, loose)
    assert layer.rows is not None
    traits = layer.policy.codec.traits
    stays = layer.rows.full - traits.block
    moved = (count - stays).clamp_min(0).div(traits.group_size, rounding_mode="floor") * traits.group_size
    moved = moved if idle is None else moved.masked_fill(idle[:, None], 0)
    _code(layer, loose.take(order), moved)
    return _place_exact(layer, loose, order, moved)


def _put_first(
    layer: PolicyLayer, some: Loose, gone: Tensor, size: int, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Put tokens, which are copies, into the first slots of all `rows` [B, 1, 1], all by default.

    Returns:
        Their keys and values, [B, H, size, D]; 0 if `gone`.
    """
    width = some.positions.shape[-1]
    slots, items = (layer.positions, *tensors(layer.state)), (some.positions, *tensors(some.state))
    for slot, item, empty in zip(slots, items, (-1, *[0] * (len(items) - 1)), strict=True):
        new = item.masked_fill(gone, empty)
        slot[..., :width] = new if rows is None else torch.where(rows, new, slot[..., :width])
    keys, values = (t.masked_fill_(gone[..., None], 0) for t in (some.keys, some.values))
    beside = (0, 0, 0, size - width)
    return (keys, values) if width == size else (F.pad(keys, beside), F.pad(values, beside))


def _by_position(loose: Loose) -> Tensor:
    """The index of each token, [B, H, n], the unchosen last."""
    return torch.where(loose.chosen, loose.positions, FAR).argsort(dim=-1, stable=True)


def _drop_unchosen(loose: Loose) -> Loose:
    """The same without most of what is not chosen, by position."""
    most = max(int(loose.chosen.sum(-1).max()), 1)
    return loose.take(_by_position(loose)[..., :most])


def _freeze(layer: PolicyLayer, loose: Loose, first: Tensor | None) -> bool:
    """Put each row's newest tokens into the first exact slots, once, where the codec takes them for atoms."""
    traits = layer.policy.codec.traits
    if traits.pins != "newest" or not traits.pinned or first is None or not bool(first.any()):
        return False
    assert layer.rows is not None and layer.keys is not None and layer.values is not None
    own, old = first[:, None, None], (layer.keys, layer.values)
    width = min(traits.pinned, loose.positions.shape[-1])
    newest = torch.where(loose.chosen, loose.positions, -1).argsort(dim=-1, descending=True, stable=True)[..., :width]
    taken = loose.take(newest)
    gone = ~taken.chosen | (layer.rows.full == FAR)[..., None]  # alone such a row would have no codes, so no atoms
    pins = layer.rows.pins[..., :width]
    pins.copy_(torch.where(own, taken.positions.masked_fill(gone, -1), pins))
    new = _put_first(layer, taken, gone, traits.pinned, own)  # atoms must be there before codes are
    if layer.frozen:
        new = (torch.where(own[..., None], n, o[:, :, : layer.frozen]) for n, o in zip(new, old, strict=True))
    layer.keys, layer.values = new
    layer.freeze(traits.pinned)
    return True


def _place_exact(layer: PolicyLayer, loose: Loose, order: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
    """Put what is left behind the frozen slots, by position."""
    assert layer.keys is not None and layer.values is not None
    size, most, count = layer.layout.exact, order.shape[-1], loose.chosen.sum(-1, keepdim=True)
    slot = torch.arange(size, device=order.device).expand(*order.shape[:2], -1)
    index = order.gather(-1, (moved[..., None] + slot).clamp_max(most - 1))
    there = moved[..., None] + slot < count
    positions = torch.where(there, loose.positions.gather(-1, index), FAR)
    index = index.gather(-1, positions.argsort(dim=-1, stable=True))  # by position
    first = layer.frozen * frozen_rows(layer) if layer.frozen else 0
    rest = loose.take(index.gather(-1, (slot - first).clamp_min(0)))
    there = (slot >= first) & (moved[..., None] + slot - first < count)
    own = open_slots(layer)
    held = layer.positions[..., :size]
    layer.positions[..., :size] = torch.where(own, rest.positions.masked_fill(~there, -1), held)
    for old, item in zip(tensors(layer.state), tensors(rest.state), strict=True):
        old[..., :size] = torch.where(own, item.masked_fill(~there, 0), old[..., :size])
    return tuple(
        _beside(t, new.masked_fill(~there[..., None], 0), own, layer.frozen)
        for t, new in (
            (layer.keys, rest.keys),
            (layer.values, rest.values),
        )
    )  # pyright: ignore[reportReturnType]


def _beside(held: Tensor, new: Tensor, own: Tensor, frozen: int) -> Tensor:
    """Exact keys or values: the frozen ones as they are, elsewhere `new` [B, H, E, D]."""
    if not frozen:
        return new
    pad = F.pad(held[:, :, :frozen], (0, 0, 0, new.shape[2] - frozen))
    return torch.where(own[..., None], new, pad)


def _code(layer: PolicyLayer, loose: Loose, moved: Tensor) -> None:
    """Code each head's first `moved` [B, H] tokens."""
    most = int(moved.max())
    if not most:
        return
    loose = _first(_in_frame(layer, loose), 0, most)
    fresh = ~(layer.positions[..., layer.layout.exact :] >= 0).any(-1)
    if bool(fresh.any()):
        _fill(layer, loose, moved, fresh)
    later = torch.where(fresh, 0, moved)
    block = layer.policy.codec.traits.block
    rank = torch.arange(block, device=moved.device)
    for start in range(0, int(later.max()), block):
        _place(layer, 0, _first(loose, start, block), start + rank < later[..., None])


def _fill(layer: PolicyLayer, loose: Loose, moved: Tensor, fresh: Tensor) -> None:
    """Fill the empty stages of `fresh` [B, H] heads, the first with the tokens that would have left last."""
    assert layer.rows is not None
    end = moved.where(fresh, 0)
    for stage, live in enumerate(_live(layer)):
        start = (end - layer.rows.room[:, stage, None]).clamp_min(0)
        size = int((end - start).max())
        if size:
            rank = torch.arange(size, device=moved.device).expand(*moved.shape, -1)
            some = loose.take((start[..., None] + rank).clamp_max(loose.positions.shape[-1] - 1))
            _write(layer, stage, some, rank, rank < (end - start)[..., None], live)
        end = start
    assert not bool(end.any()), "a layout has too few slots for its tokens"


def _first(loose: Loose, start: int, size: int) -> Loose:
    index = torch.arange(start, start + size, device=loose.positions.device)
    return loose.take(index.expand(*loose.positions.shape[:2], -1).clamp_max(loose.positions.shape[-1] - 1))


def _in_frame(layer: PolicyLayer, loose: Loose) -> Loose:
    """The same, with keys as the codec wants them."""
    return loose._replace(keys=codec_keys(layer, loose.keys, loose.positions))


def _live(layer: PolicyLayer) -> list[Tensor]:
    """Which slots of each stage hold a token, each [B, H, C]."""
    return [layer.positions[..., stage_range(layer, stage)] >= 0 for stage in range(len(layer.layout.coded))]


def flush(layer: PolicyLayer) -> None:
    """Code the first block to leave, in every head whose exact part is full. Traceable, no sync."""
    assert layer.keys is not None and layer.values is not None and layer.rows is not None
    exact = layer.layout.exact
    positions = layer.positions[..., :exact]
    live, state = (positions >= 0) & open_slots(layer), map_state(lambda t: t[..., :exact], layer.state)
    active = live.sum(-1) >= layer.rows.full
    loose = Loose(layer.keys, layer.values, positions, state, live)
    index = leaving_order(layer, loose)[..., : layer.policy.codec.traits.block]
    taken = loose.take(index)
    there = active[..., None].expand_as(index)
    layer.positions.scatter_(-1, index, taken.positions.masked_fill(there, -1))
    _place(layer, 0, _in_frame(layer, taken), there)


def recode(layer: PolicyLayer) -> None:
    """Code all tokens anew in every head whose exact part is full."""
    assert layer.keys is not None and layer.values is not None and layer.rows is not None
    due = exact_count(layer) >= layer.rows.full
    past = layer.past()
    assert past is not None
    before, before_state = layer.positions.clone(), map_state(torch.clone, layer.state)
    moves = past.live & due[..., None]
    moves[..., : layer.layout.exact] &= open_slots(layer)
    loose = Loose(past.keys, past.values, before, before_state, moves)
    layer.positions.masked_fill_(moves, -1)
    keys, values = settle_loose(layer, loose)
    again = due[..., None]
    for now, new in ((layer.keys, keys), (layer.values, values)):
        now.copy_(torch.where(again[..., None], new, now))
    layer.positions.copy_(torch.where(again, layer.positions, before))
    for now, then in zip(tensors(layer.state), tensors(before_state), strict=True):
        now.copy_(torch.where(again, now, then))


def _place(layer: PolicyLayer, stage: int, block: Loose, there: Tensor) -> None:
    """Code tokens into a stage, where `there` [B, H, n]; what it has no room for moves on to the next stage first."""
    assert layer.rows is not None
    if any(layer.layout.coded[stage + 1 :]):
        block, there = _move_on(layer, stage, block, there)
    size = layer.policy.codec.traits.group_size
    live = _live(layer)[stage]
    crowd = live.unflatten(-1, (-1, size)).sum(-1, keepdim=True).expand(*live.shape[:2], -1, size).flatten(-2)
    # A row has the slots that it would have alone, however many its neighbours need.
    other = torch.arange(live.shape[-1], device=live.device) >= layer.rows.room[:, stage, None, None]
    order = torch.where(live | other, size + 1 + other.long(), crowd).argsort(dim=-1, stable=True)
    if len(layer.layout.coded) > 1:
        block, there = _compact(block, there, min(there.shape[-1], live.shape[-1]))
    _write(layer, stage, block, order[..., : there.shape[-1]], there, live)


def _compact(block: Loose, there: Tensor, width: int) -> tuple[Loose, Tensor]:
    """The tokens `there` [B, H, n] in front, in their order, cut to `width`, which is enough for them."""
    index = (~there).int().argsort(dim=-1, stable=True)[..., :width]
    return block.take(index), there.gather(-1, index)


def _move_on(layer: PolicyLayer, stage: int, block: Loose, there: Tensor) -> tuple[Loose, Tensor]:
    """Make dead slots in a stage for tokens `there` [B, H, n]: its first to leave are read and placed further down.

    Where the whole stage is too small for a block, the first of the block go further down as well.

    Returns:
        The block, and which of it are for this stage.
    """
    assert layer.rows is not None
    at = stage_range(layer, stage)
    positions = layer.positions[..., at]
    live = positions >= 0
    lack = there.sum(-1) - (layer.rows.room[:, stage, None] - live.sum(-1))
    state = map_state(lambda t: t[..., at], layer.state)
    none = positions[..., None].expand(-1, -1, -1, 0)  # keys and values are read for those that leave alone
    index = leaving_order(layer, Loose(none, none, positions, state, live))[..., : there.shape[-1]]
    store, codec = store_of(layer, stage), layer.policy.codec.stages[stage]
    keys, values = codec.keys(store, index), codec.values(store, index)
    taken = Loose(
        keys, values, positions.gather(-1, index), map_state(lambda t: t.gather(-1, index), state),
        live.gather(-1, index),
    )  # fmt: skip
    leaves = (torch.arange(index.shape[-1], device=index.device) < lack[..., None]) & taken.chosen
    layer.positions.scatter_(-1, index + at.start, taken.positions.masked_fill(leaves, -1))
    passes = there & (there.long().cumsum(-1) <= (lack - leaves.sum(-1))[..., None])
    parts = zip(
        tensors(taken), tensors(block._replace(keys=block.keys.float(), values=block.values.float())), strict=True
    )
    both = map_state(lambda _: torch.cat(next(parts), 2), taken)
    _place(layer, stage + 1, *_compact(both, torch.cat([leaves, passes], -1), there.shape[-1]))
    return block, there & ~passes


def _write(layer: PolicyLayer, stage: int, block: Loose, slots: Tensor, there: Tensor, live: Tensor) -> None:
    store: StageStore = store_of(layer, stage)
    layer.policy.codec.stages[stage].write(store, block.keys, block.values, slots, there, live)
    at = slots + layer.layout.starts()[stage]
    kept = layer.positions.gather(-1, at)
    layer.positions.scatter_(-1, at, torch.where(there, block.positions, kept))
    for target, item in zip(tensors(layer.state), tensors(block.state), strict=True):
        target.scatter_(-1, at, torch.where(there, item, target.gather(-1, at)))
