"""Dividing a policy's budget among layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpolicy.planning.by_layer import divide_by_layer
from kvpolicy.planning.layer_plans import plan_layers
from kvpolicy.planning.tokens import INITIAL_SLOTS, Tokens, expect_tokens, largest, most_tokens, or_whole, tokens_of
from kvpolicy.policy import LayeredPolicy, Policy
from kvpolicy.protocols import BoundsBudgets, LayerBounds, LayerShape
from kvpolicy.text.budget import bytes_of
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.limits import MAX_SIZE


def divide(
    policy: Policy,
    metrics: Tensor | None,
    prompt: Tensor,
    end: Tensor | None,
    shapes: list[LayerShape],
    unmanaged_nbytes: int = 0,
    indices: Sequence[int] | None = None,
    whole: LayerShape | None = None,
) -> Tokens:
    """Divide a policy's budget among layers.

    Args:
        policy: The policy.
        metrics: The layer metric of the allocator, [B, L], or None.
        prompt: Prompt length of each row, [B] int64.
        end: Length of each row after the last new token, [B] int64; None if unknown.
        shapes: The layers under the policy.
        unmanaged_nbytes: Bytes of the layers that are not under the policy; they count in a budget of bytes.
        indices: Indices of the layers in the model; None if they are the first ones.
        whole: Shape of a layer on all ranks together; None if there is one rank.

    Raises:
        KVPolicyError: If the budget is too small; the message names the smallest one that works.
    """
    indices = range(len(shapes)) if indices is None else indices
    if isinstance(policy, LayeredPolicy):
        return divide_by_layer(policy, prompt, end, shapes, unmanaged_nbytes, indices, whole or shapes[0])
    if isinstance(policy.budget, str):
        return _divide_bytes(policy, metrics, prompt, end, shapes, unmanaged_nbytes, indices)
    base = base_tokens(policy, prompt)
    return _divide_tokens(policy, metrics, base, prompt, end, len(shapes), INITIAL_SLOTS)


def bound_layers(
    policy: Policy, metrics: Tensor, prompt: Tensor, end: Tensor | None, layers: int, queries: int
) -> LayerBounds | None:
    """Bounds of the tokens that `divide` will give the layers that were measured.

    Args:
        policy: The policy.
        metrics: The layer metric of the layers that were measured, [B, K].
        prompt: Prompt length of each row, [B] int64.
        end: Length of each row after the last new token, [B] int64; None if unknown.
        layers: Layers under the policy.
        queries: Query heads of a layer of the model.

    Returns:
        The bounds; None where nothing is known before all layers are measured: of a budget in bytes, and of an
        allocator without `BoundsBudgets`.
    """
    if not isinstance(policy.allocator, BoundsBudgets) or isinstance(policy.budget, str):
        return None
    total = base_tokens(policy, prompt) * layers
    ceiling = most_tokens(policy, prompt, end)
    return policy.allocator.bounds(metrics, total, policy.min_tokens, ceiling, layers, queries)


def tokens_of_share(policy: Policy, prompt: int, new: int, shapes: Sequence[LayerShape]) -> Tokens | None:
    """The tokens that a cache under a policy with a fraction as its budget would keep of one row in each layer.

    Args:
        policy: The policy.
        prompt: Tokens of the prompt.
        new: Tokens that follow it.
        shapes: The layers under the policy.

    Returns:
        The division of the budget, for one row; None if the budget is too small for the prompt.

    Examples:
        >>> shapes = [LayerShape(4, 32, torch.float32)] * 2
        >>> tokens_of_share(Policy.parse("window@0.1"), 100, 5, shapes).keep.tolist()
        [[10, 10]]
        >>> tokens_of_share(Policy.parse("streaming:sinks=4@0.003"), 1000, 5, shapes) is None
        True
    """
    length = torch.tensor([prompt], device="cpu")
    try:
        return divide(policy, None, length, length + new, list(shapes))
    except KVPolicyError:
        # Of a fraction, nothing else is refused here than that it is below the smallest budget.
        return None


def base_tokens(policy: Policy, prompt: Tensor) -> Tensor:
    """Tokens that a layer keeps of each row on average, [B] int64, under a budget that is not in bytes."""
    assert not isinstance(policy.budget, str)
    floor = policy.min_tokens
    base = tokens_of(policy.budget, prompt)
    # A prompt that the selector's minimum covers is kept whole, so a smaller fraction of it is no error.
    base = torch.where(prompt <= floor, base.clamp_min(floor), base)
    base = or_whole(policy, prompt, base)
    _check_floor(policy, base, prompt)
    return base


def _check_floor(policy: Policy, base: Tensor, prompt: Tensor) -> None:
    floor = policy.min_tokens
    short = base < floor
    if not bool(short.any()):
        return
    # The shortest of these prompts needs the largest fraction, so what works for it works for all rows.
    row = int(prompt.masked_fill(~short, torch.iinfo(torch.int64).max).argmin())
    tokens = int(base[row])
    length = int(prompt[row])
    fraction = -(-(10**6) * floor // length) / 10**6  # rounded up to six decimals
    raise KVPolicyError(
        f"The budget must be at least {floor} tokens for {policy.selector}, got {policy.budget}, which is {tokens} of "
        f"{length} prompt tokens; try {floor} or {fraction}."
    )


def _divide_tokens(
    policy: Policy,
    metrics: Tensor | None,
    base: Tensor,
    prompt: Tensor,
    end: Tensor | None,
    layers: int,
    initial_slots: int,
) -> Tokens:
    """Divide `base` [B] tokens per layer, with `initial_slots` beyond the prompt if the end is unknown."""
    ceiling = most_tokens(policy, prompt, end)
    keep = policy.allocator.budgets(metrics, base * layers, policy.min_tokens, ceiling, layers)
    return expect_tokens(policy, keep, prompt, end, initial_slots)


def _divide_bytes(
    policy: Policy,
    metrics: Tensor | None,
    prompt: Tensor,
    end: Tensor | None,
    shapes: list[LayerShape],
    unmanaged_nbytes: int,
    indices: Sequence[int],
) -> Tokens:
    """Find the most tokens per layer that fit into a budget in bytes, by bisection."""
    limit = bytes_of(str(policy.budget))
    batch = len(prompt)

    def attempt(base: int, initial_slots: int = MAX_SIZE) -> tuple[Tokens, int]:
        # By default with all slots that the cache may ever have, so that it stays within the budget as it grows.
        each = torch.full_like(prompt, base)
        tokens = _divide_tokens(policy, metrics, each, prompt, end, len(shapes), initial_slots)
        layers = plan_layers(policy, tokens, shapes, [*indices], batch)
        return tokens, unmanaged_nbytes + sum(layer.device_nbytes for layer in layers)

    low = policy.min_tokens
    _, smallest = attempt(low)
    if smallest > limit:
        raise KVPolicyError(
            f"The budget must be at least {smallest}B for {batch} row(s) of this model under {policy.selector}, which "
            f"is {low} token(s) per layer, got {policy.budget}."
        )
    # A token takes at least one byte per layer, so the limit bounds the search if the end is unknown.
    high = min(limit, MAX_SIZE) if end is None else int(end.max())
    base = largest(lambda tokens: attempt(tokens)[1] <= limit, low, high)
    # The bytes were counted with all slots that may be needed; only some of them are allocated at first.
    return attempt(base, INITIAL_SLOTS)[0]
