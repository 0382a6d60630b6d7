"""The budgets of layers by what their tokens are worth; see `kvpolicy.protocols.DrawsCurves`."""

from __future__ import annotations

from torch import Tensor

from kvpolicy.engine.host import outside_autocast
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.hf.layer_metrics import stack_layers
from kvpolicy.planning.tokens import Tokens
from kvpolicy.policy import Policy
from kvpolicy.protocols import DrawsCurves


def curves_of(policy: Policy, layers: list[PolicyLayer], even: Tokens) -> Tensor:
    """The curve of each layer, [B, L, N] fp32.

    Args:
        policy: A policy with an allocator that draws them.
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
    return stack_layers(curves)


def shares_of(policy: Policy, metrics: Tensor, even: Tokens) -> Tensor:
    """The share of the budget that each layer gets by many numbers of each, [B, L] fp32; rows sum to 1.

    Args:
        policy: The policy.
        metrics: The numbers, [B, L, ...].
        even: The division of the budget into equal parts.
    """
    total = even.keep.sum(-1)
    budgets = policy.allocator.budgets(metrics, total, policy.min_tokens, even.last, metrics.shape[1])
    return (budgets.double() / total[:, None]).float()
