"""What a policy cannot do with values that have another size than keys, or are a part of them."""

from __future__ import annotations

from kvpolicy.codecs._apart import is_divisible
from kvpolicy.policy import Policy
from kvpolicy.protocols import LayerShape
from kvpolicy.spec.errors import KVPolicyError


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
        if not shape.latent and (traits.summarized or traits.clustered):
            raise KVPolicyError(
                f"The reader must need no summaries of values for {_described(shape)}, got {own.reader}; try quest."
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


def _described(shape: LayerShape) -> str:
    if shape.latent:
        return "latent attention (MLA)"
    return f"values of {shape.value_dim} and keys of {shape.head_dim} channels"
