"""What a plan remarks: where a policy does otherwise than its words may lead to expect."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvpolicy.plans import LayerPlan
from kvpolicy.policy import Policy

MOST = 0.5
"""A codec's exact part is remarked on where it takes more than this of the layers' bytes."""


def remarks(policy: Policy, layers: Sequence[LayerPlan], keep: Tensor | None, prompt: Tensor) -> str:
    """Everything to be remarked, or nothing.

    Args:
        policy: The policy.
        layers: Its plan.
        keep: Tokens per layer, [B, L]; None before the layers are measured.
        prompt: Tokens of each row's prompt, [B].
    """
    even = "" if keep is None else _even(policy, keep, prompt)
    return "; ".join(filter(None, (even, _exact(policy, layers))))


def _even(policy: Policy, keep: Tensor, prompt: Tensor) -> str:
    """Rows whose layers share evenly although the allocator measured them."""
    even = (keep == keep[:, :1]).all(-1) & (keep[:, 0] < prompt)
    if not policy.allocator.measure or not bool(even.any()):
        return ""
    rows = ", ".join(str(row) for row in even.nonzero().flatten().tolist())
    return f"row(s) {rows}: layers share evenly, since fewer than three, or too few that differ, were measured"


def _exact(policy: Policy, layers: Sequence[LayerPlan]) -> str:
    """A codec that codes little or nothing, since its exact part holds most."""
    if not policy.codec.stages:
        return ""
    if not any(sum(layer.layout.coded) for layer in layers):
        return "no token is coded, since the codec's exact part has room for all"
    exact = sum(layer.nbytes["exact"] for layer in layers) / sum(sum(layer.nbytes.values()) for layer in layers)
    if exact <= MOST:
        return ""
    return f"the codec's exact part, whose length its parameters set, takes {exact:.2f} of the bytes"
