"""Policies with a least number of tokens, for those who serve prompts of any length."""

from __future__ import annotations

from kvpolicy.policy.policy import Policy
from kvpolicy.text.budget import with_least


def keep_at_least(policy: Policy, least: int) -> Policy:
    """A policy with a least number of tokens, if its budget is a fraction without one; others are returned unchanged.

    Args:
        policy: The policy.
        least: The least number of tokens per layer on average; 0 for none.

    Examples:
        >>> [str(keep_at_least(Policy.parse(spec), 1024)) for spec in ("h2o@0.5", "h2o@0.5:least=64", "h2o@64")]
        ['h2o@0.5:least=1024', 'h2o@0.5:least=64', 'h2o@64']
    """
    budget = with_least(policy.budget, least)
    return policy if budget == policy.budget else policy.with_budget(budget)
