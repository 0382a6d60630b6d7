"""KVCrush: let a few tokens stand in for those that another selector drops."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.protocols import DecodeMode, Needs, Seen, Selector, State, View
from kvpolicy.selectors._crush import (
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
from kvpolicy.selectors._pages import best_pages, least_room, mark_tokens, paginate
from kvpolicy.selectors.snapkv import SnapKV
from kvpolicy.spec.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.spec.validation import check_fields

KEEP, FREE, DROP = 1, 0, -1
TAIL = 32
"""Queries that sign for a base that looks at no attention itself."""
MILLION = 10**6
"""`split` counts to a millionth, so that its share of a budget is whole-number arithmetic."""


class CrushState(NamedTuple):
    """Which slots hold representatives, and the base's state.

    Attributes:
        mark: [B, H, S] bool; by pages int8: KEEP, FREE or, while choosing, DROP.
        base: The base's.
    """

    mark: Tensor
    base: State


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCrush:
    """Spend part of the budget on representatives of what the base selector would drop.

    Each token is signed with one bit per query head: does this head rate it among its best? Tokens of one signature
    behave alike, so what the base drops is ordered by its Hamming distance to one anchor, cut into buckets, and one
    token of each bucket stays.

    Args:
        base: The selector that spends the rest of the budget; it may be any.
        split: Share of the budget for representatives, in [0, 1). 0 is the base exactly.
        anchor: The reference signature: `random` (seeded), `mean`, `alternate`, `zeros` or `ones`.
        seed: Seeds the random anchor and the random pick.
        quantile: Share of a head's tokens that get a 0 bit, in [0, 1].
        pick: Which token of a bucket stays: the `first`, a `random` one, or the `best` by the base.
        buckets: `rank` cuts the order by distance into equal parts; `distance` makes a bucket of each distance.
        page: 0 chooses tokens; else whole pages of this many positions are kept or dropped.

    Raises:
        KVPolicyError: If a number is out of range or a word unknown.

    Examples:
        >>> from kvpolicy import Policy
        >>> policy = Policy.parse("kvcrush:split=0.5/h2o@0.25")
        >>> policy.selector.base, policy.selector.split
        (H2O(recent=0.5, decode='evict'), 0.5)

    Source:
        KVCrush (arXiv:2503.00022), Section 3, and the authors' openvino.genai (kvcrush.cpp). Where these disagree or
        cannot work as printed: a single anchor has at most Hq + 1 distances, far fewer than representatives, so
        buckets are equal ranks of (distance, position) as in the code, but rank i*n/k rounded down, which reaches
        the tail (the code's whole-number stride does not); the literal buckets are an option. The bit threshold is
        `quantile` of the head's own scores, not the budget, which would leave most signatures empty. Budget for
        representatives is part of the budget (paper), not on top of it (code). Both keep the first 32 and the last 128
        tokens outside of both parts; here only the base keeps tokens for their place. With grouped-query attention each
        KV head has its own candidates, but signatures always have all query heads. While generating, representatives
        stay and the base evicts among the rest. The base's own `decode` mode holds.
    """

    base: Selector = field(default_factory=SnapKV)
    split: float = 0.25
    anchor: Anchor = "random"
    seed: int = 0
    quantile: float = 0.5
    pick: Pick = "first"
    buckets: Buckets = "rank"
    page: int = 0

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        check_fields(self)
        if not isinstance(self.base, Selector):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise KVPolicyTypeError(f"base={self.base!r} is no selector: pass one, such as SnapKV().")
        if not 0 <= self.split < 1 or self._parts == MILLION:
            raise KVPolicyError(f"split={self.split} leaves the base nothing: use a number from 0 to 0.999999.")
        if not 0 <= self.quantile <= 1:
            raise KVPolicyError(f"quantile={self.quantile} is no share: use a number from 0 to 1.")
        if self.page < 0:
            raise KVPolicyError(f"page={self.page} is negative: use 0 for tokens, or a page size.")
        for word, known in ((self.anchor, Anchor), (self.pick, Pick), (self.buckets, Buckets)):
            if word not in known.__args__:
                raise KVPolicyError(f"{word!r} is unknown: use one of {', '.join(known.__args__)}.")

    @property
    def decode(self) -> DecodeMode:
        """As the base has it."""
        return self.base.decode

    @property
    def needs(self) -> Needs:
        """What the base needs, and some attention to sign with."""
        needs = self.base.needs
        return needs if needs.attn_sum or needs.window_queries else needs | Needs(window_queries=TAIL)

    @property
    def min_tokens(self) -> int:
        """Enough that the base's share is its own floor, by pages in whole ones."""
        return (least_room(self.base.min_tokens, self.page) - 1) * MILLION // (MILLION - self._parts) + 1

    def alloc(self, batch: int, heads: int, slots: int, device: torch.device | str) -> State:
        """No representatives yet."""
        mark = torch.zeros(batch, heads, slots, dtype=self._kind, device=device)
        return CrushState(mark, self.base.alloc(batch, heads, slots, device))

    def observe(self, state: CrushState, seen: Seen, view: View) -> State:
        """Let the base observe, then choose representatives of what it would drop."""
        inner = self._inner(view)
        base = self.base.observe(state.base, seen, inner)
        return CrushState(self._marks(base, seen, view, inner), base)

    def step(self, state: CrushState, row: Tensor, view: View) -> None:
        """Only the base learns from generated tokens."""
        self.base.step(state.base, row, self._inner(view))

    def priority(self, state: CrushState, view: View) -> Tensor:
        """Representatives always, the rest as the base says: [B, H, N]."""
        worth = self.base.priority(state.base, self._inner(view))
        if not self.page:  # one operation, since this runs in every decode step
            return worth.masked_fill(state.mark, torch.inf)
        return worth.masked_fill(state.mark == KEEP, torch.inf).masked_fill(state.mark == DROP, -torch.inf)

    def statistic(self, seen: Seen, view: View) -> Tensor | None:
        """The base's, or the newest queries' where it has none."""
        own = self.base.statistic(seen, self._inner(view))
        return seen.recent(torch.full_like(view.length, TAIL)) if own is None else own

    @property
    def _kind(self) -> torch.dtype:
        return torch.int8 if self.page else torch.bool

    @property
    def _parts(self) -> int:
        """Representatives in a million tokens; whole, since shares in floats would round apart."""
        return round(self.split * MILLION)

    def _inner(self, view: View) -> View:
        return view._replace(budget=view.budget - self._share(view.budget))

    def _share(self, budget: Tensor) -> Tensor:
        common = math.gcd(self._parts, MILLION)  # a quarter is one division, in every decode step
        shares = budget if self._parts == common else budget * (self._parts // common)
        return shares.div(MILLION // common, rounding_mode="floor")

    def _marks(self, base: State, seen: Seen, view: View, inner: View) -> Tensor:
        drops = bool((view.length > view.budget).any())  # no head's count, so that all ranks decide alike
        if not drops or not (self.split or self.page):
            return torch.zeros_like(view.positions, dtype=self._kind)
        count, share = view.valid.sum(-1), self._share(view.budget)
        want = torch.where(count > view.budget[:, None], share[:, None], 0)  # [B, H]: none where nothing is dropped
        worth = self.base.priority(base, inner).masked_fill(~view.valid, -torch.inf)
        distance = self._distance(seen, view)
        if self.page:
            return self._page_marks(view, inner, worth, distance, want)
        strong = top_mask(worth, torch.minimum(inner.budget[:, None], count)) & view.valid
        key = self._key(worth, view.positions)
        return representatives(view.valid & ~strong, distance, key, want, self.buckets)

    def _distance(self, seen: Seen, view: View) -> Tensor:
        statistic = self.statistic(seen, view)
        assert statistic is not None
        valid = view.valid.repeat_interleave(statistic.shape[1] // view.positions.shape[1], 1)
        bits = signatures(statistic, valid, self.quantile)
        anchor = anchor_bits(self.anchor, bits, valid, self.seed * 1000003 + view.layer_idx, view.ranks)
        return distances(bits, anchor, view)

    def _page_marks(self, view: View, inner: View, worth: Tensor, distance: Tensor, want: Tensor) -> Tensor:
        pages = paginate(view.positions, self.page, worth, distance.expand(*view.positions.shape))
        strong = best_pages(pages, inner.budget)
        left = (pages.size > 0) & ~strong
        number = torch.arange(left.shape[-1], device=left.device).expand_as(left)
        want = want.div(self.page, rounding_mode="floor")
        stand_in = representatives(left, pages.distance, self._key(pages.value, number), want, self.buckets)
        mark = torch.where(mark_tokens(pages, strong | stand_in), FREE, DROP)
        mark = mark.masked_fill(mark_tokens(pages, stand_in), KEEP)
        fits = (view.valid.sum(-1) <= view.budget[:, None])[..., None]  # nothing to drop in this row
        return mark.masked_fill(fits, FREE).to(torch.int8)

    def _key(self, worth: Tensor, number: Tensor) -> Tensor | None:
        if self.pick == "first":
            return None
        return -worth if self.pick == "best" else position_hash(number, self.seed)
