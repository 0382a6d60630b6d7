"""Dictionaries of a CSR calibration; each is shared by a group of layers."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.codecs._files import CalibrationFile, load
from kvpolicy.codecs.csr.sparse import unit
from kvpolicy.text.errors import KVPolicyError

FILE_KEY_SPACES = {"unrotated": "pre", "rotated": "post"}
"""The name of each key space in calibration files, whose format has not changed since it was called the frame."""

_copies: WeakKeyDictionary[CalibrationFile, dict[tuple[str, str], Tensor]] = WeakKeyDictionary()
"""Dictionaries by tensor and device, as long as their calibration is known: one that was read again replaces it."""


def key_dictionary(key_space: str) -> str:
    """The name in a calibration file of the dictionary of keys.

    >>> key_dictionary("unrotated")
    'keys.pre'
    """
    return f"keys.{FILE_KEY_SPACES[key_space]}"


def value_dictionary(chunks: int) -> str:
    """The name in a calibration file of the dictionary of values that are split into `chunks` chunks.

    >>> value_dictionary(2)
    'values.sn2'
    """
    return f"values.sn{chunks}"


def dictionary(folder: str, name: str, layer_idx: int, device: str) -> Tensor:
    """The dictionary of a layer; layers of a group share one tensor.

    Args:
        folder: The folder of the calibration.
        name: Name of the dictionary, such as `keys.pre` or `values.sn2`.
        layer_idx: Index of the layer.
        device: Device of the tensor.

    Returns:
        [N, d] fp32: unit vectors, padded with zero vectors to the size of the largest dictionary of this name.

    Raises:
        KVPolicyError: If the calibration has no such dictionary for that layer.
    """
    return _on_device(load(folder, "csr"), name, _tensor_name(folder, name, layer_idx), device)


def width(folder: str, name: str, layer_idx: int) -> int:
    """The number of elements of an atom in the dictionary of a layer; raises like `dictionary`."""
    return load(folder, "csr").tensors[_tensor_name(folder, name, layer_idx)].shape[0]


def size(folder: str, name: str) -> int:
    """The number of atoms of the largest dictionary of this name.

    Raises:
        KVPolicyError: If the calibration has none.
    """
    calibration = load(folder, "csr")
    sizes = [t.shape[1] for key, t in calibration.tensors.items() if key.rpartition(".")[0] == name]
    if not sizes:
        raise KVPolicyError(
            f"The calibration {folder!r} must contain dictionaries {name}, got none; try kvpolicy calibrate csr, with "
            "options that include them."
        )
    return max(sizes)


def _tensor_name(folder: str, name: str, layer_idx: int) -> str:
    """The name of the tensor that holds the dictionary of a layer."""
    calibration = load(folder, "csr")
    groups: list[list[int]] = calibration.meta["groups"].get(name, [])
    for group, layers in enumerate(groups):
        if layer_idx in layers and f"{name}.{group}" in calibration.tensors:
            return f"{name}.{group}"
    layers = sorted(layer for group in groups for layer in group)
    raise KVPolicyError(
        f"The calibration {folder!r} must contain a dictionary {name} for layer {layer_idx}, got "
        f"{f'layers {layers}' if layers else 'none'}; try kvpolicy calibrate csr, with options that include it."
    )


def _on_device(calibration: CalibrationFile, name: str, tensor: str, device: str) -> Tensor:
    known = _copies.setdefault(calibration, {})
    if (tensor, device) not in known:
        known[tensor, device] = _atoms(calibration.tensors, name, tensor).to(torch.device(device))
    return known[tensor, device]


def _atoms(tensors: Mapping[str, Tensor], name: str, tensor: str) -> Tensor:
    largest = max(t.shape[1] for other, t in tensors.items() if other.rpartition(".")[0] == name)
    atoms = unit(tensors[tensor].mT)  # stored in fp16, which makes their norms slightly different from 1
    return F.pad(atoms, (0, 0, 0, largest - len(atoms))).contiguous()
