"""What KVQuant must know of a layer: the range of each key channel, and levels where numbers are dense."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvpolicy.codecs.kvquant import nearest, normalise_values, outlier_count

SAMPLE = 50_000
"""The most numbers that levels are fitted to."""


def fit_kvquant(
    keys: Tensor,
    values: Tensor,
    *,
    bits: tuple[int, ...] = (2, 3, 4),
    weights: Tensor | None = None,
    outliers: float = 0.01,
) -> dict[str, Tensor]:
    """Fit one layer.

    The range of a key channel is from its percentile 100 * outliers / 2 to the one as far from the top. Levels are the
    centres of a weighted k-means of what lies inside the ranges, on a fixed sample. Q-Norm is the scale and shift after
    which the sample's levels have the mean and the deviation of the sample itself.

    Args:
        keys: [H, n, D] fp32, without the rotary embedding, n at least 1.
        values: [H, n, D] fp32.
        bits: For which widths of codes to fit levels.
        weights: How much each number's error matters, [2, H, n, D] of keys and values, at least 0; None for all alike.
            The paper takes Fisher information, the squared gradient of the loss, which this function cannot see.
        outliers: Share of numbers that will be kept exact, as in `KVQuant`.

    Returns:
        `keys.offset` and `keys.range` [H, D]; for keys and values and each width, such as 3, `keys.levels.b3` [8],
        ascending, and `keys.norm.b3` [2], scale and shift. All fp32.

    Examples:
        >>> fitted = fit_kvquant(torch.randn(2, 100, 8), torch.randn(2, 100, 8), bits=(2,))
        >>> sorted(fitted)
        ['keys.levels.b2', 'keys.norm.b2', 'keys.offset', 'keys.range', 'values.levels.b2', 'values.norm.b2']

    Source: KVQuant (arXiv:2401.18079), unverified in full.
    Differences: weights are uniform unless given. Levels of values are fitted to them as the codec normalises them. The
    k-means is scikit-learn's, starts at quantiles and sees at most 50 000 numbers. Q-Norm has one scale and shift for a
    layer and side.
    """
    keys, values = keys.float(), values.float()
    low, high = _percentile(keys, outliers / 2), _percentile(keys, 1 - outliers / 2)
    offset, range_ = (high + low) / 2, ((high - low) / 2).clamp(min=1e-6)
    inner_keys = (keys - offset[:, None]) / range_[:, None]
    inner_values, _, _, places = normalise_values(values, outlier_count(outliers, values.shape[-1]))
    kept = torch.ones_like(values, dtype=torch.bool).scatter(-1, places, False)
    fitted = {"keys.offset": offset, "keys.range": range_}
    sides = {"keys": (inner_keys, inner_keys.abs() <= 1), "values": (inner_values, kept)}
    for which, (side, (inner, dense)) in enumerate(sides.items()):
        weight = torch.ones_like(inner) if weights is None else weights[which].float()
        sample, heavy = _sample(inner[dense], weight[dense])
        for width in bits:
            levels = _levels(sample, heavy, 2**width)
            fitted[f"{side}.levels.b{width}"] = levels
            fitted[f"{side}.norm.b{width}"] = _norm(sample, heavy, levels)
    return fitted


def _percentile(x: Tensor, share: float) -> Tensor:
    """The number of each channel of `x` [H, n, D] below which a share of it lies, between neighbours; [H, D]."""
    place = share * (x.shape[1] - 1)
    below = math.floor(place)
    some = x.sort(1).values[:, [below, min(below + 1, x.shape[1] - 1)]]
    return torch.lerp(some[:, 0], some[:, 1], place - below)


def _sample(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """At most `SAMPLE` numbers, always the same, and their weights; all alike where no weight is positive."""
    if len(x) > SAMPLE:  # drawn: regular steps would meet the same channels
        some = torch.randint(len(x), (SAMPLE,), generator=torch.Generator().manual_seed(0))
        x, weight = x[some], weight[some]
    return x, weight if weight.sum() > 0 else torch.ones_like(weight)


def _levels(x: Tensor, weight: Tensor, count: int) -> Tensor:
    """Centres of a weighted k-means, [count] ascending; the last repeated where there are fewer numbers."""
    distinct, which = x.unique(return_inverse=True)
    mass = torch.zeros(len(distinct), dtype=torch.float64).index_add_(0, which, weight.double())
    distinct, mass = distinct[mass > 0], mass[mass > 0]
    if len(distinct) <= count:
        return torch.cat([distinct, distinct[-1:].expand(count - len(distinct))])
    from sklearn.cluster import KMeans

    share, step = mass.cumsum(0) / mass.sum(), torch.arange(count)
    ranks = torch.searchsorted(share, (step + 0.5).double() / count)
    ranks = ((ranks - step).cummax(0).values.clamp(max=len(distinct) - count) + step).tolist()  # no two alike
    numbers = distinct[:, None].double().numpy()
    means = KMeans(count, init=numbers[ranks], n_init=1)  # pyright: ignore[reportArgumentType]
    means.fit(numbers, sample_weight=mass.numpy())
    return torch.from_numpy(means.cluster_centers_[:, 0]).float().sort().values


def _norm(x: Tensor, weight: Tensor, levels: Tensor) -> Tensor:
    """Scale and shift that give the sample's levels its mean and deviation, [2]."""
    read, share = levels[nearest(x, levels).long()].double(), (weight / weight.sum()).double()
    mean, read_mean = (x * share).sum(), (read * share).sum()
    deviation, read_deviation = (((x - mean) ** 2 * share).sum().sqrt(), ((read - read_mean) ** 2 * share).sum().sqrt())
    scale = torch.where(read_deviation > 1e-6, deviation / read_deviation.clamp(min=1e-6), 1)
    return torch.stack([scale, mean - read_mean * scale]).float()
