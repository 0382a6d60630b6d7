"""Small constant tensors, created once per device."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])

_constants: dict[tuple[Hashable, torch.device], Tensor] = {}


def constant(name: Hashable, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
    """A constant as fp32 on a device, the same object in every call.

    Call this in a function that is marked with `constant_result`, so that a compiled program holds the tensor as a
    constant.

    Args:
        name: The key of the constant.
        device: The device of the result.
        make: Creates the tensor on the CPU, so that its value is the same for all devices.
    """
    if (name, device) not in _constants:
        with torch.inference_mode(False), torch.no_grad():
            tensor = make().float().contiguous().to(device)
            # A Parameter, because the compiler treats the shapes of parameters as static. Of another tensor it would
            # make a dimension dynamic once that changes, and it cannot guard on the shape of a constant.
            _constants[name, device] = torch.nn.Parameter(tensor, requires_grad=False)
    return _constants[name, device]


def constant_result(fn: F) -> F:
    """Mark a function whose result a compiled program may hold, as `torch.compiler.assume_constant_result` does.

    That function imports the compiler, which takes longer than a whole plan. The mark is all that it sets.
    """
    vars(fn)["_dynamo_marked_constant"] = True
    return fn
