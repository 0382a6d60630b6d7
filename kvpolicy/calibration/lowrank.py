"""Bases for a model: the directions in which its keys and values vary most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from kvpolicy.calibration.corpus import as_windows
from kvpolicy.calibration.listener import Sums, check_finite, listening
from kvpolicy.calibration.run import Run
from kvpolicy.calibration.samples import fisher_information
from kvpolicy.calibration.suitable import check_sizes, check_unrotated
from kvpolicy.protocols import View
from kvpolicy.statistics import ModuleCall, Results, UnrotatedKeys, Vectors


class Moments(NamedTuple):
    """First and second moments of vectors of each KV head, or of each group of heads, fp64.

    Attributes:
        mean: [H, D].
        product: Mean of the outer products, [H, D, D].
    """

    mean: Tensor
    product: Tensor


def find_bases(
    run: Run, key_spaces: Sequence[str], groups: Sequence[int], *, fisher: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file by name, and what it says of them besides; see `calibrate_lowrank`."""
    unrotated = "unrotated" in key_spaces
    if unrotated:
        check_unrotated(run.model, "unrotated keys", "try rotated ones alone, which the reader loki takes")
    if fisher:
        check_sizes(run.model, "lowrank by Fisher information")
    tensors: dict[str, Tensor] = {}
    information = fisher_information(run.model, run.windows, progress=run.progress) if fisher else {}
    for layer, both in information.items():
        tensors[f"fisher.{layer}"] = torch.tensor(both, dtype=torch.float32, device="cpu")
    moments = collect_moments(run.model, run.windows, unrotated=unrotated, groups=groups, progress=run.progress)
    unwanted = ("keys.post", "queries") if "rotated" not in key_spaces else ()
    shares: dict[str, list[float]] = {}
    for layer, parts in run.bar(moments.items(), "bases"):
        for part in sorted(part for part in parts if not part.startswith(unwanted)):
            own = parts[part]
            found = basis_of(own, centered=part != "queries")
            tensors |= {f"{part}.{what}.{layer}": t for what, t in found.items()}
            energy = found["energy"].double()
            first = energy[:, : -(-energy.shape[-1] // 4)].sum(-1) / energy.sum(-1).clamp_min(1e-30)
            if part in ("keys.pre", "keys.post", "values"):
                shares.setdefault(part, []).append(float(first.mean()))
    return tensors, {"energy": {part: round(sum(own) / len(own), 4) for part, own in sorted(shares.items())}}


def basis_of(moments: Moments, centered: bool = True) -> dict[str, Tensor]:
    """The principal components of the vectors of each head.

    Args:
        moments: Of the vectors.
        centered: Whether the mean is subtracted first.

    Returns:
        `mean` [H, D] fp32, if centered; `basis` [H, D, D] fp16, whose columns are directions of falling `energy`, the
        variance along them, [H, D] fp32.

    Examples:
        >>> moments = Moments(torch.zeros(1, 2).double(), torch.diag(torch.tensor([1.0, 4.0])).double()[None])
        >>> basis_of(moments)["energy"], basis_of(moments)["basis"].abs().tolist()
        (tensor([[4., 1.]]), [[[0.0, 1.0], [1.0, 0.0]]])
    """
    product = moments.product
    if centered:
        product = product - moments.mean[:, :, None] * moments.mean[:, None]
    energy, basis = torch.linalg.eigh(product)
    found = {"basis": basis.flip(-1).half(), "energy": energy.flip(-1).clamp_min(0).float()}
    return found | ({"mean": moments.mean.float()} if centered else {})


def collect_moments(
    model: nn.Module,
    windows: Sequence[Tensor],
    *,
    unrotated: bool = True,
    groups: Sequence[int] = (),
    progress: bool = False,
) -> dict[int, dict[str, Moments]]:
    """Run windows of tokens through a model once, and add up the moments of keys, values and queries.

    Args:
        model: A causal language model without a policy attached.
        windows: Token ids, each [n] or [1, n].
        unrotated: Whether to also take keys without the rotary embedding.
        groups: Of how many KV heads moments are added up together too: of g heads, their vectors are one of g D
            channels, and the part has `.joint` and g behind its name.
        progress: Whether to show a progress bar.

    Returns:
        By the index of the layer and by part, moments on the CPU: `keys.post` of keys as attention sees them,
        `keys.pre` of unrotated keys, `values`, and `queries` of all query heads of a KV head together.

    Raises:
        KVPolicyTypeError: If the windows are not token ids.
        KVPolicyError: If the model is not supported, has a policy attached, or produces numbers that are not finite.
    """
    total: dict[int, dict[str, Sums]] = {}

    def look(seen: Results, view: View) -> None:
        queries = seen[ModuleCall].queries
        assert queries is not None
        tokens = seen[Vectors]
        heads = tokens.keys.shape[1]
        queries = queries[0].unflatten(0, (heads, -1)).flatten(1, 2)
        # Vectors [H, N, D] of each part, and joint ones of neighboring heads, [H / g, N, g D].
        parts = {"keys.post": tokens.keys[0], "values": tokens.values[0]}
        if unrotated:
            parts["keys.pre"] = seen[UnrotatedKeys][0]
        parts |= {
            f"{part}.joint{group}": x.unflatten(0, (-1, group)).transpose(1, 2).flatten(2)
            for part, x in parts.items()
            for group in groups
        }
        parts["queries"] = queries
        own = total.setdefault(view.layer_idx, {})
        # In fp64: covariances are differences of sums over all windows.
        for part, vectors in parts.items():
            x = vectors.double()
            own.setdefault(part, Sums()).add(x.shape[1], x.sum(1).cpu(), (x.mT @ x).cpu())

    asks = (ModuleCall(), Vectors(), *((UnrotatedKeys(),) if unrotated else ()))
    with listening(model, asks, look) as run:
        for ids in tqdm(as_windows(windows), desc="moments", disable=not progress):
            run(ids)
    # A number that is not finite is named by its layer before the mean would spread it.
    found: dict[int, dict[str, Moments]] = {}
    for layer, parts in sorted(total.items()):
        for part, sums in parts.items():
            check_finite("collected numbers", f"{part} of layer {layer}", *sums.total)
            found.setdefault(layer, {})[part] = Moments(*sums.means())
    return found
