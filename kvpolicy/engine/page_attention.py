"""Attention of one token per row to slots in pages: a softmax over all pages of a head, computed page by page."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvpolicy.engine.pages import as_pages, buffer_pages, for_pages, from_pages, owned_by
from kvpolicy.kernels.products import matmul, products
from kvpolicy.statistics.windows import ScoreTransform


class StoredPages(Protocol):
    """Keys and values in pages, as a step attends to them."""

    def score(self, queries: Tensor) -> Tensor:
        """Products of queries [B, NB, G, D] with the keys of each page, [B, NB, G, P] fp32."""
        ...

    def mix(self, weights: Tensor) -> Tensor:
        """Values of each page weighted by [B, NB, G, P] fp32, [B, NB, G, D] fp32."""
        ...


class ExactPages(NamedTuple):
    """Pages in full precision: keys and values, [B, NB, P, D] each."""

    keys: Tensor
    values: Tensor

    def score(self, queries: Tensor) -> Tensor:
        """See `StoredPages.score`."""
        return products(queries, self.keys)

    def mix(self, weights: Tensor) -> Tensor:
        """See `StoredPages.mix`."""
        return matmul(weights.to(self.values.dtype), self.values).float()


def attend_pages(
    q: Tensor,
    pages: StoredPages,
    occupied: Tensor,
    owner: Tensor,
    heads: int,
    transform: ScoreTransform,
    buffer: tuple[Tensor, Tensor] | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend from one token per row to the pages of each head. Traceable, no host sync.

    Every page is scored and mixed on its own, as if it were a head. The softmax of a head needs the maxima and sums of
    its pages, which are small: no key or value is moved.

    Args:
        q: [B, Hq, 1, D].
        pages: NB pages of P slots.
        occupied: Which slots hold a token, [B, NB, P] bool; at least one of each head. The pages of the buffer follow.
        owner: Head of each page, [B, NB]; the pages of the buffer follow.
        heads: H.
        transform: From products to attention weights.
        buffer: Keys and values of each head's full-precision buffer besides, [B, H, E, D] each; None without.
        counts: Logarithm of the number of tokens that each slot stands for, [B, NB, P] fp32; None if it is always one.
            The pages of the buffer follow.

    Returns:
        The output [B, Hq, 1, D], the attention weights [B, NB, G, P] fp32, those of the buffer's pages last, and the
        logarithm of the sum of the exponentials of the scores, [B, H, G] fp32.
    """
    grouped = q.squeeze(2).unflatten(1, (heads, -1))
    size = occupied.shape[-1]
    number = owner.shape[1]
    behind: Tensor | None = None
    if buffer is not None:
        slots = buffer[0].shape[2]
        number -= heads * buffer_pages(slots, size)
        behind = transform.scores(grouped, buffer[0])
        if counts is not None:
            behind = behind + from_pages(counts[:, number:], heads, slots)[:, :, None]
            counts = counts[:, :number]
        behind = behind.masked_fill(~from_pages(occupied[:, number:], heads, slots)[:, :, None], -torch.inf)
        owner = owner[:, :number]
        occupied = occupied[:, :number]
    mine = owned_by(owner, heads)
    # An unused page gets the queries of the last head, and weights of 0: none of its slots is occupied.
    score = transform.finish(pages.score(for_pages(grouped, owner)))
    if counts is not None:  # after scale and softcap, as everywhere
        score = score + counts[:, :, None]
    score = score.masked_fill(~occupied[:, :, None], -torch.inf)
    # A head's largest score; [B, H, NB, G] is small beside the slots.
    top = score.amax(-1)[:, None].masked_fill(~mine[..., None], -torch.inf).amax(2)
    if behind is not None:
        top = torch.maximum(top, behind.amax(-1))
    if transform.sinks is not None:
        top = torch.maximum(top, transform.sinks.float().view(heads, -1))
    # A row without any token has no score but -inf, and -inf minus -inf is NaN.
    top = top.clamp_min(torch.finfo(torch.float32).min)
    weights = torch.exp(score - for_pages(top, owner)[..., None])
    member = mine.to(torch.float32)
    total = member @ weights.sum(-1)  # [B, H, G]
    mixed = pages.mix(weights)
    # A product with ones and zeros, not a scatter: it adds the pages of a head in one order on every device.
    out = (member @ mixed.flatten(2)).unflatten(2, mixed.shape[2:])
    if behind is not None and buffer is not None:
        behind = torch.exp(behind - top[..., None])
        total = total + behind.sum(-1)
        out = out + matmul(behind.to(buffer[1].dtype), buffer[1]).float()
    if transform.sinks is not None:
        total = total + torch.exp(transform.sinks.float().view(heads, -1) - top)
    total = total.clamp_min(torch.finfo(torch.float32).tiny)  # 1 or more, but for a row without any token
    weights = weights / for_pages(total, owner)[..., None]
    if behind is not None:
        # [B, H, G, E] -> pages [B, H * n, G, P]: the group takes the place of the row while slots become pages.
        group = behind.shape[2]
        paged = as_pages((behind / total[..., None]).flatten(1, 2), size)
        paged = paged.unflatten(1, (heads, group, -1)).transpose(2, 3).flatten(1, 2)
        weights = torch.cat([weights, paged], 1)
    return (out / total[..., None]).to(q.dtype).flatten(1, 2).unsqueeze(2), weights, top + total.log()
