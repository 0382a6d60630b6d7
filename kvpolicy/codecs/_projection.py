"""Calibrated projections of vectors onto few directions, and back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs import _files
from kvpolicy.codecs._dictionaries import key_dictionary
from kvpolicy.protocols import ALL_HEADS
from kvpolicy.spec.errors import KVPolicyError

LEAST_ENERGY = 1e-6
"""The least energy of queries in a direction, as a share of the largest: its inverse square root must stay finite."""


class Projection(NamedTuple):
    """A vector x becomes the latent vector (x - mean) @ encode, and is decoded to latent @ decode + mean.

    Attributes:
        mean: [1, H, 1, D] fp32; H is 1 if all heads share it.
        encode: [1, H, D, r] fp32.
        decode: [1, H, r, D] fp32.
    """

    mean: Tensor
    encode: Tensor
    decode: Tensor

    def latents(self, x: Tensor) -> Tensor:
        """Latent vectors [B, H, n, r] fp32 of vectors [B, H, n, D]."""
        # In fp64, so that rounding to codes does not depend on how a product over more tokens or rows is summed.
        return ((x.double() - self.mean) @ self.encode.double()).float()

    def decoded(self, latents: Tensor) -> Tensor:
        """Vectors [B, H, n, D] fp32 of latent vectors [B, H, n, r]."""
        return (latents.double() @ self.decode.double() + self.mean).float()  # see `latents`

    def roughly_decoded(self, latents: Tensor) -> Tensor:
        """`decoded` but for the rounding of fp32, in less time: for scores."""
        return latents.float() @ self.decode + self.mean


def of_keys(
    folder: str,
    key_space: str,
    basis: str,
    rank: int,
    layer_idx: int,
    device: torch.device | str,
    heads: slice = ALL_HEADS,
) -> Projection:
    """The projection of the keys of a layer.

    Args:
        folder: Folder of the calibration, or the name of an embedded model.
        key_space: `rotated` or `unrotated`.
        basis: `keys`: onto the directions in which keys vary most. `scores`: so that the error of products with
            queries is least; only if keys are rotated.
        rank: The number of directions, r.
        layer_idx: Index of the layer.
        device: Device of the tensors.
        heads: Which KV heads to return.

    Raises:
        KVPolicyError: If the calibration is missing, damaged, or lacks this layer or key space.
    """
    mean, basis_of_keys, *others = (_tensor(folder, name, layer_idx, heads) for name in _names(key_space, basis))
    components = orthonormal(basis_of_keys)
    if basis == "keys":
        return _projection(mean, components[..., :rank], components[..., :rank].mT, device)
    variance, queries, energy = others
    return _projection(mean, *score_optimal(components, variance, orthonormal(queries), energy, rank), device)


def of_values(
    folder: str, rank: int, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS
) -> Projection:
    """The projection of the values of a layer onto the directions in which they vary most; see `of_keys`."""
    mean, components = (_tensor(folder, f"values.{what}", layer_idx, heads) for what in ("mean", "basis"))
    components = orthonormal(components)[..., :rank]
    return _projection(mean, components, components.mT, device)


def shape_of(folder: str, key_space: str, basis: str, layer_idx: int) -> tuple[int, int]:
    """The KV heads of a layer, or 1 if they share a basis, and the dimension of a key; nothing is decomposed.

    Raises:
        KVPolicyError: As `of_keys` and `of_values`.
    """
    keys = [_tensor(folder, name, layer_idx) for name in _names(key_space, basis)]
    for what in ("mean", "basis"):
        _tensor(folder, f"values.{what}", layer_idx)
    return keys[1].shape[0], keys[1].shape[-1]


def _names(key_space: str, basis: str) -> tuple[str, ...]:
    """The tensors that the projection of keys is made of."""
    part = key_dictionary(key_space)
    of_queries = () if basis == "keys" else (f"{part}.energy", "queries.basis", "queries.energy")
    return f"{part}.mean", f"{part}.basis", *of_queries


def orthonormal(basis: Tensor) -> Tensor:
    """Bases [H, D, D] that were rounded to fp16, orthonormal again, fp64; columns keep their directions and order."""
    q, r = torch.linalg.qr(basis.double())
    return q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]


def score_optimal(
    components: Tensor, variance: Tensor, queries: Tensor, energy: Tensor, rank: int
) -> tuple[Tensor, Tensor]:
    """Matrices that encode and decode keys such that the mean squared error of their products with queries is least.

    With C the second moment of queries, the error of a product q (k - k') has the mean square of C^(1/2) (k - k'). So
    keys are multiplied by C^(1/2), projected onto their principal components, and multiplied by C^(-1/2).

    Args:
        components: Principal components of keys as columns, [H, D, D] fp64.
        variance: The variance of keys along them, [H, D].
        queries: Principal components of queries as columns, [H, D, D] fp64.
        energy: The mean square of queries along them, [H, D].
        rank: The number of directions, r.

    Returns:
        [H, D, r] and [H, r, D], fp64.
    """
    energy = energy.double().clamp_min(LEAST_ENERGY * energy.amax(-1, keepdim=True).double().clamp_min(1e-30))
    root = (queries * energy.sqrt()[:, None]) @ queries.mT
    inverse = (queries * energy.rsqrt()[:, None]) @ queries.mT
    covariance = (components * variance.double()[:, None]) @ components.mT
    weighted = torch.linalg.eigh(root @ covariance @ root).eigenvectors.flip(-1)[..., :rank]
    return root @ weighted, weighted.mT @ inverse


def _projection(mean: Tensor, encode: Tensor, decode: Tensor, device: torch.device | str) -> Projection:
    return Projection(*(t.float()[None].contiguous().to(device) for t in (mean[:, None], encode, decode)))


def _tensor(folder: str, name: str, layer_idx: int, heads: slice = ALL_HEADS) -> Tensor:
    """A calibrated tensor of these heads; one that all heads share is [1, ...]."""
    found = _files.load(folder, "lowrank").tensors.get(f"{name}.{layer_idx}")
    if found is None:
        raise KVPolicyError(
            f"The calibration {folder!r} must contain {name} for layer {layer_idx}, got none; try kvpolicy calibrate "
            "lowrank on this model, with all key spaces."
        )
    return found if len(found) == 1 else found[heads]
