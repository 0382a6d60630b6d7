"""Budgets of a forward that is added whole; see `PolicyCache.hold_next`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.hf.running_forward import RunningForward
from kvpolicy.planning.result import CachePlan


def whole_budgets(layers: list[PolicyLayer], new: Tensor) -> Tensor:
    """Tokens of each row and layer if all that is held is kept, and `new` [B] tokens, [B, L] int64."""
    budgets: list[Tensor] = []
    for layer in layers:
        # A cache that grows has a budget for tokens to come, which these take first.
        grows = layer.store.spec.grows
        held = layer.store.geometry.tokens_counted() if grows else layer.store.tensors.budget
        budgets.append(held.cpu() + new)
    return torch.stack(budgets, 1)


def exceed(layers: list[PolicyLayer], forward: RunningForward) -> bool:
    """Whether a layer may have slots for more than its share of the budget that a forward has divided.

    Slots never become fewer: a prompt that was added whole leaves them to the prompts after it. Pages are placed anew,
    and as many as each head needed to keep all of such a prompt.
    """
    if forward.tokens is None:
        return False
    return any(
        forward.adds_whole if layer.store.spec.heads is not None else layer.store.contents.capacity > most
        for layer, most in zip(layers, forward.tokens.most, strict=True)
    )


def counted(plan: CachePlan, layers: list[PolicyLayer]) -> CachePlan:
    """A plan with the slots and pages that layers have, where these follow from no budget."""
    return replace(
        plan,
        layers=tuple(
            replace(
                own,
                tokens=int(layer.budget.max()),
                nbytes=layer.held(),
                layout=layer.store.layout,
                **layer.store.step_bytes._asdict(),
            )
            for own, layer in zip(plan.layers, layers, strict=True)
        ),
    )
