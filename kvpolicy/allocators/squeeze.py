"""SqueezeAttention: less budget for layers whose attention changes its input little."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvpolicy.allocators.profile import load_profile
from kvpolicy.protocols import Allocator, Guarantee, HeadAllocator, LayerBounds, ModelInfo
from kvpolicy.text.budget import waterfill
from kvpolicy.text.strategy import fraction, least, strategy

_SAME = 1e-6
"""Cosines that differ by less than this count as equal."""

_RELATIVE_TIE = 1e-9
"""Costs that differ by less than this, relative to the cost of a single group, count as equal."""

_ROUNDING = 1e-24
"""So do costs that differ by less than this, relative to the squared values: about the rounding error of fp64."""


@strategy
class SqueezeAttention(Allocator):
    """Move budget away from layers whose attention barely changes its input.

    The metric of a layer is the cosine between the residual stream before and after its attention, averaged over the
    prompt. Layers are clustered into `groups` by this metric. The layers of the group with the highest cosine keep the
    fraction `keep_share` of the average budget, and the others divide the rest equally. The total does not change.

    Args:
        keep_share: The fraction of the average budget that the layers with the highest cosine keep, in (0, 1].
        groups: The number of groups, at least 2.
        profile: A file of stored cosines (see `save_profile`). With it nothing is measured, and each layer is
            compressed as soon as it has run; without it, all layers of the prompt run first.
        heads: How the budget of a layer is divided among its KV heads; None for the same budget in every head.

    Examples:
        >>> cosine = torch.tensor([[0.5, 0.7, 0.95, 0.96, 0.97]])
        >>> SqueezeAttention().budgets(cosine, torch.tensor([500]), 1, torch.tensor([1000]), 5).tolist()
        [[190, 190, 40, 40, 40]]

    Source:
        SqueezeAttention (arXiv:2404.04793), Algorithm 1. Differences from the paper and its code:

        - `keep_share` is the fraction that is kept, as in Algorithm 1 (the paper's discussion says the opposite, and
          the code has another parameter, of which the README has a setting close to 0.4);
        - there are three groups, as in text and code (an abstract of the paper has two);
        - the k-means is exact and has no seed (there, scikit-learn's without one, so that runs differ);
        - the cosine and its mean are fp32, over the tokens of the row without padding (there, bf16, of the first row);
        - every row has its own budgets; what a layer cannot use goes to the other layers in proportion; rounding
          preserves the total;
        - attention covers the whole prompt, as in the paper (the code for Mistral windows it by the budgets of the
          previous prompt);
        - the prompt is compressed at the end of its prefill, not at the first decode step;
        - any selector works (the paper has H2O, a window and StreamingLLM, the code the last two);
        - with fewer than three layers, or fewer distinct cosines than groups, all layers get the same budget.
    """

    ALIASES: ClassVar[dict[str, str]] = {"share": "keep_share"}

    keep_share: float = fraction(0.4)
    groups: int = least(2, 3)
    profile: str | None = None
    heads: HeadAllocator | None = None

    @property
    def layer_metric(self) -> Literal["", "cosine"]:
        """The attention cosine, unless there is a profile."""
        return "" if self.profile else "cosine"

    def stored(self, layers: int) -> Tensor | None:
        """The cosines of the profile, of a model with so many layers, [1, L] fp32; None without a profile.

        Raises:
            KVPolicyError: If the profile cannot be read, or is of a model with another number of layers.
        """
        if not self.profile:
            return None
        return torch.tensor([load_profile(self.profile, layers)], dtype=torch.float32, device="cpu")

    def check(self, model: ModelInfo) -> None:
        """Read the profile, which must be of a model with as many layers."""
        self.stored(model.layers)

    def budgets(self, metrics: Tensor | None, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Tensor:
        """Tokens per layer and row, [B, L] int64; see `Allocator.budgets`.

        Raises:
            KVPolicyError: If the profile cannot be read, or is of a model with another number of layers.
        """
        if metrics is None:
            metrics = self.stored(layers)
        assert metrics is not None, "squeeze requests the cosine of every layer"
        # By row, so that the budgets of a row do not depend on the rows beside it.
        is_squeezed = torch.stack([self._squeezed(row) for row in metrics.float().cpu()])
        is_squeezed = is_squeezed.to(total.device).expand(len(total), -1)
        average = total.double()[:, None] / layers
        kept = torch.where(is_squeezed.any(-1, keepdim=True), self.keep_share * average, average)
        count = is_squeezed.sum(-1, keepdim=True)
        # Not a division by 0, since every other group has at least one layer.
        rest = (total[:, None] - count * kept) / (layers - count)
        return waterfill(torch.where(is_squeezed, kept, rest), total, floor, ceiling)

    def bounds(
        self, metrics: Tensor, total: Tensor, floor: int, ceiling: Tensor, layers: int, queries: int
    ) -> LayerBounds:
        cosine = metrics.double().to(total.device)
        # A layer that shares the rest has it in common with every layer of the same cosine or a lower one.
        sharers = (cosine[:, None] <= cosine[:, :, None]).sum(-1)
        most = self._most(sharers, total, ceiling, layers)
        return LayerBounds(self.guarantee(total, floor, ceiling, layers).least[:, None].expand_as(most), most)

    def guarantee(self, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Guarantee:
        least = (self.keep_share * total.double() / layers).floor().long() - 1
        sharers = torch.arange(1, layers + 1, device=total.device).expand(len(total), -1)
        return Guarantee(least.clamp_min(floor), self._most(sharers, total, ceiling, layers).sum(-1))

    def _most(self, sharers: Tensor, total: Tensor, ceiling: Tensor, layers: int) -> Tensor:
        """The most tokens of layers that have the rest in common with at least `sharers` layers, [B, K]."""
        sharers = sharers.clamp_min(self.groups - 1).clamp_max(layers)  # of every group but that of the highest
        average = total.double()[:, None] / layers
        most = average * (self.keep_share + (1 - self.keep_share) * layers / sharers)
        usable = torch.maximum(ceiling.to(total.device), -(-total // layers))  # a surplus is divided evenly
        return (most.ceil().long() + 1).minimum(usable[:, None])

    def _squeezed(self, cosine: Tensor) -> Tensor:
        """The layers with a reduced budget, [L] bool, for the `cosine` [L] of one row."""
        distinct = 1 + int((cosine.sort().values.diff() > _SAME).sum())
        if len(cosine) < max(3, self.groups) or distinct < self.groups or not bool(cosine.isfinite().all()):
            return torch.zeros_like(cosine, dtype=torch.bool)
        return top_group(cosine, self.groups)


def top_group(values: Tensor, groups: int) -> Tensor:
    """Find the group of the highest values in the optimal division of `values` into `groups`.

    Groups of numbers that minimize the sum of squares within groups are contiguous in sorted order, so the optimum is
    found by dynamic programming. Among equally good divisions, the one with the largest top group is returned. Equal
    values stay together, unless there are fewer distinct ones than groups.

    Args:
        values: [L].
        groups: The number of groups, at least 2 and at most L.

    Returns:
        Whether each value is in the top group, [L] bool.

    >>> top_group(torch.tensor([0.1, 0.9, 0.5, 0.85]), 3).tolist()
    [False, True, False, True]
    """
    ranked, order = values.double().sort()
    cost = _costs(ranked)  # [L + 1, L + 1]
    # best[j] is the lowest cost of the first j values, here in one group, then in one more with each round: the last
    # group of the first j values starts at some i, and the first i values are divided optimally.
    best = cost[0]
    for _ in range(groups - 2):
        best = (best[:, None] + cost).amin(0)
    with_top_from = best + cost[:, -1]  # the cost if the top group starts at i
    tolerance = _RELATIVE_TIE * cost[0, -1] + _ROUNDING * ranked.square().amax()
    # The smallest start within the tolerance: without it, rounding would decide between equally good divisions.
    start = int((with_top_from <= with_top_from.amin() + tolerance).int().argmax())
    # Within the tolerance, it may start between equal values, which stay together.
    same = (ranked == ranked[start]).nonzero().flatten()
    if len(ranked.unique()) >= groups:
        start = int(same[0]) or int(same[-1]) + 1
    return torch.zeros_like(values, dtype=torch.bool).index_fill(0, order[start:], True)


def _costs(ranked: Tensor) -> Tensor:
    """The sum of squares within ranked[i:j] for every i < j, [L + 1, L + 1]; infinite if the group is empty."""
    edge = torch.arange(len(ranked) + 1, device=ranked.device)
    index = edge[:-1]
    inside = (index >= edge[:, None, None]) & (index < edge[:, None])  # [i, j, L]
    count = inside.sum(-1)
    mean = (inside * ranked).sum(-1) / count.clamp(min=1)
    # About the mean of each group, because differences of prefix sums would cancel. L is small.
    squares = (inside * (ranked - mean[..., None]) ** 2).sum(-1)
    return squares.masked_fill(count == 0, torch.inf)
