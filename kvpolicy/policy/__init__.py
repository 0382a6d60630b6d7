"""Policies: the parts of one, which of them work together, and policies that differ by layer."""

from kvpolicy.policy.combination import describe_missing, missing
from kvpolicy.policy.model_policy import ModelPolicy, for_model
from kvpolicy.policy.policy import DEFAULT_BUDGET, LayeredPolicy, Policy
from kvpolicy.policy.tuned import TunedPolicy

__all__ = [
    "DEFAULT_BUDGET",
    "LayeredPolicy",
    "ModelPolicy",
    "Policy",
    "TunedPolicy",
    "describe_missing",
    "for_model",
    "missing",
]
