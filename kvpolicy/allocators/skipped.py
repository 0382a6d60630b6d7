"""Skipped layers: the first and the last layers keep every token, and another allocator divides what is left."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpolicy.allocators.uniform import Uniform
from kvpolicy.protocols import (
    Allocator,
    AttentionNeeds,
    BoundsBudgets,
    ChecksModel,
    Guarantee,
    HeadAllocator,
    LayerAttention,
    LayerBounds,
    MeasuresAttention,
    ModelInfo,
    heads_of,
)
from kvpolicy.protocols.allocator import LayerMetric
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.strategy import checked, least, strategy
from kvpolicy.text.validation import check_instance


def _stored(base: Allocator, layers: int) -> Tensor | None:
    """The metrics of all layers of the model, if an allocator has them in a file."""
    from kvpolicy.allocators.squeeze import SqueezeAttention  # here: every policy imports this module

    return base.stored(layers) if isinstance(base, SqueezeAttention) else None


def _check_base(name: str, base: object) -> None:
    """Refuse what is no allocator, or skips layers itself."""
    check_instance("allocator", base)
    if not isinstance(base, Allocator) or isinstance(base, SkippedLayers):
        raise KVPolicyError(f"{name} must be an allocator that skips no layers, got {base!r}; try Uniform().")


@strategy
class SkippedLayers(Allocator):
    """Keep every token of the first and last layers in full precision, and divide the rest by another allocator.

    In a spec, it is an option of every allocator: `uniform:skip=2-2` skips two layers at each end; `first:2,last:2`
    means the same. A codec does not encode the layers that are skipped.

    Args:
        base: The allocator of the other layers.
        first: How many of the first layers under the policy are skipped.
        last: How many of the last ones are skipped.

    Raises:
        KVPolicyError: If no layer is skipped; of a model, if none of its layers is left; later, if the budget cannot
            hold those that are skipped and the smallest budget of the others.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("uniform:skip=first:2,last:1+snapkv@0.5"))
        'uniform:skip=2-1+snapkv@0.5'
        >>> SkippedLayers(first=1, last=0).budgets(None, torch.tensor([40]), 1, torch.tensor([20]), 4).tolist()
        [[20, 7, 7, 6]]

    Source:
        our own wrapper, for what engines do: vLLM's `kv_cache_dtype_skip_layers`, and the first two layers of Quest
        (arXiv:2406.10774), which are dense. Differences:

        - Tokens of layers that are skipped count toward the budget, and the other layers divide what is left. Elsewhere
          they are in addition to it.
        - A layer that is skipped holds as many tokens as a budget of 1.0 would: those of the prompt, and generated ones
          as far as their number is known beforehand.
    """

    base: Allocator = checked(_check_base, Uniform)
    first: int = least(0, 2)
    last: int = least(0, 2)

    def __post_init__(self) -> None:
        if not self.first + self.last:
            raise KVPolicyError("The option skip must skip at least one layer, got none; try skip=2-2.")

    @property
    def heads(self) -> HeadAllocator | None:
        """The head allocator of the base."""
        return heads_of(self.base)

    @property
    def layer_metric(self) -> LayerMetric:
        """The metric of the base."""
        return self.base.layer_metric

    @property
    def attention(self) -> AttentionNeeds:
        """The needs of the base."""
        return self.base.attention if isinstance(self.base, MeasuresAttention) else AttentionNeeds()

    def measure(self, seen: LayerAttention) -> Tensor:
        """What the base measures."""
        assert isinstance(self.base, MeasuresAttention)  # only called for its metric
        return self.base.measure(seen)

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if no layer of a model is left, or the base cannot be used with it."""
        self._check_layers(model.layers)
        if isinstance(self.base, ChecksModel):
            self.base.check(model)

    def skipped(self, indices: Sequence[int]) -> tuple[int, ...]:
        """Which of these layers are skipped."""
        return (*indices[: self.first], *indices[len(indices) - self.last :])

    def budgets(self, metrics: Tensor | None, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Tensor:
        """Tokens per layer and row, [B, L] int64; see `Allocator.budgets`.

        Raises:
            KVPolicyError: If no layer is left, or the other layers would get less than their smallest budget.
        """
        own, rest = self._split(total, floor, ceiling, layers)
        if metrics is None:
            metrics = _stored(self.base, layers)
        left = None if metrics is None else metrics[:, self.first : layers - self.last]
        others = self.base.budgets(left, rest, floor, ceiling, layers - self.first - self.last)
        each = own[:, None].to(others.device)
        return torch.cat((each.expand(-1, self.first), others, each.expand(-1, self.last)), 1)

    def bounds(
        self, metrics: Tensor, total: Tensor, floor: int, ceiling: Tensor, layers: int, queries: int
    ) -> LayerBounds:
        """Those of the base for the layers that are not skipped; see `BoundsBudgets.bounds`."""
        own, rest = self._split(total, floor, ceiling, layers)
        left = layers - self.first - self.last
        measured = metrics[:, self.first : layers - self.last]
        if isinstance(self.base, BoundsBudgets) and measured.shape[1]:
            others = self.base.bounds(measured, rest, floor, ceiling, left, queries)
        else:  # nothing is known before all layers are measured, or none but skipped ones was
            most = torch.maximum(ceiling.to(rest.device), -(-rest // left))[:, None].expand(-1, measured.shape[1])
            others = LayerBounds(torch.full_like(most, floor), most)
        count = metrics.shape[1]
        sides = [own[:, None].expand(-1, size) for size in (min(self.first, count), max(count - layers + self.last, 0))]
        return LayerBounds(*(torch.cat((sides[0], each.to(own.device), sides[1]), 1) for each in others))

    def guarantee(self, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Guarantee:
        """That of the base, and the layers that are skipped; see `BoundsBudgets.guarantee`."""
        own, rest = self._split(total, floor, ceiling, layers)
        skips = self.first + self.last
        if isinstance(self.base, BoundsBudgets):
            others = self.base.guarantee(rest, floor, ceiling, layers - skips)
        else:
            most = torch.maximum(ceiling.to(rest.device), -(-rest // (layers - skips)))
            others = Guarantee(torch.full_like(rest, floor), most * (layers - skips))
        return Guarantee(others.least.minimum(own), others.together + skips * own)

    def _check_layers(self, layers: int) -> None:
        """Refuse to skip all layers."""
        if self.first + self.last >= layers:
            most = (layers - 1) // 2
            raise KVPolicyError(
                f"The option skip must leave at least one of the {layers} layers under the policy, got "
                f"skip={self.first}-{self.last}; try skip={min(self.first, most)}-{min(self.last, most)}."
            )

    def _split(self, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> tuple[Tensor, Tensor]:
        """Tokens of each layer that is skipped, and of all others together, [B] int64 each."""
        self._check_layers(layers)
        skips = self.first + self.last
        ceiling = ceiling.to(total.device)
        # Where there is more than all layers can use, the surplus is divided evenly.
        own = torch.where(total >= layers * ceiling, total // layers, ceiling)
        rest = total - skips * own
        short = rest < floor * (layers - skips)
        if bool(short.any()):
            row = int(short.nonzero()[0])
            needed = skips * int(own[row]) + floor * (layers - skips)
            raise KVPolicyError(
                f"The budget must be at least {-(-needed // layers)} tokens per layer to skip {skips} of {layers} "
                f"layers with {int(own[row])} tokens each, got {int(total[row]) // layers}; try skipping fewer layers."
            )
        return own, rest
