"""A second device on a machine that has none: its tensors hold numbers in memory, but mix with no other tensors.

Every operation of PyTorch goes through a mode. A tensor that is made on `DEVICE`, or copied there, becomes a `Remote`.
An operation on some `Remote` and some other tensors is refused, as on a GPU, but for copies and for single numbers.

PyTorch cannot forget a device that it was given, so that this needs a process of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

DEVICE = torch.device("privateuseone", 0)
COPIES = ("aten.copy_", "aten._to_copy")

traffic = Counter[tuple[str, bool]]()
"""Bytes that were copied `"there"` and `"back"`, of floating-point numbers (True) and of others."""


class Remote(Tensor):
    """A tensor that says it is on `DEVICE`, and whose numbers are in `numbers`."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> Any:
        """Wrap a tensor in memory."""
        form: dict[str, Any] = {"strides": numbers.stride(), "storage_offset": numbers.storage_offset()}
        made: Any = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=numbers.dtype, device=DEVICE, **form)
        made.numbers = numbers
        return made

    def tolist(self) -> Any:
        """The numbers as a list, which PyTorch refuses of subclasses."""
        return self.numbers.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Operate on the numbers."""
        return run(func, args, kwargs or {})


class Elsewhere(TorchDispatchMode):
    """Sees the operations on ordinary tensors too, of which some make tensors on `DEVICE`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Operate on the numbers."""
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation, on the device that it says, or on that of its tensors."""
    given = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
    mixed = any(t.dim() for t in given if not isinstance(t, Remote))
    remote = any(isinstance(t, Remote) for t in given)
    name = str(func).rpartition(".")[0]
    if name not in COPIES and remote and mixed:
        raise RuntimeError(f"{name}: Expected all tensors to be on the same device")
    device = kwargs.get("device")
    there = remote if device is None else torch.device(device).type == DEVICE.type
    if device is not None and there:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    found = func(*local(args), **local(kwargs))
    if func._schema.is_mutable and isinstance(found, Tensor):  # in place: what was given is what is returned
        return kwargs.get("out", args[0] if args else found)
    if name == "aten._to_copy" and there != remote:  # of the same numbers, but not in the same memory
        found = found.clone()
        traffic["there" if there else "back", found.is_floating_point()] += found.nbytes
    return tree_map_only(Tensor, Remote, found) if there else found


def local(tree: Any) -> Any:
    """The numbers of tensors, wherever they are."""
    return tree_map_only(Remote, lambda t: t.numbers, tree)


@contextmanager
def elsewhere() -> Generator[None]:
    """Let tensors of `DEVICE` exist."""
    _setup_privateuseone_for_python_backend()
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # as for fake tensors: `torch.tensor` makes numbers in memory first
    try:
        with Elsewhere():
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
