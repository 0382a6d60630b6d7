"""What a policy cannot do with values that have another size than keys, or are a part of them."""

from __future__ import annotations

import torch

from kvpolicy.codecs.apart import is_divisible
from kvpolicy.policy import Policy
from kvpolicy.protocols import Candidates, LayerShape, Merger
from kvpolicy.statistics import RecentQueries, ReplayedRows
from kvpolicy.statistics.statistic import first_of
from kvpolicy.text.errors import KVPolicyError


def check_values(policy: Policy, shape: LayerShape) -> None:
    """Refuse a policy with a part that takes values for as large as keys, or for vectors of their own.

    Args:
        policy: The policy.
        shape: The shape of the layers under it.

    Raises:
        KVPolicyError: Naming the part.
    """
    if shape.value_dim is None:
        return
    for own in policy.distinct:
        if not is_divisible(own.codec):
            raise KVPolicyError(
                f"The codec must encode keys and values separately for {_described(shape)}, got {own.codec}; try "
                "tokenwise, kivi, turboquant or bfp."
            )
        traits = own.reader.traits
        if not shape.latent and (traits.estimates or traits.clusters):
            raise KVPolicyError(
                f"The reader must need no summaries of values for {_described(shape)}, got {own.reader}; try quest."
            )
    if shape.latent and not changes_keys(policy.merger):
        raise KVPolicyError(
            f"The merger must merge keys for {_described(shape)}, whose values are a part of them, got "
            f"{policy.merger}; try d2o, elastic or compensate."
        )
    if shape.latent and policy.heads is not None:
        raise KVPolicyError(
            f"Heads must have no budgets of their own for {_described(shape)}, which all query heads share, got "
            f"{policy}; try the policy without them."
        )
    if shape.latent and policy.undoes_rotation:
        raise KVPolicyError(
            f"The rotary embedding of keys must not be undone for {_described(shape)}, got the "
            f"{policy.undoes_rotation} of {policy}; try another one."
        )


def changes_keys(merger: Merger) -> bool:
    """Whether a merger changes keys, as a prompt of three tokens shows, of which two are kept; so does one that drops.

    >>> from kvpolicy import D2O, Blend
    >>> changes_keys(D2O()), changes_keys(Blend())
    (True, False)
    """
    if merger.traits.when == "never":
        return True
    tokens = torch.ones(1, 1, 3, 2, device="cpu", dtype=torch.float32)
    weights = torch.full((1, 1, 1, 3), 1 / 3, device="cpu", dtype=torch.float32)
    every = torch.zeros(1, 1, 3, device="cpu", dtype=torch.float32)
    kept = torch.tensor([[[True, True, False]]], device="cpu")
    found = merger.merge_prompt(
        merger.alloc(1, 1, "cpu"),
        Candidates(
            keys=tokens,
            values=tokens,
            positions=torch.arange(3, dtype=torch.int32, device="cpu")[None, None],
            kept=kept,
            targets=torch.tensor([[[0, 1]]], device="cpu"),
            is_target=kept[..., :2],
            counts=every if merger.traits.counted else None,
            attention=weights if first_of(RecentQueries, merger.statistics) else None,
            length=torch.tensor([3], device="cpu"),
            priority=every if merger.traits.ranked else None,
            replay_attention=weights if first_of(ReplayedRows, merger.statistics) else None,
        ),
    )
    return found.keys is not None


def _described(shape: LayerShape) -> str:
    if shape.latent:
        return "latent attention (MLA)"
    return f"values of {shape.value_dim} and keys of {shape.head_dim} channels"
