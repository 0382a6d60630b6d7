"""Helpers shared by head allocators: rankings of the tokens of each head, and pages in proportion to wishes."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.protocols import HeadRequest
from kvpolicy.text.budget import waterfill


def sorted_by_head(request: HeadRequest) -> Tensor:
    """The priorities of each head in falling order, [B, H, n], cut or filled with -inf to what a head can use.

    The width is the same on all ranks, whatever these hold.
    """
    width = int((request.most * request.size).max())
    ranked = request.priority.sort(dim=-1, descending=True, stable=True).values[..., :width]
    return torch.nn.functional.pad(ranked, (0, width - ranked.shape[-1]), value=-torch.inf)


def divide_pages(wished: Tensor, least: Tensor, request: HeadRequest) -> Tensor:
    """Whole pages in proportion to wishes, [B, H] int64, over the heads of all ranks.

    Args:
        wished: Tokens of each head, [B, H] fp64.
        least: Tokens that every head must have room for, [B].
        request: The pages to divide.
    """
    heads = wished.shape[1]
    total = request.pages.cpu()
    # An equal share is always possible, and no selector protects more than that.
    floor = torch.minimum((-(-least // request.size)).clamp_min(1).cpu(), total // heads)
    ceiling = torch.maximum(request.most.cpu(), -(-total // heads))
    wished = wished.cpu()
    target = wished * (total / wished.sum(-1).clamp_min(1))[:, None]
    rows = zip(target.split(1), total.split(1), floor.tolist(), ceiling.split(1), strict=True)
    return torch.cat([waterfill(*row[:2], row[2], row[3]) for row in rows]).to(request.pages.device)
