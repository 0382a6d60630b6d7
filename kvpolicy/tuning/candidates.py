"""The policies that a tuner chooses from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpolicy.allocators.uniform import Uniform
from kvpolicy.policy import Policy
from kvpolicy.protocols import ModelInfo, differs_by_layer
from kvpolicy.readers.all import ReadAll
from kvpolicy.statistics import Replay, Statistic, union
from kvpolicy.statistics.statistic import first_of
from kvpolicy.text.errors import KVPolicyError


def check_candidates(candidates: Sequence[Policy | str], model: ModelInfo) -> list[Policy]:
    """The candidates as policies, if each can be measured in one layer alone.

    Args:
        candidates: Policies or their specs.
        model: Description of the model for codecs.

    Raises:
        KVPolicyError: If there is none, or one differs by layer or step: another allocator than `uniform`, a budget
            that is no fraction of the prompt, a reader, or a codec that reads in part; or if a part cannot be used with
            the model.
        KVPolicyTypeError: If one is no policy.

    Examples:
        >>> check_candidates(["h2o@0.1"], ModelInfo(2, 4, 32))
        [Policy.parse('h2o@0.1')]
    """
    # One layer is measured at a time, and the answer at once: refuse what looks at other layers, or chooses per step.
    policies = [Policy.of(candidate) for candidate in candidates]
    if not policies:
        raise KVPolicyError("The candidates must be at least one policy, got none; try snapkv@0.2.")
    for policy in policies:
        if not isinstance(policy.allocator, Uniform):
            raise KVPolicyError(
                f"A candidate must give every layer the same budget, since it is measured in one layer alone, got "
                f"{policy}; try uniform, or no allocator."
            )
        if not isinstance(policy.budget, float):
            raise KVPolicyError(
                f"The budget of a candidate must be a fraction of the prompt, got {policy.budget!r} of {policy}; try "
                "0.2."
            )
        search = policy.codec.traits.search
        if not isinstance(policy.reader, ReadAll) or search is not None:
            raise KVPolicyError(
                f"A candidate must read every kept token, since answers are measured in one piece, got {policy}; try "
                f"it without {'the reader' if search is None else search.option}."
            )
        if differs_by_layer(policy.codec):
            raise KVPolicyError(
                "The codec of a candidate must not depend on the other layers, since it is measured in one layer "
                f"alone, got {policy}; try ranks=same."
            )
        if policy.codec.traits.groups is not None:
            raise KVPolicyError(
                "The codec of a candidate must encode every layer by itself, since it is measured in one layer alone, "
                f"got {policy}; try tokenwise."
            )
        policy.check(model)
    return policies


def statistics_of(policy: Policy) -> tuple[Statistic[Any], ...]:
    """The statistics of a prompt that a policy needs to compress it."""
    return union(policy.selector.statistics, policy.merger.statistics)


def replays_of(policies: Sequence[Policy]) -> set[Replay]:
    """The different ways in which the policies replay a prompt."""
    return {replay for policy in policies if (replay := first_of(Replay, statistics_of(policy))) is not None}


def pins_of(policies: Sequence[Policy]) -> set[int]:
    """How many tokens with the largest activations the codecs of the policies pin."""
    traits = (policy.codec.traits for policy in policies)
    return {each.pinned for each in traits if each.pins == "massive"}
