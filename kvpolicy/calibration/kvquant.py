"""The calibration of KVQuant for one layer: the range of each key channel, and non-uniform levels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvpolicy.calibration.run import Run
from kvpolicy.calibration.samples import collect
from kvpolicy.calibration.suitable import check_sizes
from kvpolicy.codecs.kvquant import nearest, normalize_values, outlier_count

SAMPLE = 50_000
"""The maximum number of elements that levels are fitted to."""


def fit_kvquant(
    keys: Tensor,
    values: Tensor,
    *,
    bits: tuple[int, ...] = (2, 3, 4),
    weights: Tensor | None = None,
    outliers: float = 0.01,
) -> dict[str, Tensor]:
    """Fit ranges and levels to the keys and values of a layer.

    The range of a key channel spans from its percentile 100 * outliers / 2 to the symmetric one at the top. Levels are
    the centers of a weighted k-means of the elements inside the ranges, on a fixed sample. Q-Norm is the scale and
    shift that give the levels of the sample the mean and standard deviation of the sample.

    Args:
        keys: [H, n, D] fp32, without the rotary embedding, n at least 1.
        values: [H, n, D] fp32.
        bits: The bits per code to fit levels for.
        weights: The weight of the error of each element of keys and values, [2, H, n, D], at least 0; None for equal
            weights. The paper uses Fisher information, the squared gradient of the loss, which this function does not
            compute.
        outliers: Fraction of the elements of a vector that are stored in full, as in `KVQuant`.

    Returns:
        `keys.offset` and `keys.range` [H, D]; for keys and values and each number of bits, such as 3, `keys.levels.b3`
        [8], ascending, and `keys.norm.b3` [2], scale and shift. All fp32.

    Examples:
        >>> fitted = fit_kvquant(torch.randn(2, 100, 8), torch.randn(2, 100, 8), bits=(2,))
        >>> sorted(fitted)
        ['keys.levels.b2', 'keys.norm.b2', 'keys.offset', 'keys.range', 'values.levels.b2', 'values.norm.b2']

    Source: KVQuant (arXiv:2401.18079), unverified in full.
    Differences: weights are equal unless given. Levels of values are fitted to values as the codec normalizes them. The
    k-means is that of scikit-learn, starts from quantiles and uses at most 50 000 elements. Q-Norm has one scale and
    shift for the keys of a layer, and one for its values.
    """
    keys = keys.float()
    values = values.float()
    low = _percentile(keys, outliers / 2)
    high = _percentile(keys, 1 - outliers / 2)
    offset = (high + low) / 2
    range_ = ((high - low) / 2).clamp(min=1e-6)
    normalized_keys = (keys - offset[:, None]) / range_[:, None]
    normalized_values, _, _, places = normalize_values(values, outlier_count(outliers, values.shape[-1]))
    is_inlier = torch.ones_like(values, dtype=torch.bool).scatter(-1, places, False)
    fitted = {"keys.offset": offset, "keys.range": range_}
    # Outliers are stored in full, so levels need not cover them.
    sides = {"keys": (normalized_keys, normalized_keys.abs() <= 1), "values": (normalized_values, is_inlier)}
    for which, (side, (normalized, inside)) in enumerate(sides.items()):
        weight = torch.ones_like(normalized) if weights is None else weights[which].float()
        sample, sample_weight = _sample(normalized[inside], weight[inside])
        for width in bits:
            levels = _levels(sample, sample_weight, 2**width)
            fitted[f"{side}.levels.b{width}"] = levels
            fitted[f"{side}.norm.b{width}"] = _norm(sample, sample_weight, levels)
    return fitted


def fit_layers(
    run: Run, bits: tuple[int, ...], outliers: float, tokens: int, *, fisher: bool, seed: int
) -> dict[str, Tensor]:
    """The tensors of all layers, by their names in the file; see `calibrate_kvquant`."""
    check_sizes(run.model, "kvquant")
    found = collect(
        run.model,
        run.windows,
        tokens=tokens,
        key_spaces=("unrotated",),
        fisher=fisher,
        seed=seed,
        progress=run.progress,
    )
    tensors: dict[str, Tensor] = {}
    for layer, keys in run.bar(found.unrotated.items(), "fit"):
        weights = found.fisher.get(layer)
        fitted = fit_kvquant(keys, found.values[layer], bits=bits, weights=weights, outliers=outliers)
        tensors |= {f"{key}.{layer}": tensor for key, tensor in fitted.items()}
    return tensors


def _percentile(x: Tensor, fraction: float) -> Tensor:
    """The quantile of each channel of `x` [H, n, D], linearly interpolated; [H, D]."""
    # `torch.quantile` refuses large inputs.
    position = fraction * (x.shape[1] - 1)
    below = math.floor(position)
    neighbors = x.sort(1).values[:, [below, min(below + 1, x.shape[1] - 1)]]
    return torch.lerp(neighbors[:, 0], neighbors[:, 1], position - below)


def _sample(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A fixed sample of at most `SAMPLE` elements and their weights, which are equal if none is positive."""
    if len(x) > SAMPLE:  # random, because regular steps would hit the same channels
        sample = torch.randint(len(x), (SAMPLE,), generator=torch.Generator().manual_seed(0), device="cpu")
        x = x[sample]
        weight = weight[sample]
    return x, weight if weight.sum() > 0 else torch.ones_like(weight)


def _levels(x: Tensor, weight: Tensor, count: int) -> Tensor:
    """Centers of a weighted k-means, [count] ascending; the last is repeated if there are fewer distinct numbers."""
    distinct, which = x.unique(return_inverse=True)
    mass = torch.zeros(len(distinct), dtype=torch.float64, device="cpu").index_add_(0, which, weight.double())
    has_mass = mass > 0
    distinct = distinct[has_mass]
    mass = mass[has_mass]
    if len(distinct) <= count:
        return torch.cat([distinct, distinct[-1:].expand(count - len(distinct))])
    from sklearn.cluster import KMeans

    # Start from the quantiles of the distribution. If several of them fall on one number, they are moved apart, because
    # k-means needs distinct centers.
    cumulative = mass.cumsum(0) / mass.sum()
    step = torch.arange(count, device="cpu")
    ranks = torch.searchsorted(cumulative, (step + 0.5).double() / count)
    ranks = ((ranks - step).cummax(0).values.clamp(max=len(distinct) - count) + step).tolist()
    numbers = distinct[:, None].double().numpy()
    means = KMeans(count, init=numbers[ranks], n_init=1)  # pyright: ignore[reportArgumentType]
    means.fit(numbers, sample_weight=mass.numpy())
    return torch.from_numpy(means.cluster_centers_[:, 0]).float().sort().values


def _norm(x: Tensor, weight: Tensor, levels: Tensor) -> Tensor:
    """Scale and shift, [2], that give the levels of a sample its weighted mean and standard deviation."""
    decoded = levels[nearest(x, levels).long()].double()
    mass = (weight / weight.sum()).double()
    mean = (x * mass).sum()
    deviation = ((x - mean) ** 2 * mass).sum().sqrt()
    decoded_mean = (decoded * mass).sum()
    decoded_deviation = ((decoded - decoded_mean) ** 2 * mass).sum().sqrt()
    # If all elements are decoded to one number, no scale gives them a deviation.
    scale = torch.where(decoded_deviation > 1e-6, deviation / decoded_deviation.clamp(min=1e-6), 1)
    return torch.stack([scale, mean - decoded_mean * scale]).float()
