"""Pages: slots of a layer that belong to single KV heads, so that heads may hold different numbers of tokens.

With head budgets, the slots of a row are `NB` pages of `P` slots. Each page belongs to one KV head, its `owner`, and a
head has as many pages as its budget says. `NB` follows from the layer's budget alone, so no shape depends on the
prompt. Every tensor that is [B, H, S, ...] without head budgets is [B, NB, P, ...] with them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.spec.page_sizes import page_size


class Pages(NamedTuple):
    """The pages of a layer: `number` in each row, of `size` slots each."""

    number: int
    size: int


class RowPages(NamedTuple):
    """The pages of each row, as it would have them alone in a batch, [B] int64 each.

    Attributes:
        size: Slots of a page, a power of two.
        body: Pages that the head allocator divides among the heads.
        tail: Pages that each head gets in addition, for tokens that are kept beyond the budget.
    """

    size: Tensor
    body: Tensor
    tail: Tensor

    def allocated(self, heads: int) -> Pages:
        """The pages of a batch of such rows, cut to the smallest page of any row."""
        size = int(self.size.min())
        slots = (self.body + heads * self.tail) * self.size
        return Pages(int(slots.max()) // size, size)


def row_pages(keep: Tensor, extra: Tensor, last: Tensor, heads: int) -> RowPages:
    """The pages of each row.

    Args:
        keep: Tokens that a head holds on average, [B].
        extra: Tokens that each head may hold in addition, [B].
        last: The most tokens that the row may ever have without `extra`, as far as is known, [B].
        heads: KV heads on all ranks.

    Examples:
        >>> row_pages(torch.tensor([100]), torch.tensor([0]), torch.tensor([500]), 4)
        RowPages(size=tensor([8]), body=tensor([50]), tail=tensor([0]))
    """
    rows = zip(keep.tolist(), extra.tolist(), last.tolist(), strict=True)
    found = [_pages_of_row(*row, heads) for row in rows]
    return RowPages(*(keep.new_tensor(column) for column in zip(*found, strict=True)))


def _pages_of_row(keep: int, extra: int, last: int, heads: int) -> tuple[int, int, int]:
    size = page_size(min(keep, last))
    # Where every token fits into the budget, none may be lost to rounding.
    body = heads * -(-last // size) if keep >= last else keep * heads // size
    return size, body, -(-extra // size)


def page_owners(counts: Tensor, heads: int, pages: int) -> Tensor:
    """The owner of each page, [B, NB] int64, head by head; `heads` for a page that a row does not use.

    Args:
        counts: Pages of each head, [B, H] int64.
        heads: H.
        pages: NB.

    Examples:
        >>> page_owners(torch.tensor([[2, 1], [1, 1]]), 2, 3).tolist()
        [[0, 0, 1], [0, 1, 2]]
    """
    page = torch.arange(pages, device=counts.device)
    return (page >= counts.cumsum(-1)[..., None]).sum(1)


def owned_by(owner: Tensor, heads: int) -> Tensor:
    """Which pages belong to each head, [B, H, NB] bool, of their owners [B, NB]."""
    return owner[:, None] == torch.arange(heads, device=owner.device)[:, None]


def head_slots(counts: Tensor, owner: Tensor, size: int) -> Tensor:
    """The rank of each slot among the slots of its head, [B, NB, P] int64, where pages stand head by head.

    Args:
        counts: Pages of each head, [B, H].
        owner: From `page_owners`, [B, NB].
        size: P.
    """
    first = (counts.cumsum(-1) - counts).gather(-1, owner.clamp_max(counts.shape[-1] - 1))
    number = torch.arange(owner.shape[-1], device=owner.device) - first
    return number[..., None] * size + torch.arange(size, device=owner.device)


def take_for_pages(t: Tensor, owner: Tensor, index: Tensor) -> Tensor:
    """Entries of each page's head, [B, H, N, ...] -> [B, NB, P, ...].

    Args:
        t: The entries of each head.
        owner: [B, NB]; of an unused page, those of the last head.
        index: Entry of each slot, [B, NB, P].
    """
    rows = torch.arange(owner.shape[0], device=owner.device)[:, None, None]
    return t[rows, owner.clamp_max(t.shape[1] - 1)[..., None], index]


class PageTable(NamedTuple):
    """Where the pages of each head are, for reading them as [B, H, S, ...].

    Attributes:
        page: Page of each head, [B, H, n], in order of the pages; any page beyond those that a head has.
        used: Which of these belong to the head, [B, H, n] bool.
    """

    page: Tensor
    used: Tensor

    def slots(self, t: Tensor) -> Tensor:
        """[B, NB, P, ...] -> [B, H, n * P, ...]; entries beyond a head's pages are any."""
        rows = torch.arange(t.shape[0], device=t.device)[:, None, None]
        return t[rows, self.page].flatten(2, 3)

    def occupied(self, positions: Tensor) -> Tensor:
        """Positions [B, NB, P] -> [B, H, n * P], -1 beyond a head's pages."""
        size = positions.shape[-1]
        return self.slots(positions).masked_fill(~self.used.repeat_interleave(size, -1), -1)


def page_table(owner: Tensor, heads: int) -> PageTable:
    """The pages of each head.

    Args:
        owner: [B, NB].
        heads: H.

    Examples:
        >>> table = page_table(torch.tensor([[0, 1, 0]]), 2)
        >>> table.page.tolist(), table.used.tolist()
        ([[[0, 2], [1, 0]]], [[[True, True], [True, False]]])
    """
    mine = owned_by(owner, heads)
    counts = mine.sum(-1)
    # Stable, so that a head's own pages come first in their order.
    order = (~mine).to(torch.uint8).argsort(dim=-1, stable=True)[..., : int(counts.max())]
    return PageTable(order, torch.arange(order.shape[-1], device=owner.device) < counts[..., None])


# one decode step, traceable


def lowest_of_head(values: Tensor, owner: Tensor, heads: int) -> Tensor:
    """The smallest value of each page's head, [B, NB]; inf for unused pages.

    Args:
        values: [B, NB, P] fp32.
        owner: [B, NB].
        heads: H.
    """
    mine = owned_by(owner, heads)
    low = values.amin(-1)[:, None].masked_fill(~mine, torch.inf).amin(-1)
    return for_pages(low, owner).masked_fill(owner == heads, torch.inf)


def for_pages(t: Tensor, owner: Tensor) -> Tensor:
    """The entry of each page's head, [B, H, ...] -> [B, NB, ...]; of an unused page, that of the last head."""
    index = owner.clamp_max(t.shape[1] - 1).reshape(*owner.shape, *[1] * (t.dim() - 2))
    return t.gather(1, index.expand(*owner.shape, *t.shape[2:]))


def best_slot(values: Tensor, owner: Tensor, heads: int) -> Tensor:
    """The first slot of largest value of each head, counted over all pages, [B, H, 1] int64.

    Args:
        values: [B, NB, P] integers of at least -1.
        owner: [B, NB].
        heads: H.
    """
    size = values.shape[-1]
    best, offset = values.max(-1)
    page = best[:, None].masked_fill(~owned_by(owner, heads), -2).argmax(-1)
    return (page * size + offset.gather(-1, page))[..., None]
