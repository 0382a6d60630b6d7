"""Tokens of each row and layer, once a budget is divided."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.layout import growth
from kvpolicy.policy import LayeredPolicy, Policy
from kvpolicy.text.budget import EPSILON, Share, fewest_tokens
from kvpolicy.text.limits import MAX_SIZE

INITIAL_SLOTS = 4096
"""Slots allocated beyond the prompt if the number of new tokens is unknown; a larger budget is reached by extension."""

SHORT_PROMPT = 512
"""The longest prompt that is kept whole where a fraction of it is less than the smallest budget."""


def tokens_of(budget: float | int | Share, prompt: Tensor) -> Tensor:
    """Tokens of each row that a layer keeps on average, [B] int64.

    Args:
        budget: A number of tokens, or a fraction of each row's prompt, with a least number of tokens or without.
        prompt: Tokens of each row's prompt, [B] int64.

    Examples:
        >>> tokens_of(0.29, torch.tensor([100, 1])).tolist(), tokens_of(7, torch.tensor([100, 1])).tolist()
        ([29, 1], [7, 7])
        >>> tokens_of(Share(0.29, least=7), torch.tensor([100, 1])).tolist()
        [29, 7]
    """
    if isinstance(budget, Share):
        return torch.maximum(tokens_of(budget.fraction, prompt), tokens_of(budget.least, prompt))
    if isinstance(budget, int):
        return torch.full_like(prompt, min(budget, MAX_SIZE))
    return (prompt.double() * budget + EPSILON).long().clamp_min(1)


class Tokens(NamedTuple):
    """A division of a budget among layers.

    Attributes:
        keep: The most tokens that each layer keeps of each row's prompt, [B, L] int64.
        extra: Tokens that each row may add later without evicting, [B] int64.
        expected_len: The most tokens that each row of a layer ever holds, [B, L] int64.
        last: The most tokens that each row will ever have without `extra`, kept or not, as far as is known, [B] int64.
    """

    keep: Tensor
    extra: Tensor
    expected_len: Tensor
    last: Tensor

    @property
    def most(self) -> tuple[int, ...]:
        """The most tokens that any row of a layer ever holds, one number per layer."""
        return tuple(self.expected_len.amax(0).tolist())


def most_tokens(policy: Policy, prompt: Tensor, end: Tensor | None) -> Tensor:
    """The most tokens of each row that a budget can keep, [B].

    Args:
        policy: The policy.
        prompt: Prompt length of each row, [B] int64.
        end: Length of each row after the last new token, [B] int64; None if unknown.
    """
    # A growing cache budgets the prompt alone. Otherwise generated tokens count too, if their number is known.
    most = prompt if policy.decode == "grow" or end is None else torch.maximum(end, prompt)
    return or_whole(policy, prompt, most)


def too_short(policy: Policy, prompt: Tensor) -> Tensor:
    """Rows whose prompt is kept whole, since the fraction of it is less than the smallest budget, [B] bool.

    A longer prompt than `SHORT_PROMPT` is refused instead: there, it is the fraction that is too small.

    Args:
        policy: The policy.
        prompt: Prompt length of each row, [B] int64.
    """
    budget = policy.budget
    if isinstance(budget, int | str) or isinstance(policy, LayeredPolicy):
        return torch.zeros_like(prompt, dtype=torch.bool)
    floor = policy.min_tokens
    return (tokens_of(budget, prompt) < floor) & (floor < prompt) & (prompt <= SHORT_PROMPT)


def or_whole(policy: Policy, prompt: Tensor, tokens: Tensor) -> Tensor:
    """Tokens of each row, [B], or those that keep its prompt whole if it is `too_short`."""
    short = too_short(policy, prompt)
    if not bool(short.any()):
        return tokens
    # Heads have whole pages, and rounding down would lose some tokens.
    rounded = [fewest_tokens(length) for length in prompt.clamp_max(SHORT_PROMPT).tolist()]
    return torch.where(short, prompt if policy.heads is None else prompt.new_tensor(rounded), tokens)


def expect_tokens(
    policy: Policy, keep: Tensor, prompt: Tensor, end: Tensor | None, initial_slots: int = INITIAL_SLOTS
) -> Tokens:
    """Token counts that follow from the tokens that each layer keeps of each prompt, [B, L].

    Args:
        policy: The policy.
        keep: Tokens to keep.
        prompt: Prompt length of each row, [B] int64.
        end: Length of each row after the last new token, [B] int64; None if unknown.
        initial_slots: Slots beyond the prompt if the end is unknown.
    """
    grows = policy.decode == "grow"
    extra = torch.zeros_like(prompt)
    if grows:
        extra = growth(prompt) if end is None else (end - prompt).clamp_min(0)
    # Slots are allocated for what a layer can hold: no more than all tokens, however large the budget.
    last = prompt + initial_slots if end is None else torch.maximum(end, prompt)
    expected_len = torch.minimum(keep + extra[:, None], last[:, None])
    if grows and not isinstance(policy, LayeredPolicy) and policy.heads is not None:
        # Pages of heads are those of the prompt, and of what is known to follow.
        expected_len = torch.minimum(expected_len, (prompt + extra)[:, None])
    return Tokens(keep, extra, expected_len, prompt if grows else last)


def largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number up to `high` that fits, if `low` does and every number between it and a fitting one fits."""
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
