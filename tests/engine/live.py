"""Which storages are alive: counted, not asked of the cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvpolicy import PolicyCache
from kvpolicy.hf.layer import PolicyLayer


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


def stored_bytes(cache: PolicyCache) -> int:
    """Bytes of every storage that can be reached from a cache's layers, each counted once; not calibrated ones."""
    found: dict[int, int] = {}
    for layer in cache.layers:
        own = dict(vars(layer))
        if isinstance(layer, PolicyLayer) and layer.is_initialized:
            own |= vars(layer.store.contents) | vars(layer.store.tensors)
        own.pop("calibrations", None)
        own.pop("gate", None)
        own.pop("basis", None)
        own["mask_digest"] = getattr(layer, "mask_digest", None)  # of the cache, and held by its first layer
        for tensor in _reach(own, set()):
            storage = tensor.untyped_storage()
            found[StorageWeakRef(storage).cdata] = storage.nbytes()
    return sum(found.values())


def _reach(thing: Any, seen: set[int]) -> list[Tensor]:
    if id(thing) in seen:
        return []
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        return [thing]
    parts = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple) else ()
    return [tensor for part in parts for tensor in _reach(part, seen)]
