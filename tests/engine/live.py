"""Which storages are alive: counted, not asked of the cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvpolicy import Policy, PolicyCache


class Alive(TorchDispatchMode):
    """Follows every storage that operators make.

    Attributes:
        peak: The most bytes alive at once.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.peak = 0
        # By identity, since storages on the meta device have no address.
        self._own = {StorageWeakRef(t.untyped_storage()).cdata for t in (*model.parameters(), *model.buffers())}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference.cdata not in self._own:
                    self._alive[reference.cdata] = (reference, storage.nbytes())
        self._alive = {key: item for key, item in self._alive.items() if not item[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


def leaves_of(thing: Any, seen: dict[int, Any] | None = None, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every tensor, number, flag and name that a cache can reach, with where it is found."""
    seen = {} if seen is None else seen
    if isinstance(thing, Tensor | int | float | str | bytes | torch.dtype | torch.device):
        yield path, thing
        return
    if thing is None or id(thing) in seen or isinstance(thing, Policy):
        return
    seen[id(thing)] = thing  # kept alive, else another object may get the same id
    if isinstance(thing, dict):
        parts = [*thing.items()]
    elif isinstance(thing, list | tuple):
        yield f"{path}.length", len(thing)
        parts = [*enumerate(thing)]
    elif not type(thing).__module__.startswith(("kvpolicy", "transformers.cache_utils")):
        return
    elif hasattr(thing, "__dict__"):
        parts = [*vars(thing).items()]
    else:  # such as a plan, which has slots
        parts = [(part.name, getattr(thing, part.name)) for part in fields(thing)] if is_dataclass(thing) else []
    for name, part in parts:
        if name in ("calibrations", "gate", "basis", "attachment", "rope"):  # the model's
            continue
        yield from leaves_of(part, seen, f"{path}.{name}")


def tensors_of(thing: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a cache can reach, with where it is found."""
    return ((path, leaf) for path, leaf in leaves_of(thing) if isinstance(leaf, Tensor))


def stored_bytes(cache: PolicyCache) -> int:
    """Bytes of every storage that a cache can reach, each counted once; not calibrated ones."""
    storages = (tensor.untyped_storage() for _, tensor in tensors_of(cache))
    return sum({StorageWeakRef(storage).cdata: storage.nbytes() for storage in storages}.values())
