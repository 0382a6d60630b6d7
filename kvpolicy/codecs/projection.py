"""Calibrated projections of vectors onto few directions, and back."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs import _files
from kvpolicy.codecs.csr.dictionaries import key_dictionary
from kvpolicy.protocols import ALL_HEADS
from kvpolicy.text.errors import KVPolicyError

LEAST_ENERGY = 1e-6
"""The least energy of queries in a direction, as a share of the largest: its inverse square root must stay finite."""


class Basis(NamedTuple):
    """Which calibrated directions keys are projected onto.

    Attributes:
        folder: Folder of the calibration, or the name of an embedded model.
        key_space: `rotated` or `unrotated`.
        kind: `keys`: directions in which keys vary most. `scores`: those that leave the least error in products with
            queries; only if keys are rotated.
        group: How many KV heads have directions together, g: these are directions of one vector of g D channels.
    """

    folder: str
    key_space: str = "rotated"
    kind: str = "keys"
    group: int = 1


class Projection(NamedTuple):
    """A vector x becomes the latent vector (x - mean) @ encode, and is decoded to latent @ decode + mean.

    Attributes:
        mean: [1, H, 1, D] fp32; H is 1 if all heads share it.
        encode: [1, H, D, r] fp32. Where heads have directions together, the latent vector of a group is the sum of
            those of its heads.
        decode: [1, H, r, D] fp32.
    """

    mean: Tensor
    encode: Tensor
    decode: Tensor

    def latents(self, x: Tensor, group: int = 1) -> Tensor:
        """Latent vectors [B, H / group, n, r] fp32 of vectors [B, H, n, D], one for each group of heads."""
        # In fp64, so that rounding to codes does not depend on how a product over more tokens or rows is summed.
        found = (x.double() - self.mean) @ self.encode.double()
        return (found if group == 1 else found.unflatten(1, (-1, group)).sum(2)).float()

    def decoded(self, latents: Tensor) -> Tensor:
        """Vectors [B, H, n, D] fp32 of latent vectors [B, H, n, r]."""
        return (latents.double() @ self.decode.double() + self.mean).float()  # see `latents`

    def roughly_decoded(self, latents: Tensor) -> Tensor:
        """`decoded` but for the rounding of fp32, in less time: for scores."""
        return latents.float() @ self.decode + self.mean


def of_keys(
    basis: Basis, rank: int, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS
) -> Projection:
    """The projection of the keys of a layer.

    Args:
        basis: The directions.
        rank: How many of them there are for each head on average, so that a group of g heads has r = g `rank`.
        layer_idx: Index of the layer.
        device: Device of the tensors.
        heads: Which KV heads to return.

    Raises:
        KVPolicyError: If the calibration is missing, damaged, or lacks this layer, key space or group of heads; or the
            heads are not whole groups.
    """
    groups = _groups(heads, basis.group)
    part = _joint(key_dictionary(basis.key_space), basis.group)
    mean, directions = (_tensor(basis.folder, f"{part}.{what}", layer_idx, groups) for what in ("mean", "basis"))
    components = orthonormal(directions)
    rank *= basis.group
    if basis.kind == "keys":
        return _projection(basis, mean, components[..., :rank], components[..., :rank].mT, device)
    variance = _tensor(basis.folder, f"{part}.energy", layer_idx, groups)
    moments = _query_moments(basis, layer_idx, heads)
    return _projection(basis, mean, *score_optimal(components, variance, *moments, rank), device)


def of_values(
    basis: Basis, rank: int, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS
) -> Projection:
    """The projection of the values of a layer onto the directions in which they vary most; see `of_keys`."""
    groups = _groups(heads, basis.group)
    part = _joint("values", basis.group)
    mean, directions = (_tensor(basis.folder, f"{part}.{what}", layer_idx, groups) for what in ("mean", "basis"))
    components = orthonormal(directions)[..., : rank * basis.group]
    return _projection(basis, mean, components, components.mT, device)


def energies(basis: Basis, layer_idx: int) -> tuple[Tensor, Tensor]:
    """Loss of the keys and of the values of a layer without each direction, [H, D] fp64 each, falling.

    Of keys for `scores`, it is lost of their products with queries.

    Raises:
        KVPolicyError: As `of_keys`.
    """
    part = _joint(key_dictionary(basis.key_space), basis.group)
    variance = _tensor(basis.folder, f"{part}.energy", layer_idx)
    of_values = _tensor(basis.folder, f"{_joint('values', basis.group)}.energy", layer_idx).double()
    if basis.kind == "keys":
        return variance.double(), of_values
    components = orthonormal(_tensor(basis.folder, f"{part}.basis", layer_idx))
    moments = _query_moments(basis, layer_idx, ALL_HEADS)
    of_scores, _, _ = weighted_components(components, variance, *moments)
    return of_scores.clamp_min(0), of_values


def fisher_of(folder: str, layer_idx: int) -> tuple[float, float]:
    """The Fisher information of the keys and of the values of a layer: their mean squared gradient.

    Raises:
        KVPolicyError: If the calibration has none.
    """
    found = _files.load(folder, "lowrank").tensors.get(f"fisher.{layer_idx}")
    if found is None:
        raise KVPolicyError(
            f"The calibration {folder!r} must contain the Fisher information of layer {layer_idx} for ranks=fisher, "
            "got none; try kvpolicy calibrate lowrank --fisher, or ranks=energy."
        )
    return float(found[0]), float(found[1])


def shape_of(basis: Basis, layer_idx: int) -> tuple[int, int]:
    """The KV heads of a layer, or 1 if they share a basis, and the dimension of a key; nothing is decomposed.

    Raises:
        KVPolicyError: As `of_keys` and `of_values`.
    """
    keys = [_tensor(basis.folder, name, layer_idx) for name in _names(basis)]
    for what in ("mean", "basis"):
        _tensor(basis.folder, f"{_joint('values', basis.group)}.{what}", layer_idx)
    if basis.group == 1:
        return keys[1].shape[0], keys[1].shape[-1]
    return keys[1].shape[0] * basis.group, keys[1].shape[-1] // basis.group


def _joint(part: str, group: int) -> str:
    """The name of what was calibrated of a part, such as `values`, for heads in groups."""
    return part if group == 1 else f"{part}.joint{group}"


def _groups(heads: slice, group: int) -> slice:
    """The groups that a rank's heads are.

    Raises:
        KVPolicyError: If the rank has a part of a group.
    """
    if group == 1 or heads == ALL_HEADS:
        return heads
    if heads.start % group or heads.stop % group:
        raise KVPolicyError(
            f"LowRank.head_group must divide the KV heads of every rank, got {group} for the heads {heads.start} to "
            f"{heads.stop - 1} of a rank; try head_group={math.gcd(heads.start or heads.stop, heads.stop)}."
        )
    return slice(heads.start // group, heads.stop // group)


def _query_moments(basis: Basis, layer_idx: int, heads: slice) -> tuple[Tensor, Tensor]:
    """Principal components of queries as columns, fp64, and the mean square along them, of each group of heads.

    The products of the heads of a group are independent of each other, so that the components are those of each head.
    """
    directions, energy = (_tensor(basis.folder, f"queries.{what}", layer_idx, heads) for what in ("basis", "energy"))
    each = orthonormal(directions)
    if basis.group == 1:
        return each, energy
    if len(each) == 1:  # one of all heads
        each, energy = (t.expand(basis.group, *t.shape[1:]) for t in (each, energy))
    blocks = [torch.block_diag(*block) for block in each.split(basis.group)]
    return torch.stack(blocks), energy.unflatten(0, (-1, basis.group)).flatten(1)


def _names(basis: Basis) -> tuple[str, ...]:
    """The tensors that the projection of keys is made of."""
    part = _joint(key_dictionary(basis.key_space), basis.group)
    of_queries = () if basis.kind == "keys" else (f"{part}.energy", "queries.basis", "queries.energy")
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
    _, encode, decode = weighted_components(components, variance, queries, energy)
    return encode[..., :rank], decode[..., :rank, :]


def weighted_components(
    components: Tensor, variance: Tensor, queries: Tensor, energy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """All directions of `score_optimal`, after what the products lose without each of them, [H, D] fp64, falling."""
    energy = energy.double().clamp_min(LEAST_ENERGY * energy.amax(-1, keepdim=True).double().clamp_min(1e-30))
    root = (queries * energy.sqrt()[:, None]) @ queries.mT
    inverse = (queries * energy.rsqrt()[:, None]) @ queries.mT
    covariance = (components * variance.double()[:, None]) @ components.mT
    lost, directions = torch.linalg.eigh(root @ covariance @ root)
    weighted = directions.flip(-1)
    return lost.flip(-1), root @ weighted, weighted.mT @ inverse


def _projection(basis: Basis, mean: Tensor, encode: Tensor, decode: Tensor, device: torch.device | str) -> Projection:
    """The projection of each head, from the vectors and directions [H / g, g D, ...] of groups of heads."""
    mean = mean[:, None]
    if basis.group > 1:
        mean = mean.unflatten(-1, (basis.group, -1)).transpose(1, 2).flatten(0, 1)
        encode = encode.unflatten(1, (basis.group, -1)).flatten(0, 1)
        decode = decode.unflatten(-1, (basis.group, -1)).transpose(1, 2).flatten(0, 1)
    return Projection(*(t.float()[None].contiguous().to(device) for t in (mean, encode, decode)))


def _option(name: str) -> str:
    """How a calibration gets a tensor of this name."""
    _, joint, rest = name.partition(".joint")
    return f"--head-groups {rest.partition('.')[0]}" if joint else "all key spaces"


def _tensor(folder: str, name: str, layer_idx: int, heads: slice = ALL_HEADS) -> Tensor:
    """A calibrated tensor of these heads; one that all heads share is [1, ...]."""
    found = _files.layer_tensor(folder, "lowrank", name, layer_idx, _option(name))
    return found if len(found) == 1 else found[heads]
