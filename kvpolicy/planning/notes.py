"""Notes for plans with an effective behavior that differs from the spec."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvpolicy.kernels.compiled import MIN_SLOTS, obstacle
from kvpolicy.planning.result import LayerPlan
from kvpolicy.planning.tokens import too_short
from kvpolicy.policy import Policy
from kvpolicy.text.budget import fraction_of

MAX_EXACT = 0.5
"""A full-precision buffer that takes a larger fraction of the layers' bytes is noted."""

PERCENT_TOKENS = 64
"""A budget of fewer tokens than these may have been meant as a percentage."""

FEW_TOKENS = 64
"""A fraction without a least number of tokens that leaves fewer than these of a prompt is warned of."""

MIN_TOKENS = 16
"""A budget that is not given in tokens, and keeps fewer than these per layer on average, is noted."""


def plan_notes(
    policy: Policy,
    layers: Sequence[LayerPlan],
    keep: Tensor,
    prompt: Tensor,
    *,
    measured: bool = True,
    coded: bool = False,
) -> str:
    """All notes on a plan, or an empty string.

    Args:
        policy: The policy.
        layers: Its plan.
        keep: Tokens per layer, [B, L].
        prompt: Prompt length of each row, [B].
        measured: Whether the allocator has measured its layer metric.
        coded: Whether prompts that wait are held in codes.
    """
    even = _even_layers(policy, keep, prompt) if measured else ""
    notes = (
        _maybe_percent(policy, prompt),
        _few_tokens(policy, keep, prompt),
        _kept_whole(policy, prompt),
        even,
        _mostly_exact(policy, layers),
        _held_prompts(policy, coded),
        _decoded_codes(policy, layers, len(prompt)),
    )
    return "; ".join(filter(None, notes))


def beyond_trained_length(prompt: Tensor, new: int, trained: int | None) -> str:
    """Rows that exceed the context length that the model was trained for.

    Args:
        prompt: Prompt length of each row, [B].
        new: Tokens to be generated.
        trained: The number of positions that the rotary embedding was trained for; None if it is not limited.
    """
    if not trained:
        return ""
    beyond = prompt + new > trained
    if not bool(beyond.any()):
        return ""
    longest = int(prompt.max()) + new
    return (
        f"{_rows(beyond)}: prompt and new tokens, up to {longest:,}, exceed the {trained:,} positions that the model "
        "was trained for"
    )


def _maybe_percent(policy: Policy, prompt: Tensor) -> str:
    """A budget in tokens that is as small as a percentage, for a prompt of which that percentage would be more."""
    budget = policy.budget
    if not isinstance(budget, int) or budget >= PERCENT_TOKENS or not bool((prompt > 100).any()):
        return ""
    return f"the budget @{budget} is {budget} tokens per layer; for {budget}% of the prompt, write @{budget / 100:g}"


def keeps_few(keep: Tensor, prompt: Tensor, tokens: int) -> Tensor:
    """Rows of whose prompt a layer keeps fewer than `tokens` on average, and not all, [B] bool.

    Args:
        keep: Tokens per layer, [B, L].
        prompt: Prompt length of each row, [B].
        tokens: The number.
    """
    mean = keep.double().mean(-1)
    return (mean < tokens) & (mean < prompt)


def leaves_few(policy: Policy, keep: Tensor, prompt: Tensor) -> bool:
    """Whether a fraction without a least number of tokens leaves so few that an answer from them is hardly right.

    Args:
        policy: The policy.
        keep: Tokens per layer, [B, L].
        prompt: Prompt length of each row, [B].
    """
    return isinstance(policy.budget, float) and bool(keeps_few(keep, prompt, FEW_TOKENS).any())


def _few_tokens(policy: Policy, keep: Tensor, prompt: Tensor) -> str:
    """Rows of which a budget that is not given in tokens keeps only a few."""
    few = keeps_few(keep, prompt, MIN_TOKENS)
    if isinstance(policy.budget, int) or not bool(few.any()):
        return ""
    mean = keep.double().mean(-1)
    row = int(mean.masked_fill(~few, float("inf")).argmin())
    kept = f"{mean[row]:.3g} of {int(prompt[row]):,} prompt tokens per layer"
    fraction = fraction_of(policy.budget)
    advice = "a budget in tokens" if fraction is None else f"a least number of them, as in {fraction}:least=1024"
    return f"{_rows(few)}: the budget {policy.budget} keeps as few as {kept}, so consider {advice}"


def _kept_whole(policy: Policy, prompt: Tensor) -> str:
    """Rows whose prompt is kept whole, since a fraction of it is less than the smallest budget."""
    whole = too_short(policy, prompt)
    if not bool(whole.any()):
        return ""
    least = f"{policy.min_tokens} tokens, the smallest budget of {policy.selector}"
    return f"{_rows(whole)}: kept whole, since {policy.budget} of the prompt is less than {least}"


def _even_layers(policy: Policy, keep: Tensor, prompt: Tensor) -> str:
    """Rows with equal budgets in all layers although the allocator measured the layers."""
    even = (keep == keep[:, :1]).all(-1) & (keep[:, 0] < prompt)
    if policy.layer_metric != "cosine" or not bool(even.any()):
        return ""
    return f"{_rows(even)}: all layers have the same budget, since fewer than three distinct metrics were measured"


def _held_prompts(policy: Policy, coded: bool) -> str:
    """A part that replays the context, for which every layer holds its prompt."""
    if policy.replay is None:
        return ""
    needed = "codes of all tokens" if coded else "the full cache"
    return f"every layer holds its whole prompt until it is replayed, so that the prefill needs {needed}"


def _mostly_exact(policy: Policy, layers: Sequence[LayerPlan]) -> str:
    """A codec that encodes few or no tokens, since its full-precision buffer holds most of them."""
    layers = [layer for layer in layers if policy.at(layer.layer_idx).codec.stages]
    if not layers:
        return ""
    if not any(sum(layer.layout.coded) for layer in layers):
        return "no token is encoded, since all fit into the codec's full-precision buffer"
    exact = sum(layer.nbytes["exact"] for layer in layers) / sum(sum(layer.nbytes.values()) for layer in layers)
    if exact <= MAX_EXACT:
        return ""
    return f"the codec's full-precision buffer, whose length its parameters set, takes {exact:.0%} of the bytes"


def _decoded_codes(policy: Policy, layers: Sequence[LayerPlan], rows: int) -> str:
    """Codes that would be read by compiled functions if these could be compiled."""
    coded = [sum(layer.layout.coded) for layer in layers if policy.at(layer.layer_idx).codec.stages]
    if rows * max(coded, default=0) < MIN_SLOTS or not obstacle():
        return ""
    return f"on a CPU, codes are decoded before they are read, which is slower, since {obstacle()}"


def _rows(flags: Tensor) -> str:
    if len(flags) > 1 and bool(flags.all()):
        return "every row"
    return f"row(s) {', '.join(str(row) for row in flags.nonzero().flatten().tolist())}"
