"""Small tensors that never change, made once for each device."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

_kept: dict[tuple[Hashable, torch.device], Tensor] = {}


def kept(name: Hashable, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
    """What `make` makes on the CPU (so that all devices agree), as fp32 on a device, the same object every time.

    To be called in a function that `torch.compiler.assume_constant_result` marks: a compiled program then holds the
    tensor as a constant. It is a parameter, since the compiler takes the shapes of those as fixed: it tries to make
    others dynamic when they change, and cannot guard on the shape of a constant.
    """
    if (name, device) not in _kept:
        with torch.inference_mode(False), torch.no_grad():
            tensor = make().float().contiguous().to(device)
            _kept[name, device] = torch.nn.Parameter(tensor, requires_grad=False)
    return _kept[name, device]
