"""The output projection of an attention module."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from kvpolicy.spec.errors import KVPolicyError

PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "wo")
"""Names of the projection behind the heads, of which each attention module has one."""


def output_projection(module: nn.Module) -> Tensor:
    """The weight behind the heads of an attention module, [hidden, Hq * D] of this rank.

    Raises:
        KVPolicyError: If it cannot be read.
    """
    weight = find_projection(module)
    if weight.is_meta:
        raise KVPolicyError(
            "The output projection must be in memory while its layer runs, for the norms of values, got "
            f"{type(module).__name__} with offloaded weights; try another selector, such as snapkv."
        )
    return weight


def find_projection(module: nn.Module) -> Tensor:
    """The weight behind the heads of an attention module, in memory or not; see `output_projection`.

    Raises:
        KVPolicyError: If there is none.
    """
    for name in PROJECTIONS:
        part = getattr(module, name, None)
        weight: Any = getattr(part, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point():
            weight = weight.detach()
            weight = weight.to_local() if hasattr(weight, "to_local") else weight  # pyright: ignore[reportAttributeAccessIssue]
            return weight.T if type(part).__name__ == "Conv1D" else weight
    raise KVPolicyError(
        "The output projection must have a weight in floating point for the norms of values, got "
        f"{type(module).__name__} without one; try kvzip without plus, or snapkv."
    )
