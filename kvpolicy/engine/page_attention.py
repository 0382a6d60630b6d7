"""Attention of one token per row to slots in pages: a softmax over all pages of a head, computed page by page."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.engine.attention import ScoreTransform
from kvpolicy.engine.pages import for_pages, owned_by
from kvpolicy.kernels.products import matmul


def attend_pages(
    q: Tensor, keys: Tensor, values: Tensor, occupied: Tensor, owner: Tensor, heads: int, transform: ScoreTransform
) -> tuple[Tensor, Tensor]:
    """Attend from one token per row to the pages of each head. Traceable, no host sync.

    Every page is scored and mixed on its own, as if it were a head. The softmax of a head needs the maxima and sums of
    its pages, which are small: no key or value is moved.

    Args:
        q: [B, Hq, 1, D].
        keys: [B, NB, P, D].
        values: [B, NB, P, D].
        occupied: Which slots hold a token, [B, NB, P] bool; at least one of each head.
        owner: [B, NB].
        heads: H.
        transform: From products to attention weights.

    Returns:
        The output [B, Hq, 1, D], and the attention weights [B, NB, G, P] fp32.
    """
    grouped = q.squeeze(2).unflatten(1, (heads, -1))
    mine = owned_by(owner, heads)
    score = transform.scores(for_pages(grouped, owner), keys).masked_fill(~occupied[:, :, None], -torch.inf)
    # A head's largest score; [B, H, NB, G] is small beside the slots.
    top = score.amax(-1)[:, None].masked_fill(~mine[..., None], -torch.inf).amax(2)
    if transform.sinks is not None:
        top = torch.maximum(top, transform.sinks.float().view(heads, -1))
    # A row without any token has no score but -inf, and -inf minus -inf is NaN.
    top = top.clamp_min(torch.finfo(torch.float32).min)
    weights = torch.exp(score - for_pages(top, owner)[..., None])
    member = mine.to(torch.float32)
    total = member @ weights.sum(-1)  # [B, H, G]
    if transform.sinks is not None:
        total = total + torch.exp(transform.sinks.float().view(heads, -1) - top)
    mixed = matmul(weights.to(values.dtype), values).float()
    total = total.clamp_min(torch.finfo(torch.float32).tiny)  # 1 or more, but for a row without any token
    out = (member @ mixed.flatten(2)).unflatten(2, mixed.shape[2:]) / total[..., None]
    weights = weights / for_pages(total, owner)[..., None]
    return out.to(values.dtype).flatten(1, 2).unsqueeze(2), weights
