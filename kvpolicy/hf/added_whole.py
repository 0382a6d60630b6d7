"""Budgets of a forward that is added whole; see `PolicyCache.hold_next`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.planning.result import CachePlan
from kvpolicy.planning.tokens import Tokens


def whole_budgets(layers: list[PolicyLayer], new: Tensor) -> Tensor:
    """Tokens of each row and layer if all that is held is kept, and `new` [B] tokens, [B, L] int64."""
    budgets: list[Tensor] = []
    for layer in layers:
        # A cache that grows has a budget for tokens to come, which these take first.
        grows = layer.store.spec.grows
        held = layer.store.geometry.tokens_by_head().amax(-1) if grows else layer.store.tensors.budget
        budgets.append(held.cpu() + new)
    return torch.stack(budgets, 1)


def exceed(layers: list[PolicyLayer], tokens: Tokens) -> bool:
    """Whether a layer has slots for more than its share of a divided budget: slots never become fewer.

    A prompt that was added whole leaves such slots to the prompts after it.
    """
    return any(layer.store.contents.capacity > most for layer, most in zip(layers, tokens.most, strict=True))


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
                moved=layer.store.moved,
            )
            for own, layer in zip(plan.layers, layers, strict=True)
        ),
    )
