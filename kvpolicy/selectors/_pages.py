"""KVCrush by pages: the same choice over blocks of consecutive positions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Pages(NamedTuple):
    """A head's tokens by page of the original positions; every tensor [B, H, M].

    Attributes:
        of: Page of each token, [B, H, N] int64, M - 1 for what is not valid.
        size: Tokens in the page.
        value: Sum of its tokens' worth; inf where one of them must be kept.
        distance: Sum of its tokens' distances: the distance of the concatenated signatures.
    """

    of: Tensor
    size: Tensor
    value: Tensor
    distance: Tensor


def paginate(positions: Tensor, page: int, worth: Tensor, distance: Tensor) -> Pages:
    """Group tokens into pages of `page` positions."""
    valid = positions >= 0
    of = positions.long().div(page, rounding_mode="floor")
    last = int(of.max()) + 1
    of = of.where(valid, last)

    def total(x: Tensor) -> Tensor:
        empty = torch.zeros(*of.shape[:2], last + 1, dtype=x.dtype, device=x.device)
        summed = empty.scatter_add_(-1, of, x.masked_fill(~valid, 0))
        return summed.index_fill(-1, torch.tensor(last, device=x.device), 0)

    must = total((worth == torch.inf).float()) > 0
    value = total(worth.masked_fill(worth == torch.inf, 0)).masked_fill(must, torch.inf)
    return Pages(of, total(valid.long()), value, total(distance))


def best_pages(pages: Pages, room: Tensor) -> Tensor:
    """The page of the newest token, then those of highest value, while they fit into `room` [B]; [B, H, M] bool."""
    value = pages.value.masked_fill(pages.size == 0, -torch.inf)
    order = value.argsort(dim=-1, descending=True, stable=True)
    number = torch.arange(value.shape[-1], device=value.device)
    newest = torch.where(pages.size > 0, number, -1).amax(-1, keepdim=True)
    order = order.gather(-1, (order != newest).int().argsort(dim=-1, stable=True))
    fits = pages.size.gather(-1, order).cumsum(-1) <= room[:, None, None]
    return torch.zeros_like(fits).scatter_(-1, order, fits) & (pages.size > 0)


def least_room(tokens: int, page: int) -> int:
    """Tokens of the pages that `tokens` need at least: the newest token's, and those of the others in a row."""
    return (1 - (1 - tokens) // page) * page if page else tokens


def mark_tokens(pages: Pages, chosen: Tensor) -> Tensor:
    """From chosen pages [B, H, M] to their tokens, [B, H, N] bool."""
    return chosen.gather(-1, pages.of)
