"""Moving tokens from the exact part to a codec's stages, and from one stage to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvpolicy.protocols import Store
from kvpolicy.reading import codec_keys, stage_range, store_of
from kvpolicy.slots import FAR, Loose, leaving_order
from kvpolicy.state import map_state, tensors

if TYPE_CHECKING:
    from kvpolicy.layer import PolicyLayer


def settle_loose(layer: PolicyLayer, loose: Loose) -> tuple[Tensor, Tensor]:
    """Give every chosen token a slot: those that leave first are coded, the others stay exact.

    Returns:
        The exact keys and values, [B, H, E, D].
    """
    loose = _drop_unchosen(loose)
    if _freeze(layer, loose):
        loose = loose._replace(chosen=loose.chosen & ~_pinned(layer, loose.positions))
    count = loose.chosen.sum(-1)  # [B, H]
    order = leaving_order(layer, loose)
    moved = torch.zeros_like(count)
    if layer.layout.coded:
        assert layer.rows is not None
        traits = layer.policy.codec.traits
        stays = layer.rows.full - traits.block
        moved = (count - stays).clamp_min(0).div(traits.grain, rounding_mode="floor") * traits.grain
        _code(layer, loose.take(order), moved)
    return _place_exact(layer, loose, order, moved)


def _drop_unchosen(loose: Loose) -> Loose:
    """The same without most of what is not chosen, by position."""
    most = max(int(loose.chosen.sum(-1).max()), 1)
    order = torch.where(loose.chosen, loose.positions, FAR).argsort(dim=-1, stable=True)
    return loose.take(order[..., :most])


def _freeze(layer: PolicyLayer, loose: Loose) -> bool:
    """Put the newest tokens into the first exact slots, once, where the codec takes them for atoms."""
    traits = layer.policy.codec.traits
    if traits.pins != "newest" or not traits.pinned or layer.pinned or not sum(layer.layout.coded):
        return False
    assert layer.rows is not None
    width = min(traits.pinned, loose.positions.shape[-1])
    newest = torch.where(loose.chosen, loose.positions, -1).argsort(dim=-1, descending=True, stable=True)[..., :width]
    taken = loose.take(newest)
    gone = ~taken.chosen
    layer.positions[..., :width] = layer.rows.pins[..., :width] = taken.positions.masked_fill(gone, -1)
    for slot, item in zip(tensors(layer.state), tensors(taken.state), strict=True):
        slot[..., :width] = item.masked_fill(gone, 0)
    empty = taken.keys.new_zeros(*gone.shape[:2], traits.pinned - width, taken.keys.shape[-1])
    blank = gone[..., None]
    layer.keys = torch.cat([taken.keys.masked_fill(blank, 0), empty], 2)  # atoms must be there before codes are
    layer.values = torch.cat([taken.values.masked_fill(blank, 0), empty], 2)
    layer.freeze(traits.pinned)
    return True


def _pinned(layer: PolicyLayer, positions: Tensor) -> Tensor:
    assert layer.rows is not None
    return (positions[..., None] == layer.rows.pins[:, :, None]).any(-1)


def _place_exact(layer: PolicyLayer, loose: Loose, order: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
    """Put what is left behind the frozen slots, by position."""
    assert layer.keys is not None and layer.values is not None
    start, size, most = layer.frozen, layer.layout.exact - layer.frozen, order.shape[-1]
    rank = torch.arange(size, device=order.device)
    index = order.gather(-1, (moved[..., None] + rank).clamp_max(most - 1))
    there = moved[..., None] + rank < loose.chosen.sum(-1, keepdim=True)
    positions = loose.positions.gather(-1, index)
    again = torch.where(there, positions, FAR).argsort(dim=-1, stable=True)
    rest, there = loose.take(index.gather(-1, again)), there.gather(-1, again)
    end = layer.layout.exact
    layer.positions[..., start:end] = rest.positions.masked_fill(~there, -1)
    for slot, item in zip(tensors(layer.state), tensors(rest.state), strict=True):
        slot[..., start:end] = item.masked_fill(~there, 0)
    blank = ~there[..., None]
    keys, values = rest.keys.masked_fill(blank, 0), rest.values.masked_fill(blank, 0)
    if not start:
        return keys, values
    return torch.cat([layer.keys[:, :, :start], keys], 2), torch.cat([layer.values[:, :, :start], values], 2)


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
    exact = slice(layer.frozen, layer.layout.exact)
    positions = layer.positions[..., exact]
    live, state = positions >= 0, map_state(lambda t: t[..., exact], layer.state)
    active = live.sum(-1) >= layer.rows.full
    loose = Loose(layer.keys[:, :, exact], layer.values[:, :, exact], positions, state, live)
    index = leaving_order(layer, loose)[..., : layer.policy.codec.traits.block]
    taken = loose.take(index)
    there = active[..., None].expand_as(index)
    layer.positions.scatter_(-1, index + layer.frozen, taken.positions.masked_fill(there, -1))
    _place(layer, 0, _in_frame(layer, taken), there)


def recode(layer: PolicyLayer) -> None:
    """Code all tokens anew in every head whose exact part is full."""
    assert layer.keys is not None and layer.values is not None and layer.rows is not None
    due = (layer.positions[..., : layer.layout.exact] >= 0).sum(-1) >= layer.rows.full
    past = layer.past()
    assert past is not None
    before, before_state = layer.positions.clone(), map_state(torch.clone, layer.state)
    loose = Loose(past.keys, past.values, before, before_state, past.live & due[..., None])
    layer.positions.masked_fill_(due[..., None], -1)
    keys, values = settle_loose(layer, loose)
    wide = due[..., None, None]
    layer.keys, layer.values = torch.where(wide, keys, layer.keys), torch.where(wide, values, layer.values)
    layer.positions = torch.where(due[..., None], layer.positions, before)
    held = tensors(before_state)
    layer.state = map_state(lambda t: torch.where(due[..., None], t, next(held)), layer.state)


def _place(layer: PolicyLayer, stage: int, block: Loose, there: Tensor) -> None:
    """Code tokens into a stage, where `there` [B, H, n]; what it has no room for moves on to the next stage first."""
    assert layer.rows is not None
    if any(layer.layout.coded[stage + 1 :]):
        _move_on(layer, stage, there)
    size = layer.policy.codec.traits.grain
    live = _live(layer)[stage]
    crowd = live.unflatten(-1, (-1, size)).sum(-1, keepdim=True).expand(*live.shape[:2], -1, size).flatten(-2)
    # A row has the slots that it would have alone, however many its neighbours need.
    other = torch.arange(live.shape[-1], device=live.device) >= layer.rows.room[:, stage, None, None]
    order = torch.where(live | other, size + 1 + other.long(), crowd).argsort(dim=-1, stable=True)
    count = min(there.shape[-1], live.shape[-1])
    _write(layer, stage, _first(block, 0, count), order[..., :count], there[..., :count], live)


def _move_on(layer: PolicyLayer, stage: int, there: Tensor) -> None:
    """Make dead slots in a stage for `there` [B, H, n] tokens: its first to leave are read and placed further down."""
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
    leaves = torch.arange(index.shape[-1], device=index.device) < lack[..., None]
    layer.positions.scatter_(-1, index + at.start, taken.positions.masked_fill(leaves, -1))
    _place(layer, stage + 1, taken, leaves)


def _write(layer: PolicyLayer, stage: int, block: Loose, slots: Tensor, there: Tensor, live: Tensor) -> None:
    store: Store = store_of(layer, stage)
    layer.policy.codec.stages[stage].write(store, block.keys, block.values, slots, there, live)
    at = slots + layer.layout.starts()[stage]
    kept = layer.positions.gather(-1, at)
    layer.positions.scatter_(-1, at, torch.where(there, block.positions, kept))
    for target, item in zip(tensors(layer.state), tensors(block.state), strict=True):
        target.scatter_(-1, at, torch.where(there, item, target.gather(-1, at)))
