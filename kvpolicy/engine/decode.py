"""One decode step: evict where the budget is full, overwrite a slot, attend. In place, no growth, no host sync."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvpolicy.engine.attention import ScoreTransform, attend_slots
from kvpolicy.engine.slots import open_slots, without_nan
from kvpolicy.engine.state import map_state, tensors
from kvpolicy.protocols import View

if TYPE_CHECKING:
    from kvpolicy.hf.layer import PolicyLayer

_NO_SLOT = "the cache has no free slot: call cache.tick() between steps"


def decode_step(
    layer: PolicyLayer, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, transform: ScoreTransform
) -> Tensor:  # fmt: skip
    """Take in one token per row and attend from it.

    Args:
        layer: Its slots; changed in place.
        q: [B, Hq, 1, D].
        k: [B, H, 1, D].
        v: [B, H, 1, D].
        valid: Which rows have a token and no padding, [B, 1] bool; None where all have.
        transform: What is done to the scores.

    Returns:
        [B, Hq, 1, D].
    """
    assert layer.keys is not None and layer.values is not None
    selector = layer.policy.selector
    position = layer.length.to(torch.int32)[:, None, None]  # the new token's: as many as came before it
    layer.length.add_(1 if valid is None else valid[:, 0].long())
    layer.columns.add_(1)
    view = View(layer.positions, layer.length, layer.budget, layer.layer_idx, layer.ranks)
    slot = _make_slot(layer, view, valid)
    index = slot[..., None].expand(-1, -1, -1, k.shape[-1])
    position = position.expand_as(slot)
    for target, at, item in ((layer.keys, index, k), (layer.values, index, v), (layer.positions, slot, position)):
        _put(target, at, item.detach(), valid)
    for part in tensors(layer.state):
        _put(part, slot, torch.zeros_like(slot, dtype=part.dtype), valid)
    exact = (layer.keys, layer.values)
    out, row = attend_slots(q, exact, layer.coded(), layer.positions >= 0, transform, selector.needs.decode_attn)
    if row is not None and selector.needs.decode_attn:
        _learn(layer, row.detach(), view, valid)
    return out


def _make_slot(layer: PolicyLayer, view: View, valid: Tensor | None) -> Tensor:
    """An exact slot for each head's new token, [B, H, 1]: a free one, or where the budget is full an evicted one's."""
    live = view.valid
    full = live.sum(-1, keepdim=True) >= layer.budget[:, None, None]
    if not layer.grows and not sum(layer.layout.coded):  # the victim's slot is taken at once; by rows with a token only
        slot = torch.where(full, _leaving(layer, view, live), ~live).argmax(-1, keepdim=True)
        if layer.can_run_out:
            _insist((full | ~live.all(-1, keepdim=True)).all(), _NO_SLOT)
        return slot
    if valid is not None:
        full = full & valid[:, :, None]
    if layer.grows:
        _insist(~full.any(), "the cache has no room left: call cache.tick() between steps")
    else:
        victim = _leaving(layer, view, live).argmax(-1, keepdim=True)
        position = layer.positions.gather(-1, victim)
        layer.positions.scatter_(-1, victim, position.masked_fill(full, -1))
    free = layer.positions[..., : layer.layout.exact] < 0
    if layer.frozen:
        free = free & open_slots(layer)
    if layer.can_run_out:
        _insist(free.any(-1).all(), _NO_SLOT)
    return free.to(torch.uint8).argmax(-1, keepdim=True)


def _leaving(layer: PolicyLayer, view: View, live: Tensor) -> Tensor:
    """Positions of the tokens of lowest priority, -1 elsewhere: of equals the latest leaves, [B, H, S]."""
    worth = without_nan(layer.policy.selector.priority(layer.state, view)).masked_fill(~live, torch.inf)
    return layer.positions.masked_fill(worth != worth.amin(-1, keepdim=True), -1)


def _insist(condition: Tensor, message: str) -> None:
    """Fail where a device condition does not hold, without waiting for it; stays in a compiled graph."""
    torch._assert_async(condition, message)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def _put(target: Tensor, index: Tensor, item: Tensor, valid: Tensor | None) -> None:
    """Write `item` at `index` along the slots, in the rows that are valid."""
    if valid is not None:
        keep = valid.view(-1, *[1] * (target.dim() - 1))
        item = torch.where(keep, item, target.gather(2, index))
    target.scatter_(2, index, item)


def _learn(layer: PolicyLayer, row: Tensor, view: View, valid: Tensor | None) -> None:
    """Let the selector see the new token's attention, in the rows that have one."""
    before = None if valid is None else map_state(torch.clone, layer.state)
    layer.policy.selector.step(layer.state, row, view)
    if before is not None and valid is not None:
        for now, then in zip(tensors(layer.state), tensors(before), strict=True):
            now.copy_(torch.where(valid[:, :, None], now, then))
