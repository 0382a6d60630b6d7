"""The budgets of layers by what their tokens are worth; see `kvpolicy.protocols.DrawsCurves`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine.host import outside_autocast
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.planning.tokens import Tokens
from kvpolicy.policy import Policy
from kvpolicy.protocols import DrawsCurves


def shares_by_worth(policy: Policy, layers: list[PolicyLayer], even: Tokens) -> Tensor:
    """The share of the budget that each layer gets by the curves of all, [B, L] fp32; rows sum to 1.

    Args:
        policy: A policy with such an allocator.
        layers: The layers, whose prompts wait for their budgets.
        even: The division of the budget into equal parts, with which selectors reckon meanwhile.
    """
    allocator = policy.allocator
    assert isinstance(allocator, DrawsCurves)  # see `policy.combination.check_curves`
    curves: list[Tensor] = []
    for number, layer in enumerate(layers):
        assert layer.pending is not None
        pending = layer.pending.decoded()
        with outside_autocast(pending.keys.device):
            worth = layer.store.worth(pending, even.keep[:, number])
            curves.append(allocator.curve(worth, layer.layer_idx).float().cpu())
    longest = max(curve.shape[-1] for curve in curves)
    drawn = torch.stack([F.pad(each, (0, longest - each.shape[-1]), value=-torch.inf) for each in curves], 1)
    total = even.keep.sum(-1)
    budgets = allocator.budgets(drawn, total, policy.min_tokens, even.last, len(layers))
    return (budgets.double() / total[:, None]).float()
