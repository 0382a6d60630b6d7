"""The output projection of an attention module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy.spec.errors import KVPolicyError

PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "wo")
"""Names of the projection behind the heads, of which each attention module has one."""


def output_projection(module: nn.Module) -> Tensor:
    """The weight behind the heads of an attention module, [hidden, Hq * D] of this rank.

    Raises:
        KVPolicyError: If it cannot be read.
    """
    part, weight = _find(module)
    if weight.is_meta:
        raise KVPolicyError(
            "The output projection must be in memory while its layer runs, for the norms of values, got "
            f"{type(module).__name__} with offloaded weights; try another selector, such as snapkv."
        )
    return _adapted(part, weight) if _is_adapted(part) else weight


def _is_adapted(part: nn.Module) -> bool:
    """Whether a projection adds to its weight, as LoRA does: by a wrapper of PEFT, or a subclass of one's own."""
    own_forward = isinstance(part, nn.Linear) and type(part).forward is not nn.Linear.forward
    return own_forward or hasattr(part, "base_layer")


@torch.no_grad()
def _adapted(part: nn.Module, weight: Tensor) -> Tensor:
    """The weight of a projection with what its adapters add, read off its outputs."""
    inputs = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
    return (part(inputs) - part(torch.zeros_like(inputs[:1]))).T.to(weight.dtype)  # of another dtype under autocast


def find_projection(module: nn.Module) -> Tensor:
    """The weight behind the heads of an attention module, in memory or not, without adapters; see `output_projection`.

    Raises:
        KVPolicyError: If there is none.
    """
    return _find(module)[1]


def _find(module: nn.Module) -> tuple[nn.Module, Tensor]:
    """The projection of an attention module, and its own weight."""
    for name in PROJECTIONS:
        part: Any = getattr(module, name, None)
        weight: Any = getattr(part, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point():
            weight = weight.detach()
            weight = weight.to_local() if hasattr(weight, "to_local") else weight  # pyright: ignore[reportAttributeAccessIssue]
            return part, weight.T if type(part).__name__ == "Conv1D" else weight
    raise KVPolicyError(
        "The output projection must have a weight in floating point for the norms of values, got "
        f"{type(module).__name__} without one; try kvzip without plus, or snapkv."
    )
