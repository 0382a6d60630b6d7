"""KVCrush: a few tokens represent those that another selector evicts."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.protocols import SMALLEST_HEAD, HeadShape, Reranks, Selector, State, View
from kvpolicy.selectors.base import Wrapper, check_base
from kvpolicy.selectors.crush import (
    Anchor,
    Buckets,
    Pick,
    anchor_bits,
    distances,
    position_hash,
    representatives,
    signatures,
    top_mask,
)
from kvpolicy.selectors.snapkv import SnapKV
from kvpolicy.statistics import RecentQueries, Results, Statistic, union
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.strategy import between, checked, least, strategy

KEEP = 1
FREE = 0
DROP = -1
"""Marks of tokens by pages: always kept, ranked by the base, never kept."""

SIGNATURE_QUERIES = 32
"""How many of the newest queries determine the signatures if the base uses no attention statistics."""

MILLION = 10**6
"""`split` is rounded to a millionth, so that the number of representatives is computed in integers."""


class Pages(NamedTuple):
    """The tokens of a head grouped into M pages of original positions; the tensors are [B, H, M] unless noted.

    Attributes:
        of: The page of each token, [B, H, N] int64; M - 1 for invalid tokens.
        size: The number of tokens in the page.
        value: The sum of the priorities of its tokens; inf if one of them must be kept.
        distance: The sum of the distances of its tokens: the distance of the concatenated signatures.
    """

    of: Tensor
    size: Tensor
    value: Tensor
    distance: Tensor


class CrushState(NamedTuple):
    """Which slots hold representatives, and the state of the base.

    Attributes:
        mark: [B, H, S] bool; with pages int8: KEEP, FREE or, during a prefill, DROP.
        base: The state of the base.
    """

    mark: Tensor
    base: State


@strategy
class KVCrush(Wrapper):
    """Use part of the budget for representatives of the tokens that the base selector would evict.

    Each token has a signature with one bit per query head: whether the head scores it among its highest tokens. Tokens
    with the same signature are expected to be interchangeable. So the tokens that the base would evict are sorted by
    the Hamming distance of their signature to an anchor and divided into buckets, and one token of each bucket is kept.

    Args:
        base: The selector for the rest of the budget; any selector.
        split: Fraction of the budget for representatives, in [0, 1). With 0, the result is that of the base.
        anchor: The reference signature: `random` (seeded), `mean`, `alternate`, `zeros` or `ones`.
        seed: Seed of the random anchor and the random pick.
        quantile: Fraction of the tokens of a head whose bit is 0, in [0, 1].
        pick: Which token of a bucket is kept: the `first`, a `random` one, or the `best` one by the base.
        buckets: `rank` divides the order by distance into equal buckets; `distance` makes a bucket of each distance.
        page: 0 selects tokens; otherwise whole pages of this many positions are kept or evicted.

    Raises:
        KVPolicyError: If a parameter is out of range.

    Examples:
        >>> from kvpolicy import Policy
        >>> policy = Policy.parse("kvcrush:split=0.5/h2o@0.25")
        >>> policy.selector.base, policy.selector.split
        (H2O(recent=0.5, decode='evict'), 0.5)

    Source:
        KVCrush (arXiv:2503.00022), Section 3, and the authors' openvino.genai (kvcrush.cpp). These disagree in part.
        Choices and differences:

        - Buckets are equal ranges of the order by (distance, position), as in the code. The printed ones
          (`buckets=distance`) cannot work: with a single anchor there are at most Hq + 1 distances, far fewer than
          representatives.
        - Ranges begin at rank i * n / r, rounded down, which covers the tail. The integer stride of the code does not,
          if more than half of the tokens are kept.
        - The first token of a bucket is kept, as in the code. The paper picks one at random: `pick=random`.
        - The threshold of the bits is the `quantile` of the scores of the head, not the budget, which would leave most
          signatures empty.
        - Representatives are part of the budget, as in the paper. The code adds them on top.
        - Both keep the first 32 and the last 128 tokens outside of both parts. Here only the base keeps tokens for
          their position.
        - With grouped-query attention each KV head has its own candidates, but signatures always consist of all query
          heads. The code has one score for all heads, and one bit per token of a block; the paper's blocks are `page`.
        - During generation, representatives stay and the base evicts among the rest. The code selects again after an
          overflow by as many blocks as representatives, so never if blocks overflow one at a time.
        - The `decode` mode is that of the base.
    """

    base: Selector = checked(check_base, SnapKV)
    split: float = 0.25
    anchor: Anchor = "random"
    seed: int = 0
    quantile: float = between(0, 1, 0.5)
    pick: Pick = "first"
    buckets: Buckets = "rank"
    page: int = least(0, 0)

    def __post_init__(self) -> None:
        # A split just below 1 may round to a whole million, and `min_tokens` would then divide by 0.
        if not 0 <= self.split < 1 or self._millionths == MILLION:
            raise KVPolicyError(
                f"KVCrush.split must be between 0 and 0.999999, which leaves the base a token, got {self.split}; try "
                "0.25."
            )

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """The needs of the base, and attention for the signatures."""
        base = self.base.statistics
        known = any(each.of_attention for each in base)
        return base if known else union(base, (RecentQueries(SIGNATURE_QUERIES),))

    @property
    def min_tokens(self) -> int:
        """The smallest budget that leaves the base its minimum, in whole pages if there are pages."""
        of_base = min_page_tokens(self.base.min_tokens, self.page)
        # The smallest n with n - floor(n * split) >= of_base.
        return (of_base - 1) * MILLION // (MILLION - self._millionths) + 1

    def alloc(
        self, batch: int, heads: int, slots: int, device: torch.device | str, head: HeadShape = SMALLEST_HEAD
    ) -> State:
        """No representatives, and the empty state of the base."""
        mark = torch.zeros(batch, heads, slots, dtype=self._mark_dtype, device=device)
        base = self.base.alloc(batch, heads, slots, device, head)
        return CrushState(mark, base)

    def observe(self, state: CrushState, seen: Results, view: View) -> State:
        """Update the base, then select representatives of the tokens that it would evict."""
        base_view = self._base_view(view)
        base = self.base.observe(state.base, seen, base_view)
        return CrushState(self._marks(base, seen, view, base_view), base)

    def rerank(self, state: CrushState, seen: Results, view: View) -> State:
        """Let the base rank all tokens again; the representatives stay."""
        assert isinstance(self.base, Reranks)  # only called if the base asks for it
        return state._replace(base=self.base.rerank(state.base, seen, self._base_view(view)))

    def step(self, state: CrushState, row: Tensor, view: View) -> None:
        """Update the base; generated tokens do not change the representatives."""
        self.base.step(state.base, row, self._base_view(view))

    def priority(self, state: CrushState, view: View) -> Tensor:
        """Representatives are always kept, other tokens by the priority of the base: [B, H, N]."""
        priority = self.base.priority(state.base, self._base_view(view))
        if not self.page:  # a single operation, because this runs in every decode step
            return priority.masked_fill(state.mark, torch.inf)
        return priority.masked_fill(state.mark == KEEP, torch.inf).masked_fill(state.mark == DROP, -torch.inf)

    def statistic(self, seen: Results, view: View) -> Tensor | None:
        """The statistic of the base, or the attention of the newest queries if it has none."""
        statistic = self.base.statistic(seen, self._base_view(view))
        return (
            seen[RecentQueries].sum(torch.full_like(view.length, SIGNATURE_QUERIES)) if statistic is None else statistic
        )

    @property
    def _mark_dtype(self) -> torch.dtype:
        return torch.int8 if self.page else torch.bool

    @property
    def _millionths(self) -> int:
        """Representatives per million tokens; an integer, because fractions in floating point round differently."""
        return round(self.split * MILLION)

    def _base_view(self, view: View) -> View:
        """The view of the base; its budget is the rest after the representatives."""
        return view._replace(budget=view.memo.once(self._base_budget, view.budget))

    def _base_budget(self, budget: Tensor) -> Tensor:
        return budget - self.representative_count(budget)

    def representative_count(self, budget: Tensor) -> Tensor:
        """The number of representatives in budgets of tokens, of any shape."""
        # The fraction is reduced first, so that a quarter is a single division. This runs in every decode step.
        divisor = math.gcd(self._millionths, MILLION)
        product = budget if self._millionths == divisor else budget * (self._millionths // divisor)
        return product.div(MILLION // divisor, rounding_mode="floor")

    def _marks(self, base: State, seen: Results, view: View, base_view: View) -> Tensor:
        """Mark representatives among the candidates, [B, H, N]."""
        # Decided by the length of the rows, not by the tokens of a head, so that all ranks take the same branch: they
        # must make the same number of calls to each other.
        evicts = bool((view.length > view.budget).any())
        if not evicts or not (self.split or self.page):
            return torch.zeros_like(view.positions, dtype=self._mark_dtype)
        total = view.valid.sum(-1)
        count = self.representative_count(view.budget)[:, None]
        count = torch.where(total > view.budget[:, None], count, 0)  # [B, H]; 0 if the head evicts nothing
        priority = self.base.priority(base, base_view).masked_fill(~view.valid, -torch.inf)
        distance = self._distance(seen, view)
        if self.page:
            return self._page_marks(view, base_view, priority, distance, count)
        kept_by_base = top_mask(priority, torch.minimum(base_view.budget[:, None], total)) & view.valid
        key = self._rank_key(priority, view.positions)
        return representatives(view.valid & ~kept_by_base, distance, key, count, self.buckets)

    def _distance(self, seen: Results, view: View) -> Tensor:
        """Distance of each token's signature to the anchor; see `distances`."""
        statistic = self.statistic(seen, view)
        assert statistic is not None
        valid = view.valid.repeat_interleave(statistic.shape[1] // view.positions.shape[1], 1)
        bits = signatures(statistic, valid, self.quantile)
        anchor = anchor_bits(self.anchor, bits, valid, self.seed * 1000003 + view.layer_idx, view.ranks)
        return distances(bits, anchor, view)

    def _page_marks(self, view: View, base_view: View, priority: Tensor, distance: Tensor, count: Tensor) -> Tensor:
        """Mark the tokens of representative pages, and those of pages that are evicted, [B, H, N] int8."""
        pages = paginate(view.positions, self.page, priority, distance.expand(*view.positions.shape))
        kept_by_base = best_pages(pages, base_view.budget)
        candidates = (pages.size > 0) & ~kept_by_base
        number = torch.arange(candidates.shape[-1], device=candidates.device).expand_as(candidates)
        key = self._rank_key(pages.value, number)
        count = count.div(self.page, rounding_mode="floor")
        chosen = representatives(candidates, pages.distance, key, count, self.buckets)
        # Pages of the base stay FREE, because in decode the base evicts among their tokens.
        mark = torch.where(mark_tokens(pages, kept_by_base | chosen), FREE, DROP)
        mark = mark.masked_fill(mark_tokens(pages, chosen), KEEP)
        fits = (view.valid.sum(-1) <= view.budget[:, None])[..., None]  # the head evicts nothing
        return mark.masked_fill(fits, FREE).to(torch.int8)

    def _rank_key(self, priority: Tensor, number: Tensor) -> Tensor | None:
        """The order in which candidates of a bucket are picked, lowest first; None for the order of positions."""
        if self.pick == "first":
            return None
        return -priority if self.pick == "best" else position_hash(number, self.seed)


def paginate(positions: Tensor, page: int, priority: Tensor, distance: Tensor) -> Pages:
    """Group tokens into pages of `page` positions."""
    valid = positions >= 0
    of = positions.long().div(page, rounding_mode="floor")
    last = int(of.max()) + 1
    of = of.where(valid, last)

    def total(x: Tensor) -> Tensor:
        zeros = torch.zeros(*of.shape[:2], last + 1, dtype=x.dtype, device=x.device)
        sums = zeros.scatter_add_(-1, of, x.masked_fill(~valid, 0))
        return sums.index_fill(-1, torch.tensor(last, device=x.device), 0)

    # Priorities of inf are handled separately: added to one of -inf, the sum would be NaN.
    must_keep = total((priority == torch.inf).float()) > 0
    value = total(priority.masked_fill(priority == torch.inf, 0)).masked_fill(must_keep, torch.inf)
    return Pages(of, total(valid.long()), value, total(distance))


def best_pages(pages: Pages, capacity: Tensor) -> Tensor:
    """The page of the newest token, then those of highest value that fit `capacity` [B] tokens, [B, H, M] bool."""
    value = pages.value.masked_fill(pages.size == 0, -torch.inf)
    order = value.argsort(dim=-1, descending=True, stable=True)
    number = torch.arange(value.shape[-1], device=value.device)
    newest = torch.where(pages.size > 0, number, -1).amax(-1, keepdim=True)
    # A stable sort by whether it is the newest page moves that page to the front.
    order = order.gather(-1, (order != newest).int().argsort(dim=-1, stable=True))
    fits = pages.size.gather(-1, order).cumsum(-1) <= capacity[:, None, None]
    return torch.zeros_like(fits).scatter_(-1, order, fits) & (pages.size > 0)


def min_page_tokens(tokens: int, page: int) -> int:
    """The smallest number of tokens in whole pages that is enough for `tokens` tokens.

    These are the page of the newest token, and the pages of the others if they are consecutive.
    """
    return (1 - (1 - tokens) // page) * page if page else tokens


def mark_tokens(pages: Pages, chosen: Tensor) -> Tensor:
    """The tokens of chosen pages: [B, H, M] -> [B, H, N] bool."""
    return chosen.gather(-1, pages.of)
