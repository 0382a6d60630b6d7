"""Intermediate results that compiled code writes to memory."""

from __future__ import annotations

import torch
from torch import Tensor


def in_memory(t: Tensor) -> Tensor:
    """The tensor itself, which compiled code for a CPU writes to memory.

    Otherwise inductor (torch 2.13) computes a small operand again for every number that it is multiplied with, one by
    one if it is gathered, and scores again in each pass over them.

    Args:
        t: The tensor, contiguous.
    """
    if not torch.compiler.is_compiling() or t.device.type != "cpu":
        return t
    return t.as_strided(t.shape, t.stride())
