"""Room for the steps to come: how many are sure to fit, and slots for more."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.notices import tell_extended
from kvpolicy.slots import FAR, fix_addresses, lay_out, open_slots
from kvpolicy.state import map_state, tensors

if TYPE_CHECKING:
    from kvpolicy.layer import PolicyLayer


def exact_count(layer: PolicyLayer) -> Tensor:
    """Exact tokens of each head, those in frozen slots left out, [B, H]."""
    return ((layer.positions[..., : layer.layout.exact] >= 0) & open_slots(layer)).sum(-1)


def free_steps(layer: PolicyLayer) -> float:
    """Steps that are sure to fit: none is ever refused where each evicts a token in place."""
    if not layer.can_run_out:
        return math.inf
    count = (layer.positions >= 0).sum(-1)
    budget = layer.budget[:, None]
    limit = budget if layer.grows else torch.where(budget > layer.tokens, layer.tokens, FAR)  # else a row evicts
    exact = open_slots(layer).sum(-1).expand_as(count)
    exact = exact if layer.rows is None else torch.minimum(exact, layer.rows.full)
    return int(torch.minimum(exact - exact_count(layer), limit - count).amin())


def later(ends: list[int], others: Tensor, idle: Tensor | None) -> list[int]:
    """The later end of each row; of rows that are `idle` [B], the old one."""
    found = [max(pair) for pair in zip(ends, others.tolist(), strict=True)]
    return found if idle is None else [a if own else b for a, b, own in zip(ends, found, idle.tolist(), strict=True)]


def extend(layer: PolicyLayer, tokens: int) -> None:
    """Make slots for `tokens` more; in a growing cache they are budget too."""
    assert layer.keys is not None and layer.values is not None
    old = layer.layout.exact
    exact_positions, exact_state = layer.positions[..., :old], map_state(lambda t: t[..., :old], layer.state)
    layer.tokens += tokens
    layer.ends = [end + tokens for end in layer.ends]
    lay_out(layer, layer.policy.codec.layout(layer.tokens))
    layer.positions[..., :old] = exact_positions
    for now, then in zip(tensors(layer.state), tensors(exact_state), strict=True):
        now[..., :old] = then
    pad = (0, 0, 0, layer.layout.exact - old)
    layer.keys, layer.values = (F.pad(t, pad) for t in (layer.keys, layer.values))
    layer.set_budget(layer.budget + tokens if layer.grows else layer.budget)
    layer.short = not layer.grows and layer.tokens < int(layer.budget.amax())
    fix_addresses(layer)
    tell_extended(layer, tokens)
