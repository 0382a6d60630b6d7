"""Small tensors that never change, made once for each device."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

_kept: dict[tuple[Hashable, torch.device], Tensor] = {}


def kept(name: Hashable, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
    """What `make` makes on the CPU (so that all devices agree), as fp32 on a device, the same object every time.

    To be called in a function that `torch.compiler.assume_constant_result` marks: a compiled program then holds the
    tensor as a constant. Its shape is marked static, as the compiler cannot guard on the shape of such a constant.
    """
    if (name, device) not in _kept:
        with torch.inference_mode(False), torch.no_grad():
            tensor = make().float().contiguous().to(device)
        torch._dynamo.mark_static(tensor)  # pyright: ignore[reportPrivateUsage]
        _kept[name, device] = tensor
    return _kept[name, device]
