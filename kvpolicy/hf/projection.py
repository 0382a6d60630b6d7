"""Matrices of an attention module: its output projection, and others that are multiplied by vectors of a policy."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy.text.errors import KVPolicyError

PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "wo")
"""Names of the projection behind the heads, of which each attention module has one."""


class Reading(partial[Tensor]):
    """Reads a matrix of a module, for layers of a cache whose copies share the module.

    `copy.deepcopy` of an ordinary `partial` would copy the weights of the module with every cache.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Reading:
        """The same: it holds nothing of a cache."""
        return self


gathered: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Attention modules with all heads on every rank, although each rank has only a part of their weights."""


def output_projection(module: nn.Module) -> Tensor:
    """The weight behind the heads of an attention module, [hidden, Hq * D] of this rank.

    It is [B, hidden, Hq * D] in a call that names an adapter for each row, as PEFT's `adapter_names` does.

    Raises:
        KVPolicyError: If it cannot be read, or depends on the tokens.
    """
    part, weight = _find(module)
    if weight.is_meta:
        raise KVPolicyError(
            "The output projection must be in memory while its layer runs, for the norms of values, got "
            f"{type(module).__name__} with offloaded weights; try another selector, such as snapkv."
        )
    return _adapted(part, weight, "output projection", _NORMS) if _is_adapted(part) else weight


def matrix_of(part: nn.Module, like: Tensor, use: str) -> Tensor:
    """The matrix of a linear module without a bias on this rank, [out, in], or [B, out, in] with adapters by row.

    It is read off its outputs where the weight does not hold it: one that is quantized, or offloaded.

    Args:
        part: The module, whose layer runs.
        like: An input of it, [..., in].
        use: What the matrix is for, in a message.

    Raises:
        KVPolicyError: If it depends on the tokens.
    """
    weight = _float_weight(part)
    if weight is None or weight.is_meta or weight.element_size() == 1:  # fp8 has scales beside it
        return part(torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)).mT
    return _adapted(part, weight, "matrix", use) if _is_adapted(part) else weight


_NORMS = "the norms of values, got an adapter"


def _float_weight(part: Any, *, whole: bool = False) -> Tensor | None:
    """The weight of a module as its multiplication reads it, in memory or not; None if it has none of that kind.

    Args:
        part: The module.
        whole: Whether the parts of all ranks are wanted; then all ranks must call this.
    """
    weight: Any = getattr(part, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        return None
    if not hasattr(weight, "to_local"):  # is no part of a sharded one
        return weight
    return weight.full_tensor() if whole else weight.to_local()  # pyright: ignore[reportAttributeAccessIssue]


def _is_adapted(part: nn.Module) -> bool:
    """Whether a projection adds to its weight, as LoRA does: by a wrapper of PEFT, or a subclass of one's own."""
    own_forward = isinstance(part, nn.Linear) and type(part).forward is not nn.Linear.forward
    return own_forward or hasattr(part, "base_layer")


@torch.no_grad()
def _adapted(part: nn.Module, weight: Tensor, what: str, use: str) -> Tensor:
    """The weight of a projection with what its adapters add in the running call, read off its outputs."""
    given = _given_by_call(part)
    rows: Any = given.pop("adapter_names", None)
    if given:
        raise KVPolicyError(
            f"The {what} must be the same for all tokens of a row, for {use} that is given "
            f"{', '.join(sorted(given))} in this call; try another selector, such as snapkv."
        )
    with _without_dropout(part):
        return _outputs(part, weight) if rows is None else _of_rows(part, weight, rows)


def _given_by_call(part: nn.Module) -> dict[str, Any]:
    """Keyword arguments that hooks of the running call add to those of a projection."""
    given: dict[str, Any] = {}
    for number, hook in part._forward_pre_hooks.items():  # pyright: ignore[reportPrivateUsage]
        if number in part._forward_pre_hooks_with_kwargs:  # pyright: ignore[reportPrivateUsage]
            changed: Any = hook(part, (), {})
            given |= {} if changed is None else changed[1]
    return given


@contextmanager
def _without_dropout(part: nn.Module) -> Generator[None]:
    """Run a module as in inference, where adapters drop no input at random."""
    training = [module for module in part.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def _of_rows(part: nn.Module, weight: Tensor, adapters: Sequence[str]) -> Tensor:
    """The weight of a projection whose rows have adapters by name, [B, hidden, Hq * D]."""
    weights = {name: _outputs(part, weight, name) for name in sorted(set(adapters))}
    return torch.stack([weights[name] for name in adapters])


def _outputs(part: Any, weight: Tensor, adapter: str | None = None) -> Tensor:
    """Outputs of a projection for each input alone, under one adapter or the active ones, [hidden, Hq * D]."""
    inputs = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
    zero = torch.zeros_like(inputs[:1])

    def run(x: Tensor) -> Tensor:
        # Without the module's hooks, which belong to the tokens of the call.
        return part.forward(x) if adapter is None else part.forward(x, adapter_names=[adapter] * len(x))

    return (run(inputs) - run(zero)).T.to(weight.dtype)  # of another dtype under autocast


def _find(module: nn.Module) -> tuple[nn.Module, Tensor]:
    """The projection of an attention module, and its own weight."""
    for name in PROJECTIONS:
        part: Any = getattr(module, name, None)
        weight = _float_weight(part, whole=module in gathered)
        if part is not None and weight is not None:
            weight = weight.detach()
            return part, weight.T if type(part).__name__ == "Conv1D" else weight
    raise KVPolicyError(
        "The output projection must have a weight in floating point for the norms of values, got "
        f"{type(module).__name__} without one; try kvzip without plus, or snapkv."
    )
