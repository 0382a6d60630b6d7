"""Rotations for a model: the directions of its queries, and those of its values by how much they are attended to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from kvpolicy.calibration.corpus import as_windows
from kvpolicy.calibration.listener import Sums, check_finite, listening
from kvpolicy.calibration.run import Run
from kvpolicy.calibration.suitable import check_sizes
from kvpolicy.codecs.rotation import mixing
from kvpolicy.protocols import View
from kvpolicy.statistics import ModuleCall, Results, Vectors


def find_rotations(run: Run, *, shared: bool) -> dict[str, Tensor]:
    """The tensors of all layers, by their names in the file; see `calibrate_oscar`."""
    check_sizes(run.model, "oscar")
    tensors: dict[str, Tensor] = {}
    for layer, (queries, values) in collect_covariances(run.model, run.windows, progress=run.progress).items():
        for side, covariance in (("keys", queries), ("values", values)):
            own = covariance.mean(0, keepdim=True) if shared else covariance
            tensors[f"{side}.rotation.{layer}"] = rotation_of(own)
    return tensors


def rotation_of(covariance: Tensor) -> Tensor:
    """The rotation R = U H P of vectors of this covariance, [H, D, D] fp32, which they are multiplied by.

    U has the eigenvectors in its columns, by ascending eigenvalue. H is the orthonormal Hadamard matrix, which spreads
    each of them over all channels. P permutes channels: with the eigenvalues in falling order, that of rank i has the
    channel whose number has the bits of i in reverse.

    Args:
        covariance: Symmetric, [H, D, D] fp64.

    Examples:
        >>> rotation = rotation_of(torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0]).double())[None])
        >>> (rotation @ rotation.mT).round().tolist() == torch.eye(4)[None].tolist()
        True

    Source:
        OSCAR (arXiv:2605.17757), and `compute_kv_rotation.py` of its authors, with the composition `r_h_pbr`, its
        default. Difference: a dimension that is not a power of two is spread by a Hadamard matrix and a cosine
        transform, and its channels stay in their order.
    """
    dim = covariance.shape[-1]
    vectors = torch.linalg.eigh((covariance + covariance.mT) / 2).eigenvectors
    # Its rows are those of the transposed transform, so that a vector is multiplied from the left.
    spread = mixing(dim, None, covariance.device).double().T
    return (vectors @ spread)[..., _channels(dim)].float()


def _channels(dim: int) -> Tensor:
    """The channel that stands at each place: the i-th largest eigenvalue, D - 1 - i, at the place of reversed bits."""
    if dim & (dim - 1):
        return torch.arange(dim, device="cpu")
    bits = dim.bit_length() - 1
    place = torch.tensor([int(f"{number:0{bits}b}"[::-1], 2) if bits else 0 for number in range(dim)], device="cpu")
    return torch.empty_like(place).index_put((place,), torch.arange(dim - 1, -1, -1, device="cpu"))


def collect_covariances(
    model: nn.Module, windows: Sequence[Tensor], *, progress: bool = False
) -> dict[int, tuple[Tensor, Tensor]]:
    """Run windows of tokens through a model twice, and add up the moments of queries, and those of weighted values.

    The weight of a value is its key's mean squared product with the queries, over the mean weight of its head.

    Args:
        model: A causal language model without a policy attached.
        windows: Token ids, each [n] or [1, n].
        progress: Whether to show a progress bar.

    Returns:
        By the index of the layer, the mean outer product of the queries of each KV head, those of all its query heads
        together, and that of its weighted values, [H, D, D] fp64 each.

    Raises:
        KVPolicyTypeError: If the windows are not token ids.
        KVPolicyError: If the model is not supported, has a policy attached, or produces numbers that are not finite.
    """
    windows = as_windows(windows)
    queries: dict[int, Sums] = {}
    values: dict[int, Sums] = {}

    def look_at_queries(seen: Results, view: View) -> None:
        found = seen[ModuleCall].queries
        assert found is not None
        heads = seen[Vectors].keys.shape[1]
        x = found[0].unflatten(0, (heads, -1)).flatten(1, 2).double()
        queries.setdefault(view.layer_idx, Sums()).add(x.shape[1], (x.mT @ x).cpu())

    def look_at_values(seen: Results, view: View) -> None:
        tokens = seen[Vectors]
        keys = tokens.keys[0].double()
        x = tokens.values[0].double()
        moment = means[view.layer_idx].to(keys.device)
        weight = ((keys @ moment) * keys).sum(-1, keepdim=True)
        values.setdefault(view.layer_idx, Sums()).add(1, (x.mT @ (x * weight)).cpu(), weight.sum(1).cpu())

    asks = (ModuleCall(), Vectors())
    means: dict[int, Tensor] = {}
    for what, look in (("queries", look_at_queries), ("values", look_at_values)):
        with listening(model, asks, look) as run:
            for ids in tqdm(windows, desc=what, disable=not progress):
                run(ids)
        if what == "queries":
            for layer, sums in queries.items():
                check_finite("collected numbers", f"queries of layer {layer}", *sums.total)
                means[layer] = sums.means()[0]
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for layer, sums in sorted(values.items()):
        check_finite("collected numbers", f"values of layer {layer}", *sums.total)
        product, weight = sums.total
        found[layer] = means[layer], product / weight.clamp_min(1e-12)[..., None]
    return found
