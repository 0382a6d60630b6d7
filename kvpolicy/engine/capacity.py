"""Room for the steps to come: how many are sure to fit, and slots for more."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine.slots import FAR, fix_addresses, lay_out, open_slots
from kvpolicy.engine.state import map_state, tensors
from kvpolicy.reporting.logging import tell_extended

if TYPE_CHECKING:
    from kvpolicy.hf.layer import PolicyLayer


def exact_count(layer: PolicyLayer) -> Tensor:
    """Exact tokens of each head, those in frozen slots left out, [B, H]."""
    return ((layer.positions[..., : layer.layout.exact] >= 0) & open_slots(layer)).sum(-1)


def free_steps(layer: PolicyLayer) -> float:
    """Steps that are sure to fit: none is ever refused where each evicts a token in place."""
    if not layer.can_run_out:
        return math.inf
    count = (layer.positions >= 0).sum(-1)
    ends = torch.tensor(layer.ends, device=count.device)
    limit = layer.budget if layer.grows else torch.where(layer.budget > ends, ends, FAR)  # else a row evicts
    left = limit[:, None] - count
    if layer.rows is not None:  # what a row evicts may be coded, and the new token is exact
        exact = torch.minimum(open_slots(layer).sum(-1).expand_as(count), layer.rows.full)
        left = torch.minimum(left, exact - exact_count(layer))
    return int(left.amin())


def is_short(layer: PolicyLayer) -> bool:
    """Whether a row may hold more than was expected of it, and has no slots for that yet."""
    return not layer.grows and any(own < most for own, most in zip(layer.ends, layer.budget.tolist(), strict=True))


def held_by(layer: PolicyLayer) -> list[int]:
    """Tokens in each row's fullest head."""
    return (layer.positions >= 0).sum(-1).amax(-1).tolist()


def lacking(layer: PolicyLayer, most: int) -> list[int]:
    """Tokens, `most` at once, that each row needs room for before its next step: as if it were alone."""
    each = zip(layer.ends, layer.budget.tolist(), held_by(layer), strict=True)
    if layer.grows:
        return [most if held >= budget else 0 for _, budget, held in each]
    return [min(most, budget - end) if end <= held < budget else 0 for end, budget, held in each]


def later(ends: list[int], others: Tensor, idle: Tensor | None) -> list[int]:
    """The later end of each row; of rows that are `idle` [B], the old one."""
    found = [max(pair) for pair in zip(ends, others.tolist(), strict=True)]
    return found if idle is None else [a if own else b for a, b, own in zip(ends, found, idle.tolist(), strict=True)]


def extend(layer: PolicyLayer, more: list[int]) -> None:
    """Let each row hold so many tokens more, with slots where it takes them; in a growing cache they are budget too."""
    layer.ends = [end + tokens for end, tokens in zip(layer.ends, more, strict=True)]
    if max(layer.ends) > layer.tokens:
        _lengthen(layer, max(layer.ends))
    layer.set_budget(layer.budget + layer.budget.new_tensor(more) if layer.grows else layer.budget)
    layer.short = is_short(layer)
    fix_addresses(layer)


def _lengthen(layer: PolicyLayer, tokens: int) -> None:
    """Make slots for `tokens` in all."""
    assert layer.keys is not None and layer.values is not None
    old, more = layer.layout.exact, tokens - layer.tokens
    exact_positions, exact_state = layer.positions[..., :old], map_state(lambda t: t[..., :old], layer.state)
    layer.tokens = tokens
    lay_out(layer, layer.policy.codec.layout(layer.tokens))
    layer.positions[..., :old] = exact_positions
    for now, then in zip(tensors(layer.state), tensors(exact_state), strict=True):
        now[..., :old] = then
    pad = (0, 0, 0, layer.layout.exact - old)
    layer.keys, layer.values = (F.pad(t, pad) for t in (layer.keys, layer.values))
    tell_extended(layer, more)
