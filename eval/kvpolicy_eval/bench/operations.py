"""What a decode step asks of the device: operations, waits and bytes. None of them depends on the machine."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import DynamicCache

import kvpolicy
from kvpolicy_eval.bench.models import llama, tokens

LAYERS = 8
PROMPT = 256
STEPS = 4
WIDTH = 64

READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")
"""Operations that wait until the device is done: a number is read, or a shape depends on data."""
VIEWS = ("aten::_unsafe_view",)
"""Views whose schema does not say so."""
MEMORY = ("aten::empty.memory_format", "aten::empty_like", "aten::empty_strided", "aten::new_empty")
"""Operations that take memory and write nothing to it: no kernel is launched."""
ROWS = {
    "aten::gather": 0,
    "aten::index_select": 0,
    "aten::embedding": 0,
    "aten::index_copy_": 3,
    "aten::scatter_.src": 3,
}
"""Operations that touch a part of their first tensor, as large as the result, or as the argument with this number."""


class Counted(NamedTuple):
    """What was counted.

    Attributes:
        operations: Operations that are no views, and do more than take memory; an eager step launches a kernel for
            each, or more.
        waits: Operations that wait for the device.
        nbytes: Bytes of what the operations read and write, each for itself.
    """

    operations: int
    waits: int
    nbytes: int


class Operations(TorchDispatchMode):
    """Counts the operations under it."""

    def __init__(self) -> None:
        """Begin at zero."""
        super().__init__()
        self.counted = Counted(0, 0, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation, and run it."""
        out = func(*args, **(kwargs or {}))
        if not is_view(func) and func.name() not in MEMORY:
            before = self.counted
            waits = func.name() in READS or by_mask(args) or leaves(args, out)
            nbytes = touched(func.name(), args, out)
            self.counted = Counted(before.operations + 1, before.waits + waits, before.nbytes + nbytes)
        return out


def is_view(func: Any) -> bool:
    """Whether an operation only returns its argument in another shape."""
    returns = func._schema.returns
    return func.name() in VIEWS or any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def by_mask(args: Any) -> bool:
    """Whether an operation is given a list with a mask, as an index is, of which it must count the elements."""
    lists = (argument for argument in args if isinstance(argument, (list, tuple)))
    return any(isinstance(t, Tensor) and t.dtype == torch.bool for indices in lists for t in indices)


def leaves(args: Any, out: Any) -> bool:
    """Whether an operation copies a tensor to the host."""
    given = next((t for t in tree_iter(args) if isinstance(t, Tensor)), None)
    return given is not None and isinstance(out, Tensor) and out.device.type == "cpu" != given.device.type


def touched(name: str, args: Any, out: Any) -> int:
    """Bytes of the arguments and results of an operation; of one on some rows of a tensor, those of the rows."""
    results = [t for t in tree_iter(out) if isinstance(t, Tensor)]
    if name in ROWS:
        rows = args[ROWS[name]] if ROWS[name] else results[0]
        return 2 * rows.nbytes
    given = [t for t in tree_iter(args) if isinstance(t, Tensor)]
    return sum(size(t) for t in (*given, *results))


def size(t: Tensor) -> int:
    """Bytes of the numbers of a tensor; what is expanded is read once."""
    repeated = (n for n, stride in zip(t.shape, t.stride(), strict=True) if stride == 0)
    nbytes = t.nbytes
    for times in repeated:
        nbytes //= max(times, 1)
    return nbytes


def step_operations(policy: str | None) -> Counted:
    """What one decode step takes under a policy, of several the one with the fewest operations: it encodes no block.

    Args:
        policy: A spec; None for the stock `DynamicCache`.
    """
    model = llama(LAYERS, WIDTH, heads=4)
    if policy is None:
        return _fewest(model, DynamicCache(config=model.config))
    with kvpolicy.attach(model, policy):
        return _fewest(model, kvpolicy.PolicyCache(model, new=STEPS))


def _fewest(model: nn.Module, cache: Any) -> Counted:
    ids = tokens(PROMPT + STEPS)
    steps: list[Counted] = []
    with torch.no_grad():
        model(ids[:, :PROMPT], cache=cache)
        for column in range(PROMPT, PROMPT + STEPS):
            with Operations() as operations:
                model(ids[:, column, None], cache=cache)
            steps.append(operations.counted)
    return min(steps)
