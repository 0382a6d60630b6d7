"""Policies: the parts of one, which of them work together, and policies that differ by layer."""

from kvpolicy.policy.grouped import GroupedPolicy, grouped
from kvpolicy.policy.parts import describe_missing, missing
from kvpolicy.policy.policy import DEFAULT_BUDGET, LayeredPolicy, Policy
from kvpolicy.policy.tuned import TunedPolicy

__all__ = [
    "DEFAULT_BUDGET",
    "GroupedPolicy",
    "LayeredPolicy",
    "Policy",
    "TunedPolicy",
    "describe_missing",
    "grouped",
    "missing",
]
