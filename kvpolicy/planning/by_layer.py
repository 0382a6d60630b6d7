"""Dividing the budget of a policy that differs by layer: one factor for all shares, so that the bytes fit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpolicy.planning.layer_plans import plan_layers
from kvpolicy.planning.tokens import SHORT_PROMPT, Tokens, expect_tokens, largest, most_tokens
from kvpolicy.policy import LayeredPolicy, Policy
from kvpolicy.protocols import LayerShape
from kvpolicy.text.budget import EPSILON, Budget, Share, bytes_of
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.limits import MAX_SIZE
from kvpolicy.text.page_sizes import fewest_tokens


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
        limit = bytes_of(policy.budget) - unmanaged_nbytes
        keep, smallest = _fit(policy, policy.budget, prompt, end, shapes, indices, limit)
        if keep is None:
            raise KVPolicyError(
                f"The budget must be at least {smallest + unmanaged_nbytes}B for {len(prompt)} row(s) of this model "
                f"under {policy}, got {policy.budget}."
            )
        return expect_tokens(policy, keep, prompt, end)
    each: list[Tensor] = []
    known: dict[tuple[int, int], Tensor] = {}
    for row in range(len(prompt)):
        own = prompt[row : row + 1]
        own_end = None if end is None else end[row : row + 1]
        lengths = int(own), -1 if own_end is None else int(own_end)
        if lengths not in known:
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
