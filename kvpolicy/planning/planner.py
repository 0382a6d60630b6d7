"""Dividing the budget of a policy among layers; if the policy differs by layer, by one factor for all shares.

While layers are measured, prompts wait and are trimmed to what may be kept; how many bytes wait at most is known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvpolicy.engine.state import slot_tensors
from kvpolicy.engine.trimming import LEAST_GAIN, trimmed_from
from kvpolicy.planning.memory import layer_spec, plan_layers
from kvpolicy.planning.tokens import (
    INITIAL_SLOTS,
    SHORT_PROMPT,
    Tokens,
    expect_tokens,
    largest,
    most_tokens,
    or_whole,
    tokens_of,
)
from kvpolicy.policy import LayeredPolicy, Policy
from kvpolicy.protocols import BoundsBudgets, LayerBounds, LayerShape
from kvpolicy.text.budget import EPSILON, Budget, Share, bytes_of, fewest_tokens
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.limits import MAX_SIZE


def divide_by_layer(
    policy: LayeredPolicy,
    prompt: Tensor,
    end: Tensor | None,
    shapes: list[LayerShape],
    unmanaged_nbytes: int,
    indices: Sequence[int],
    whole: LayerShape,
) -> Tokens:
    """Divide the budget of a policy that differs by layer.

    A budget in bytes is that of the whole cache on a rank. A share, and a number of tokens, is a budget of each row of
    the whole model: the row keeps what it would keep alone, on any number of ranks. Each layer has the slots of the row
    that keeps the most in it, so that rows of different lengths may hold more together than their shares.

    Args:
        policy: The policy.
        prompt: Prompt length of each row, [B] int64.
        end: Length of each row after the last new token, [B] int64; None if unknown.
        shapes: The layers under the policy.
        unmanaged_nbytes: Bytes of the layers that are not under the policy; they count in a budget of bytes.
        indices: Indices of the layers in the model.
        whole: Shape of a layer on all ranks together.

    Raises:
        KVPolicyError: If the budget is too small; the message names the smallest one that works.
    """
    if isinstance(policy.budget, str):
        # Bytes are those of all rows on this rank, so that one factor holds for the whole batch.
        limit = bytes_of(policy.budget) - unmanaged_nbytes
        keep, smallest = _fit(policy, policy.budget, prompt, end, shapes, indices, limit)
        if keep is None:
            raise KVPolicyError(
                f"The budget must be at least {smallest + unmanaged_nbytes}B for {len(prompt)} row(s) of this model "
                f"under {policy}, got {policy.budget}."
            )
        return expect_tokens(policy, keep, prompt, end)
    # Other budgets are those of each row alone; rows of equal lengths share one search.
    each: list[Tensor] = []
    known: dict[tuple[int, int], Tensor] = {}
    for row in range(len(prompt)):
        own = prompt[row : row + 1]
        own_end = None if end is None else end[row : row + 1]
        lengths = int(own), -1 if own_end is None else int(own_end)
        if lengths not in known:
            # On all ranks together, so that a row keeps the same on any number of them.
            known[lengths] = _row(policy, own, own_end, [whole] * len(shapes), indices)
        each.append(known[lengths])
    return expect_tokens(policy, torch.cat(each), prompt, end)


def _row(
    policy: LayeredPolicy, prompt: Tensor, end: Tensor | None, shapes: list[LayerShape], indices: Sequence[int]
) -> Tensor:
    """Tokens that each layer keeps of one row under a budget of a share or a number of tokens, [1, L]."""
    if end is None and policy.decode == "grow":
        end = prompt  # what a growing cache reserves for tokens that nobody announced is on top, as in other caches
    token = sum(shape.token_nbytes for shape in shapes)
    length = max(int(prompt), 0 if end is None else int(end))
    full = token * length
    budget = policy.budget.of_prompt(length) if isinstance(policy.budget, Share) else policy.budget
    if isinstance(budget, float):
        limit = None if budget == 1.0 else int(full * budget + EPSILON)
    else:
        limit = token * int(budget)
    keep, smallest = _fit(policy, budget, prompt, end, shapes, indices, limit)
    most = int(most_tokens(policy, prompt, end))
    layers = [policy.at(index) for index in indices]
    floor = torch.tensor([[most if layer.keeps_whole else layer.min_tokens for layer in layers]], device="cpu")
    if keep is None and any(most <= layer.min_tokens for layer in layers):
        return floor  # a prompt that a selector's minimum covers is kept whole, so a smaller share is no error
    if keep is None and not isinstance(budget, int) and int(prompt) <= SHORT_PROMPT:
        # So short a prompt is kept whole, as under a policy for all layers.
        whole = [int(prompt) if layer.heads is None else fewest_tokens(int(prompt)) for layer in layers]
        return torch.maximum(floor, floor.new_tensor(whole))
    if keep is None:
        # All tokens of a short text may be less than what a layer holds besides; the budget 1.0 has no limit.
        wanted = -(-smallest // token) if isinstance(budget, int) else min(round(smallest / full + 5e-7, 6), 1.0)
        what = f"{wanted} tokens" if isinstance(budget, int) else f"{wanted} of the full cache's bytes"
        raise KVPolicyError(
            f"The budget must be at least {what} for {int(prompt)} prompt tokens under {policy}, got {policy.budget}."
        )
    return keep


def _fit(
    policy: LayeredPolicy,
    budget: Budget,
    prompt: Tensor,
    end: Tensor | None,
    shapes: list[LayerShape],
    indices: Sequence[int],
    limit: int | None,
) -> tuple[Tensor | None, int]:
    """The most tokens of each row and layer within `limit` bytes, [B, L], or None; and the fewest bytes possible.

    The budget is what that of the policy means for these rows, with `limit` as its bytes.

    All shares are multiplied by one factor, found by bisection over the tokens of the largest share. If all tokens fit
    and nobody announced how many will follow, all layers keep equally many of those, as in other caches.
    """
    layers = [policy.at(index) for index in indices]
    whole = torch.tensor([layer.keeps_whole for layer in layers], device="cpu")
    # Relative to the largest share; a layer that keeps every token has none.
    weights = torch.tensor([_share(layer) for layer in layers], dtype=torch.float64, device="cpu").masked_fill(whole, 0)
    weights = weights / weights.amax().clamp_min(EPSILON)
    lasts = end is None and policy.decode == "evict" and not isinstance(budget, float)
    # The slots are those of the longest row, so that the others may fill them with what follows.
    longest = most_tokens(policy, prompt, end)
    ceiling = (torch.full_like(longest, int(longest.max())) if lasts else longest)[:, None].expand(-1, len(layers))
    floor = torch.tensor([layer.min_tokens for layer in layers], device="cpu")

    def keep(most: int) -> Tensor:
        tokens = (weights * most + EPSILON).long()
        return torch.where(whole, ceiling, torch.maximum(torch.minimum(tokens, ceiling), floor))

    def nbytes(tokens: Tensor) -> int:
        # With all slots that the cache may ever have, so that it stays within the budget as it grows.
        expected = expect_tokens(policy, tokens, prompt, end, MAX_SIZE)
        plans = plan_layers(policy, expected, shapes, [*indices], len(prompt))
        return sum(plan.device_nbytes for plan in plans)

    smallest_share = weights[~whole].amin().clamp_min(EPSILON) if not bool(whole.all()) else 1.0
    most = int((ceiling.amax() / smallest_share).ceil().clamp_max(MAX_SIZE))
    if limit is None:
        return keep(most), 0
    smallest = nbytes(keep(0))
    if smallest > limit:
        return None, smallest
    found = keep(largest(lambda tokens: nbytes(keep(tokens)) <= limit, 0, most))
    if lasts and bool((found >= ceiling).all()):
        # A token takes at least one byte, so that the limit bounds the search.
        more = largest(lambda tokens: nbytes(found.clamp_min(tokens)) <= limit, 0, min(limit, MAX_SIZE))
        found = found.clamp_min(more)
    return found, smallest


def _share(layer: Policy) -> float:
    """The relative share of a layer."""
    assert isinstance(layer.budget, float | int), "a policy by layer has no other budgets of its layers"
    return float(layer.budget)


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

    # A token takes at least one byte per layer, so the limit bounds the search if the end is unknown.
    high = min(limit, MAX_SIZE) if end is None else int(end.max())
    if end is None and policy.decode == "grow" and policy.heads is not None:
        high = int(prompt.max())  # pages of heads are those of the prompt, and of what is known to follow
    low = _least_divided(attempt, policy.min_tokens, high)
    _, smallest = attempt(low)
    if smallest > limit:
        raise KVPolicyError(
            f"The budget must be at least {smallest}B for {batch} row(s) of this model under {policy.selector}, which "
            f"is {low} token(s) per layer, got {policy.budget}."
        )
    base = largest(lambda tokens: attempt(tokens)[1] <= limit, low, high)
    # The bytes were counted with all slots that may be needed; only some of them are allocated at first.
    return attempt(base, INITIAL_SLOTS)[0]


def _least_divided(attempt: Callable[[int], object], low: int, high: int) -> int:
    """The fewest tokens per layer that the allocator divides, which may keep more than the smallest budget of a layer.

    Args:
        attempt: Divides so many tokens per layer, or raises KVPolicyError.
        low: The fewest tokens of a layer.
        high: The most that are of use.
    """

    def is_refused(tokens: int) -> bool:
        try:
            attempt(tokens)
        except KVPolicyError:
            return True
        return False

    if not is_refused(low):
        return low
    found = largest(is_refused, low, high)
    return low if found >= high else found + 1  # what is always refused has another reason


def trimmed_bytes(
    policy: Policy, shape: LayerShape, tokens: Tokens, prompt: Tensor, columns: int, layers: int
) -> int | None:
    """The most bytes of prompts that wait in all layers but the newest, whose prompt is still whole.

    Args:
        policy: The policy.
        shape: The shape of a layer.
        tokens: The division of the budget.
        prompt: Tokens of each row's prompt, [B].
        columns: Tokens of the longest prompt, or of its first chunk.
        layers: Layers under the policy.

    Returns:
        None where it is not known before the prompt is measured that they can be trimmed.
    """
    allocator = policy.allocator
    nested = trimmed_from(layer_spec(policy, 0))
    if policy.replay or isinstance(policy.budget, str) or not isinstance(allocator, BoundsBudgets) or nested is None:
        return None
    ceiling = most_tokens(policy, prompt, tokens.last)
    total = base_tokens(policy, prompt) * layers
    least, together = allocator.guarantee(total, policy.min_tokens, ceiling, layers)
    if bool((least < nested).any()):
        return None
    # A head of a row is padded to the longest one, and which row that is may differ from layer to layer.
    held = min(int(together.sum() / (1 - LEAST_GAIN)), layers * columns)
    state = policy.selector.alloc(1, shape.heads, 1, "meta", shape.head)
    of_token = shape.token_nbytes + shape.heads * torch.int32.itemsize + sum(t.nbytes for t in slot_tensors(state))
    return len(prompt) * held * of_token
