"""Dividing a policy's budget among layers, and the bytes that this makes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.capacity import growth
from kvpolicy.planning.memory import DIGEST_NBYTES, layer_bytes
from kvpolicy.planning.result import LayerPlan
from kvpolicy.policy import Policy
from kvpolicy.protocols import LayerShape
from kvpolicy.spec.budget import bytes_of
from kvpolicy.spec.errors import KVPolicyError
from kvpolicy.spec.validation import MAX_SIZE

START = 4096
"""Tokens behind the prompt that have slots at once, where the budget is larger and nobody said how many will come."""


class Tokens(NamedTuple):
    """A division of tokens among layers.

    Attributes:
        keep: The most tokens that each layer keeps of each row's prompt, [B, L] int64.
        room: What it may add later without evicting, [B] int64.
        ends: The most that each row of a layer ever holds, [B, L] int64.
    """

    keep: Tensor
    room: Tensor
    ends: Tensor

    @property
    def most(self) -> tuple[int, ...]:
        """The most that any row of a layer ever holds, one number per layer."""
        return tuple(self.ends.amax(0).tolist())


def divide(
    policy: Policy, metrics: Tensor | None, prompt: Tensor, end: Tensor | None, shapes: list[LayerShape], other: int = 0
) -> Tokens:
    """Divide a policy's budget among layers.

    Args:
        policy: The policy.
        metrics: What its allocator asked for, [B, L], or None.
        prompt: Tokens of each row's prompt, [B] int64.
        end: Tokens of each row once the last is generated, [B] int64; None where unknown.
        shapes: The layers.
        other: Bytes of layers that the policy leaves alone; they count in a budget of bytes.

    Raises:
        KVPolicyError: Where the budget is too small; it names the smallest that works.
    """
    if isinstance(policy.budget, str):
        return _divide_bytes(policy, metrics, prompt, end, shapes, other)
    floor = policy.selector.min_tokens
    if isinstance(policy.budget, int):
        base = torch.full_like(prompt, min(policy.budget, MAX_SIZE))
    else:
        base = (prompt.double() * policy.budget + 1e-9).long().clamp_min(1)
    base = torch.where(prompt <= floor, base.clamp_min(floor), base)  # so short that nothing is dropped
    _check_floor(policy, base, prompt)
    return _divide_tokens(policy, metrics, base, prompt, end, len(shapes), START)


def _check_floor(policy: Policy, base: Tensor, prompt: Tensor) -> None:
    floor = policy.selector.min_tokens
    short = base < floor
    if bool(short.any()):
        row = int(prompt.masked_fill(~short, torch.iinfo(torch.int64).max).argmin())  # what works for it works for all
        tokens, length = int(base[row]), int(prompt[row])
        raise KVPolicyError(
            f"A budget of {policy.budget} leaves {tokens} of {length} prompt tokens, too few for {policy.selector}: "
            f"the smallest that works is {floor} tokens, a share of {-(-(10**6) * floor // length) / 10**6}."
        )


def _divide_tokens(
    policy: Policy,
    metrics: Tensor | None,
    base: Tensor,
    prompt: Tensor,
    end: Tensor | None,
    layers: int,
    start: int,
) -> Tokens:
    """The same, where each layer has `base` tokens on average, and `start` behind the prompt if the end is unknown."""
    grows = policy.decode == "grow"
    ceiling = prompt if grows or end is None else torch.maximum(end, prompt)
    floor = policy.selector.min_tokens
    keep = policy.allocator.budgets(metrics, base * layers, floor, ceiling, layers)
    room = torch.zeros_like(prompt)
    if grows:
        room = growth(prompt) if end is None else (end - prompt).clamp_min(0)
    last = prompt + start if end is None else torch.maximum(end, prompt)
    return Tokens(keep, room, torch.minimum(keep + room[:, None], last[:, None]))


def _divide_bytes(
    policy: Policy, metrics: Tensor | None, prompt: Tensor, end: Tensor | None, shapes: list[LayerShape], other: int
) -> Tokens:
    """The most tokens per layer whose bytes fit, by bisection."""
    limit = bytes_of(str(policy.budget))

    def attempt(base: int, start: int = MAX_SIZE) -> tuple[Tokens, int]:  # all that it may ever hold must fit
        tokens = _divide_tokens(policy, metrics, torch.full_like(prompt, base), prompt, end, len(shapes), start)
        layouts = [policy.codec.layout(most) for most in tokens.most]
        sizes = [sum(layer_bytes(policy, len(prompt), s, at).values()) for s, at in zip(shapes, layouts, strict=True)]
        return tokens, other + DIGEST_NBYTES * len(prompt) + sum(sizes)

    low = policy.selector.min_tokens
    _, size = attempt(low)
    if size > limit:
        raise KVPolicyError(
            f"A budget of {policy.budget} is too small for {len(prompt)} row(s) of this model under {policy.selector}: "
            f"the smallest that works is {size}B, {low} token(s) per layer."
        )
    high = min(limit, MAX_SIZE) if end is None else int(end.max())
    while low < high:
        middle = (low + high + 1) // 2
        if attempt(middle)[1] <= limit:
            low = middle
        else:
            high = middle - 1
    return attempt(low, START)[0]


def plan_layers(
    policy: Policy, tokens: Tokens, shapes: list[LayerShape], indices: list[int], batch: int
) -> tuple[LayerPlan, ...]:
    """The plan of each layer."""
    plans: list[LayerPlan] = []
    for index, most, shape in zip(indices, tokens.most, shapes, strict=True):
        layout = policy.codec.layout(most)
        sizes = dict(layer_bytes(policy, batch, shape, layout))
        if not plans:
            sizes["counters"] += DIGEST_NBYTES * batch
        plans.append(LayerPlan(layer_idx=index, tokens=most, layout=layout, nbytes=sizes))
    return tuple(plans)
