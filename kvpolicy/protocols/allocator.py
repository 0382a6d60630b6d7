"""The interfaces of allocators: how many tokens each layer may keep, and each KV head of a layer."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from kvpolicy.protocols.codec import ModelInfo
from kvpolicy.protocols.selector import View
from kvpolicy.statistics.attention_sum import AttentionSum
from kvpolicy.statistics.ranks import SINGLE_RANK, Ranks
from kvpolicy.statistics.recent_queries import RecentQueries
from kvpolicy.statistics.statistic import Statistic

LayerMetric = Literal["", "cosine", "curve", "attention"]
"""The metric of layers: none, how little attention changes the residual stream, the worth of their tokens, or numbers
of their attention.

It is measured in a row's first prompt, or in the first chunk of it. Of curves, the share of the budget that each layer
got by them is kept for later prompts, and so it is of more than one number of attention.
"""

Reduction = Literal["mean", "variance", "entropy", "total", "value_size", "worth"]
"""A reduction of the attention of a prompt: see the attributes of `LayerAttention`, which have these names.

`worth` is for the metric `curve`, and the others for `attention`.
"""


@runtime_checkable
class Allocator(Protocol):
    """How many tokens may each layer keep?

    A class that inherits from it needs one method, `budgets`. An object that has all members is accepted whatever its
    class. Optional abilities are `DividesHeads`, `MeasuresAttention`, `BoundsBudgets` and `ChecksModel`.
    """

    __slots__ = ()

    @property
    def layer_metric(self) -> LayerMetric:
        """The metric that must be measured in every layer before budgets are known; by default none."""
        return ""

    def budgets(self, metrics: Tensor | None, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Tensor:
        """Divide a row's tokens among the layers.

        Args:
            metrics: The values of `layer_metric`, [B, L] fp32, or None. With the metric `curve`, curves [B, L, N] of
                rows in their first prompt, filled with -inf where a layer has fewer tokens, or shares [B, L]. With the
                metric `attention`, what `measure` returned for each layer, [B, L] or [B, L, ...], or shares [B, L].
            total: Tokens of all layers together, [B] int64. The rows of the result sum to it.
            floor: The fewest tokens that any layer may get.
            ceiling: The most tokens that any layer of a row can use, [B] int64.
            layers: L.

        Returns:
            Tokens per layer and row, [B, L] int64.
        """
        ...


class HeadRequest(NamedTuple):
    """The pages that a head allocator divides, and the candidates that it may look at.

    Attributes:
        priority: The priority of each candidate, [B, H, N] fp32: inf is always kept, -inf for invalid tokens.
        view: The candidates; its budget is that of an average head, in whole pages.
        pages: Pages of the layer in each row, on all ranks, [B] int64.
        size: Slots of a page, [B] int64.
        most: The most pages that a head can use, [B] int64.
    """

    priority: Tensor
    view: View
    pages: Tensor
    size: Tensor
    most: Tensor


@runtime_checkable
class HeadAllocator(Protocol):
    """How is a layer's budget divided among its KV heads?

    A class that inherits from it needs one method, `divide`. An object that has all members is accepted whatever its
    class.
    """

    __slots__ = ()

    @property
    def compares_heads(self) -> bool:
        """Whether priorities of different heads are compared, which not every selector's can be; by default not."""
        return False

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if it cannot divide the budgets of a model; by default it can."""

    def divide(self, request: HeadRequest) -> Tensor:
        """Pages of each of this rank's KV heads, [B, H] int64, at least 1.

        Over the heads of all ranks they sum to `request.pages`. A head has room for its tokens of priority inf, as far
        as an equal share has. A row does not depend on the others.
        """
        ...


@runtime_checkable
class DividesHeads(Protocol):
    """An optional ability of an allocator: the budget of a layer is divided among its KV heads."""

    @property
    def heads(self) -> HeadAllocator | None:
        """The head allocator; None for the same budget in every head."""
        ...


class AttentionNeeds(NamedTuple):
    """The statistics of a prompt's attention that an allocator needs.

    Attributes:
        reductions: Names of the reductions.
        queries: How many of the newest queries the first three are over.
    """

    reductions: tuple[Reduction, ...] = ()
    queries: int = 0

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """The statistics of a prompt from which they are computed."""
        over_window = {"mean", "variance", "entropy"} & {*self.reductions}
        found: list[Statistic[Any]] = [RecentQueries(self.queries)] if self.queries and over_window else []
        return (*found, AttentionSum()) if "total" in self.reductions else tuple(found)


class LayerAttention(NamedTuple):
    """The attention of a layer in a prompt, as it was reduced for an allocator; None for what it did not ask for.

    Attributes:
        positions: Position of each token of the prompt in its row, [B, N] int64, ascending; then -1 for padding.
        length: Tokens of each row, [B] int64.
        queries: How many of its newest queries were reduced, [B] int64; fewer than were asked for in a short row.
        ranks: The ranks that hold the layer's other heads.
        kv_heads: KV heads of the layer on this rank, H.
        mean: The mean over these queries, [B, Hq, N] fp32.
        variance: Their unbiased variance, [B, Hq, N] fp32; 0 for a single query.
        entropy: The sum of -A ln(A + 1e-10) over them, [B, Hq, N] fp32.
        total: The sum over all queries, [B, Hq, N] fp32.
        value_size: The largest sum of absolute elements of any token's value, [B, H] fp32.
        worth: The worth of each candidate in all heads of the model, [B, H, N] fp32, slots included: the attention that
            the selector holds of it (`HoldsAttention`), else its priority, which must compare heads; inf for a token
            that is always kept, and -inf for an invalid one.
        layer_idx: Index of the layer, if its tokens have a worth.
    """

    positions: Tensor
    length: Tensor
    queries: Tensor
    ranks: Ranks = SINGLE_RANK
    kv_heads: int = 1
    mean: Tensor | None = None
    variance: Tensor | None = None
    entropy: Tensor | None = None
    total: Tensor | None = None
    value_size: Tensor | None = None
    worth: Tensor | None = None
    layer_idx: int = 0


@runtime_checkable
class MeasuresAttention(Protocol):
    """An optional ability of an allocator, with the metric `attention` or `curve`: it measures layers by attention.

    With the metric `curve`, it compares what tokens of all layers are worth: it asks for `worth`, and `measure` returns
    a curve, the worth of each further token per head, [B, N] in falling order.
    """

    @property
    def attention(self) -> AttentionNeeds:
        """The statistics that it needs."""
        ...

    def measure(self, seen: LayerAttention) -> Tensor:
        """A finite number of a layer in each row, [B] fp32, or many, [B, ...], of which some may be -inf for none.

        They are of all heads of the model: see `LayerAttention.ranks`. Where the last dimensions of layers differ, they
        are filled with -inf.
        """
        ...


class LayerBounds(NamedTuple):
    """Bounds of the budgets of layers that were measured, for any metrics of the others.

    Attributes:
        least: The fewest tokens of each row, [B, K] int64.
        most: The most tokens of each row, [B, K] int64.
    """

    least: Tensor
    most: Tensor


class Guarantee(NamedTuple):
    """Guarantees for the layers of a row before any of them is measured.

    Attributes:
        least: The fewest tokens that a layer may get, [B] int64.
        together: The most tokens that all measured layers together may get by their bounds, at any time, [B] int64.
    """

    least: Tensor
    together: Tensor


@runtime_checkable
class BoundsBudgets(Protocol):
    """An optional ability of an allocator that measures one number of each layer: it bounds the budgets to come.

    While a prompt runs, a layer then holds no more of it than it may be given in the end. A bound is no guess: a
    layer's budget, once all layers are measured, lies within all of its bounds.
    """

    def bounds(
        self, metrics: Tensor, total: Tensor, floor: int, ceiling: Tensor, layers: int, queries: int
    ) -> LayerBounds:
        """Bound the budgets of the first layers; for the other arguments see `Allocator.budgets`.

        Args:
            metrics: The metric of each layer that was measured, [B, K] fp32, where K is less than or equal to L.
            total: Tokens of all layers together, [B] int64.
            floor: The fewest tokens that any layer may get.
            ceiling: The most tokens that any layer of a row can use, [B] int64.
            layers: L.
            queries: Query heads of a layer of the model.
        """
        ...

    def guarantee(self, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Guarantee:
        """Guarantees for any measurement, for plans; for the arguments see `Allocator.budgets`."""
        ...


def attention_of(allocator: object) -> tuple[Statistic[Any], ...]:
    """The statistics of a prompt that an allocator needs; none without `MeasuresAttention`."""
    return allocator.attention.statistics if isinstance(allocator, MeasuresAttention) else ()


def heads_of(allocator: object) -> HeadAllocator | None:
    """The head allocator of an allocator; None without `DividesHeads`."""
    return allocator.heads if isinstance(allocator, DividesHeads) else None
