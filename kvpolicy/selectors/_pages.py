"""KVCrush by pages: the same selection over blocks of consecutive positions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
