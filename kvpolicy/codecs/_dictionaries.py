"""Dictionaries of a calibration, each shared by a group of layers."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.codecs._files import Calibrated, load
from kvpolicy.codecs._sparse import unit
from kvpolicy.spec.errors import KVPolicyError


def dictionary(folder: str, name: str, layer_idx: int, device: str) -> Tensor:
    """A layer's dictionary; layers of a group share one tensor.

    Args:
        folder: The calibration's.
        name: Of what, such as `keys.pre` or `values.sn2`.
        layer_idx: Which layer.
        device: Where to.

    Returns:
        [N, d] fp32, unit vectors, and zero vectors up to the size of the largest group's.

    Raises:
        KVPolicyError: Where the calibration has none for that layer.
    """
    return _loaded(_Key(load(folder, "csr")), name, _tensor(folder, name, layer_idx), device)


def width(folder: str, name: str, layer_idx: int) -> int:
    """Numbers of an atom of a layer's dictionary; raises as `dictionary`."""
    return load(folder, "csr").tensors[_tensor(folder, name, layer_idx)].shape[0]


def _tensor(folder: str, name: str, layer_idx: int) -> str:
    """The name of the tensor that is a layer's dictionary."""
    found = load(folder, "csr")
    for group, layers in enumerate(found.meta["groups"].get(name, [])):
        if layer_idx in layers and f"{name}.{group}" in found.tensors:
            return f"{name}.{group}"
    raise KVPolicyError(
        f"The calibration {folder!r} has no dictionary {name} for layer {layer_idx}: make one that has it with "
        "kvpolicy calibrate csr."
    )


def size(folder: str, name: str) -> int:
    """Atoms of the largest group's dictionary."""
    found = load(folder, "csr")
    sizes = [t.shape[1] for key, t in found.tensors.items() if key.rpartition(".")[0] == name]
    if not sizes:
        raise KVPolicyError(
            f"The calibration {folder!r} has no dictionary {name}: make one that has it with kvpolicy calibrate csr."
        )
    return max(sizes)


class _Key:
    """A calibration as a key of a table: the same one is loaded once, another one under the same name is another."""

    def __init__(self, found: Calibrated) -> None:
        self.found = found

    def __hash__(self) -> int:
        return id(self.found)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.found is self.found


@functools.cache
def _loaded(key: _Key, name: str, tensor: str, device: str) -> Tensor:
    tensors = key.found.tensors
    most = max(t.shape[1] for other, t in tensors.items() if other.rpartition(".")[0] == name)
    atoms = unit(tensors[tensor].mT)  # fp16 in the file, so that their norms are not quite 1
    return F.pad(atoms, (0, 0, 0, most - len(atoms))).contiguous().to(torch.device(device))
