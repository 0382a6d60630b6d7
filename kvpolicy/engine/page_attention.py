"""Attention of one token per row to slots in pages: a softmax over all pages of a head, computed page by page."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvpolicy.engine.attention import ScoreTransform
from kvpolicy.engine.pages import Owners, as_pages, buffer_pages
from kvpolicy.kernels.products import add_products, matmul


class StoredPages(Protocol):
    """Keys and values in NB pages of P slots, as a step attends to them."""

    def scores(self, queries: Tensor, owners: Owners, transform: ScoreTransform) -> Tensor:
        """Scores of the queries of heads [B, H, G, D] against the keys of their pages, [B, NB, G, P] fp32."""
        ...

    def mix(self, weights: Tensor, owners: Owners) -> Tensor:
        """Values weighted by [B, NB, G, P] fp32 and added up for each head, [B, H, G, D] fp32."""
        ...


class ExactPages(NamedTuple):
    """Pages in full precision: keys and values, [B, NB, P, D] each."""

    keys: Tensor
    values: Tensor

    def scores(self, queries: Tensor, owners: Owners, transform: ScoreTransform) -> Tensor:
        """See `StoredPages.scores`."""
        return transform.scores(owners.for_pages(queries), self.keys)

    def mix(self, weights: Tensor, owners: Owners) -> Tensor:
        """See `StoredPages.mix`."""
        return owners.sum_pages(matmul(weights.to(self.values.dtype), self.values).float())


class BufferedPages(NamedTuple):
    """Pages, and behind them a buffer of each head in full precision, whose slots appear as pages too.

    Attributes:
        pages: The pages before the buffers.
        keys: Those of the buffers, [B, H, E, D].
        values: [B, H, E, D].
        size: Slots of a page, P.
    """

    pages: StoredPages
    keys: Tensor
    values: Tensor
    size: int

    def scores(self, queries: Tensor, owners: Owners, transform: ScoreTransform) -> Tensor:
        """See `StoredPages.scores`."""
        of_pages = self.pages.scores(queries, owners.first(self._before(owners)), transform)
        heads, group = queries.shape[1:3]
        # [B, H, G, E] -> [B, H * n, G, P]: the group takes the place of the row while slots become pages.
        of_buffers = as_pages(transform.scores(queries, self.keys).flatten(1, 2), self.size)
        of_buffers = of_buffers.unflatten(1, (heads, group, -1)).transpose(2, 3).flatten(1, 2)
        # The scores of all slots are copied, which is less than to find the softmax of each head in two parts.
        return torch.cat([of_pages, of_buffers], 1)

    def mix(self, weights: Tensor, owners: Owners) -> Tensor:
        """See `StoredPages.mix`."""
        before = self._before(owners)
        mixed = self.pages.mix(weights[:, :before], owners.first(before))
        of_buffers = weights[:, before:].unflatten(1, (self.keys.shape[1], -1)).transpose(2, 3).flatten(3)
        return add_products(mixed, of_buffers[..., : self.keys.shape[2]], self.values)

    def _before(self, owners: Owners) -> int:
        """Pages before those of the buffers."""
        heads, slots = self.keys.shape[1:3]
        return owners.head.shape[1] - heads * buffer_pages(slots, self.size)


class PageAttention(NamedTuple):
    """The attention of one token per row to the pages of each head; what is not asked for is not computed.

    Attributes:
        out: The output, [B, Hq, 1, D].
        exponentials: Those of the scores less the largest score of the head, [B, NB, G, P] fp32.
        top: The largest score of each head, [B, H, G] fp32.
        total: The sum of a head's exponentials, [B, H, G] fp32.
        owners: The owners of the pages.
    """

    out: Tensor
    exponentials: Tensor
    top: Tensor
    total: Tensor
    owners: Owners

    @property
    def weights(self) -> Tensor:
        """The attention weights, [B, NB, G, P] fp32."""
        return self.exponentials / self.owners.for_pages(self.total)[..., None]

    @property
    def normalizer(self) -> Tensor:
        """The logarithm of the sum of the exponentials of the scores, [B, H, G] fp32."""
        return self.top + self.total.log()


def attend_pages(
    q: Tensor,
    pages: StoredPages,
    empty: Tensor | None,
    owners: Owners,
    transform: ScoreTransform,
    counts: Tensor | None = None,
    *,
    none_alone: bool = False,
) -> PageAttention:
    """Attend from one token per row to the pages of each head. Traceable, no host sync.

    Every page is scored and mixed on its own, as if it were a head. The softmax of a head needs the maxima and sums of
    its pages, which are small: no key or value is moved.

    Args:
        q: [B, Hq, 1, D].
        pages: NB pages of P slots.
        empty: Which slots hold no token, [B, NB, P] bool; not all of a head. None if all hold one.
        owners: The owners of the pages.
        transform: From products to attention weights.
        counts: Logarithm of the number of tokens that each slot stands for, [B, NB, P] fp32; None if it is always one.
        none_alone: Whether each head is known to attend to a slot; it is if no slot is empty.
    """
    heads = owners.member.shape[1]
    none_alone = none_alone or empty is None
    sinks = None if transform.sinks is None else transform.sinks.float().view(heads, -1)
    # An unused page gets the queries of the last head, and weights of 0: none of its slots is occupied.
    score = pages.scores(q.squeeze(2).unflatten(1, (heads, -1)), owners, transform)
    if counts is not None:  # after scale and softcap, as everywhere
        score = score + counts[:, :, None]
    if empty is not None:
        score = score.masked_fill(empty[:, :, None], -torch.inf)
    # A head's largest score; [B, H, NB, G] is small beside the slots.
    top = score.amax(-1)[:, None].masked_fill(owners.others[..., None], -torch.inf).amax(2)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    if not none_alone:  # a row without any token has no score but -inf, and -inf minus -inf is NaN
        top = top.clamp_min(torch.finfo(torch.float32).min)
    weights = torch.exp(score - owners.for_pages(top)[..., None])
    total = owners.member @ weights.sum(-1)  # [B, H, G]
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    if not none_alone:
        total = total.clamp_min(torch.finfo(torch.float32).tiny)  # 1 or more, but for a row without any token
    out = pages.mix(weights, owners) / total[..., None]
    return PageAttention(out.to(q.dtype).flatten(1, 2).unsqueeze(2), weights, top, total, owners)
