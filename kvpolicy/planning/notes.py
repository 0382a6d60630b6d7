"""What a plan remarks: where a policy does otherwise than its words may lead to expect."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvpolicy.planning.result import LayerPlan
from kvpolicy.policy import Policy

MOST = 0.5
"""A codec's exact part is remarked on where it takes more than this of the layers' bytes."""

FEW = 16
"""A share that leaves a layer fewer tokens than these on average is remarked on; nobody wrote that number."""


def remarks(policy: Policy, layers: Sequence[LayerPlan], keep: Tensor, prompt: Tensor, *, measured: bool = True) -> str:
    """Everything to be remarked, or nothing.

    Args:
        policy: The policy.
        layers: Its plan.
        keep: Tokens per layer, [B, L].
        prompt: Tokens of each row's prompt, [B].
        measured: Whether the layers were measured that the allocator metrics.
    """
    even = _even(policy, keep, prompt) if measured else ""
    return "; ".join(filter(None, (_few(policy, keep, prompt), even, _exact(policy, layers))))


def beyond_trained_length(prompt: Tensor, new: int, trained: int | None) -> str:
    """Rows whose text goes behind the positions that a rotary embedding was trained for."""
    late = prompt + new > (trained or prompt + new)
    if not bool(late.any()):
        return ""
    most = f"prompt and answer, {int(prompt.max()) + new:,} tokens at most"
    return f"{_rows(late)}: {most}, go behind the {trained:,} positions that the model was trained for"


def _few(policy: Policy, keep: Tensor, prompt: Tensor) -> str:
    """Rows of which a budget that is no number of tokens leaves hardly any."""
    mean = keep.double().mean(-1)
    few = (mean < FEW) & (mean < prompt)
    if isinstance(policy.budget, int) or not bool(few.any()):
        return ""
    row = int(mean.masked_fill(~few, float("inf")).argmin())
    left = f"{mean[row]:.3g} of {int(prompt[row]):,} prompt tokens per layer"
    return f"{_rows(few)}: a budget of {policy.budget} leaves as few as {left}, so give one in tokens"


def _even(policy: Policy, keep: Tensor, prompt: Tensor) -> str:
    """Rows whose layers share evenly although the allocator measured them."""
    even = (keep == keep[:, :1]).all(-1) & (keep[:, 0] < prompt)
    if not policy.allocator.layer_metric or not bool(even.any()):
        return ""
    return f"{_rows(even)}: layers share evenly, since fewer than three, or too few that differ, were measured"


def _rows(flags: Tensor) -> str:
    if len(flags) > 1 and bool(flags.all()):
        return "every row"
    return f"row(s) {', '.join(str(row) for row in flags.nonzero().flatten().tolist())}"


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
