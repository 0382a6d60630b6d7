"""Attention of one token per row to slots in pages: a softmax in each page, and one over the pages of a head."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvpolicy.engine.attention import ScoreTransform
from kvpolicy.engine.pages import Owners, as_pages, buffer_pages, shares_of_slots, sum_pages
from kvpolicy.kernels.products import add_products, matmul


class StoredPages(Protocol):
    """Keys and values in NB pages of P slots, as a step attends to them."""

    def scores(self, queries: Tensor, owners: Owners, transform: ScoreTransform) -> Tensor:
        """Scores of the queries of heads [B, H, G, D] against the keys of their pages, [B, NB, G, P] fp32."""
        ...

    def mix(self, weights: Tensor, share: Tensor) -> Tensor:
        """Values weighted in each page and added up for each head, [B, H, G, D] fp32.

        Args:
            weights: Of each slot in its page, [B, NB, G, P] fp32.
            share: Of each page in each head, [B, G, H, NB] fp32; 0 in other heads.
        """
        ...


class ExactPages(NamedTuple):
    """Pages in full precision: keys and values, [B, NB, P, D] each."""

    keys: Tensor
    values: Tensor

    def scores(self, queries: Tensor, owners: Owners, transform: ScoreTransform) -> Tensor:
        """See `StoredPages.scores`."""
        return transform.scores(owners.for_pages(queries), self.keys)

    def mix(self, weights: Tensor, share: Tensor) -> Tensor:
        """See `StoredPages.mix`."""
        return sum_pages(matmul(weights.to(self.values.dtype), self.values).float(), share)


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
        of_pages = self.pages.scores(queries, owners.first(self._before(owners.head.shape[1])), transform)
        heads, group = queries.shape[1:3]
        # [B, H, G, E] -> [B, H * n, G, P]: the group takes the place of the row while slots become pages.
        of_buffers = as_pages(transform.scores(queries, self.keys).flatten(1, 2), self.size)
        of_buffers = of_buffers.unflatten(1, (heads, group, -1)).transpose(2, 3).flatten(1, 2)
        # The scores of all slots are copied, which is less than to find the softmax of each head in two parts.
        return torch.cat([of_pages, of_buffers], 1)

    def mix(self, weights: Tensor, share: Tensor) -> Tensor:
        """See `StoredPages.mix`."""
        before = self._before(weights.shape[1])
        mixed = self.pages.mix(weights[:, :before], share[..., :before])
        of_buffers = weights[:, before:] * shares_of_slots(share[..., before:])
        of_buffers = of_buffers.unflatten(1, (self.keys.shape[1], -1)).transpose(2, 3).flatten(3)
        return add_products(mixed, of_buffers[..., : self.keys.shape[2]], self.values)

    def _before(self, pages: int) -> int:
        """Pages before those of the buffers, of all pages."""
        heads, slots = self.keys.shape[1:3]
        return pages - heads * buffer_pages(slots, self.size)


class PageAttention(NamedTuple):
    """The attention of one token per row to the pages of each head; what is not asked for is not computed.

    Attributes:
        out: The output, [B, Hq, 1, D].
        within: The attention weights of each page on its own, [B, NB, G, P] fp32.
        share: The share of each page in the attention of each head, [B, G, H, NB] fp32; 0 in other heads.
        normalizers: The logarithm of the sum of the exponentials of the scores of each page, [B, G, H, NB] fp32; the
            lowest number in other heads.
        sinks: The sink of each query head, [G, H] fp32, or None.
    """

    out: Tensor
    within: Tensor
    share: Tensor
    normalizers: Tensor
    sinks: Tensor | None

    @property
    def weights(self) -> Tensor:
        """The attention weights, [B, NB, G, P] fp32."""
        return self.within * shares_of_slots(self.share)

    @property
    def normalizer(self) -> Tensor:
        """The logarithm of the sum of the exponentials of the scores, [B, H, G] fp32."""
        every = self.normalizers.logsumexp(-1)
        return (every if self.sinks is None else torch.logaddexp(every, self.sinks)).transpose(1, 2)


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

    Every page is scored and mixed on its own, as if it were a head. The softmax of a head is that of each of its pages
    times that of the normalizers of the pages, which are few beside the slots: no key or value is moved.

    Args:
        q: [B, Hq, 1, D].
        pages: NB pages of P slots.
        empty: Which slots hold no token, [B, NB, P] bool; not all of a head. None if all hold one.
        owners: The owners of the pages.
        transform: From products to attention weights.
        counts: Logarithm of the number of tokens that each slot stands for, [B, NB, P] fp32; None if it is always one.
        none_alone: Whether each head is known to attend to a slot; it is if no slot is empty.
    """
    heads = owners.others.shape[1]
    low = torch.finfo(torch.float32).min  # not -inf, of which the softmax of a page without any token is NaN
    # An unused page gets the queries of the last head, and a share of 0 in every head.
    score = pages.scores(q.squeeze(2).unflatten(1, (heads, -1)), owners, transform)
    if counts is not None:  # after scale and softcap, as everywhere
        score = score + counts[:, :, None]
    if empty is not None:
        score = score.masked_fill(empty[:, :, None], low)
    within = score.softmax(-1)
    # The largest weight is exp(largest score - normalizer), and at least 1 / P.
    normalizers = (score.amax(-1) - within.amax(-1).log()).transpose(1, 2)[:, :, None]
    others = owners.others[:, None]
    normalizers = normalizers.masked_fill(others, low)
    share = normalizers.softmax(-1)
    if empty is not None and not none_alone:  # a head without any token attends to nothing
        within = within.masked_fill(empty[:, :, None], 0)
        share = share.masked_fill(others, 0)
    sinks = None
    if transform.sinks is not None:
        sinks = transform.sinks.float().view(heads, -1).mT
        share = share * torch.sigmoid(normalizers.logsumexp(-1) - sinks)[..., None]
    out = pages.mix(within, share).to(q.dtype)
    return PageAttention(out.flatten(1, 2).unsqueeze(2), within, share, normalizers, sinks)
