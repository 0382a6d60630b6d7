"""Pages: slots of a layer that belong to single KV heads, so that heads may hold different numbers of tokens.

With head budgets, the slots of a row are `NB` pages of `P` slots. Each page belongs to one KV head, its `owner`, and a
head has as many pages as its budget says. `NB` follows from the layer's budget alone, so no shape depends on the
prompt. Every tensor that is [B, H, S, ...] without head budgets is [B, NB, P, ...] with them.

With a codec, pages hold codes. Every head has a full-precision buffer besides, [B, H, E, D], which all heads have
equally large. In positions, owners and the selector's state it appears as whole pages behind the others, the last of
which has slots that are never used: they have `NB + H * ceil(E / P)` pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine.token_batch import BEYOND
from kvpolicy.kernels.slot_writes import put
from kvpolicy.protocols import Layout
from kvpolicy.text.budget import page_size


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
    # The number of heads whose pages end before this one is the number of its head.
    return (page >= counts.cumsum(-1)[..., None]).sum(1)


def owned_by(owner: Tensor, heads: int) -> Tensor:
    """Which pages belong to each head, [B, H, NB] bool, of their owners [B, NB]."""
    return owner[:, None] == torch.arange(heads, device=owner.device)[:, None]


def _non_membership(owner: Tensor, numbers: Tensor) -> Tensor:
    """Which pages [B, NB] do not belong to each head with one of the `numbers` [H], [B, H, NB] bool."""
    return owner[:, None] != numbers[:, None]


class Owners(NamedTuple):
    """The owners of pages, as a step asks for them.

    Attributes:
        head: Head of each page, [B, NB] int64; the last head for a page that a row does not use.
        others: Which pages do not belong to each head, [B, H, NB] bool.
        unused: Pages that a row does not use, [B, NB] bool; None if there are none.
    """

    head: Tensor
    others: Tensor
    unused: Tensor | None

    @classmethod
    def of(cls, owner: Tensor, heads: int, once: Callable[..., Tensor], *, all_used: bool = False) -> Owners:
        """Those of pages with an `owner` [B, NB] each; `once` is that of a `StepMemo`."""
        numbers = once(torch.arange, heads, device=owner.device)
        others = once(_non_membership, owner, numbers)
        if all_used:
            return cls(owner, others, None)
        return cls(once(torch.clamp_max, owner, heads - 1), others, once(torch.eq, owner, heads))

    @property
    def owned(self) -> Tensor:
        """Which pages belong to each head, [B, H, NB] bool."""
        return ~self.others

    def first(self, number: int) -> Owners:
        """Those of the first pages."""
        unused = None if self.unused is None else self.unused[:, :number]
        return Owners(self.head[:, :number], self.others[..., :number], unused)

    def for_pages(self, t: Tensor) -> Tensor:
        """The entry of each page's head, [B, H, ...] -> [B, NB, ...]; of an unused page, that of the last head."""
        return of_their_heads(t, self.head)


def sum_pages(t: Tensor, share: Tensor) -> Tensor:
    """The sum over pages [B, NB, G, D] fp32 weighted by their shares [B, G, H, NB] in each head, [B, H, G, D]."""
    # A product, not a scatter: it adds the pages of a head in one order on every device.
    return (share @ t.transpose(1, 2)).transpose(1, 2)


def shares_of_slots(share: Tensor) -> Tensor:
    """The share of each page in its head, of shares [B, G, H, NB] that are 0 in other heads: [B, NB, G, 1]."""
    return share.sum(2).transpose(1, 2)[..., None]


def of_pages(of_heads: Tensor, owner: Tensor) -> Tensor:
    """Numbers of heads [B, H, n] for each page of their owners [B, NB], [B, NB, n]; of an unused page, any."""
    index = owner.clamp_max(of_heads.shape[1] - 1)[..., None]
    return of_heads.gather(1, index.expand(-1, -1, of_heads.shape[-1]))


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


class Placed(NamedTuple):
    """The tokens in the slots of the pages.

    Attributes:
        owner: [B, NB].
        source: Index of the token of each slot, [B, NB, P] int64; arbitrary for empty slots.
        empty: Slots without a token, [B, NB, P] bool.
    """

    owner: Tensor
    source: Tensor
    empty: Tensor

    def take(self, t: Tensor) -> Tensor:
        """Gather the tokens of `t` [B, H, n, ...] into the slots of the pages, [B, NB, P, ...]."""
        return take_for_pages(t, self.owner, self.source)


def place_tokens(positions: Tensor, chosen: Tensor, counts: Tensor, size: int) -> Placed:
    """Lay out the chosen tokens of each head in its pages, by position.

    Args:
        positions: [B, H, n], n at least 1.
        chosen: Which tokens are placed, [B, H, n] bool; no more than fit.
        counts: Pages of each head, [B, H].
        size: P.
    """
    heads = counts.shape[1]
    owner = page_owners(counts, heads, int(counts.sum(-1).max()))
    rank = head_slots(counts, owner, size)
    order = torch.where(chosen, positions, BEYOND).argsort(dim=-1, stable=True)
    # A head may have more slots than there are candidates. Such a slot repeats the last one, and is `empty`.
    source = take_for_pages(order, owner, rank.clamp_max(order.shape[-1] - 1))
    taken = for_pages(chosen.sum(-1), owner)[..., None]
    return Placed(owner, source, (rank >= taken) | (owner == heads)[..., None])


class PageTable(NamedTuple):
    """The pages of each head, for reading them as [B, H, S, ...].

    Attributes:
        page: Page of each head, [B, H, n], in order of the pages; arbitrary beyond the pages of a head.
        used: Which of these belong to the head, [B, H, n] bool.
    """

    page: Tensor
    used: Tensor

    def slots(self, t: Tensor) -> Tensor:
        """[B, NB, P, ...] -> [B, H, n * P, ...]; entries beyond a head's pages are undefined."""
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


def buffer_pages(slots: int, size: int) -> int:
    """Pages of `size` slots in which a head's full-precision buffer of `slots` slots appears."""
    return -(-slots // size) if slots else 0


def as_pages(t: Tensor, size: int, fill: int = 0) -> Tensor:
    """Slots of each head as whole pages, head by head, [B, H, E] -> [B, H * ceil(E / size), size]."""
    more = -t.shape[-1] % size
    return (F.pad(t, (0, more), value=fill) if more else t).unflatten(-1, (-1, size)).flatten(1, 2)


# one decode step, traceable


def from_pages(t: Tensor, heads: int, slots: int) -> Tensor:
    """The inverse of `as_pages`, [B, H * n, P] -> [B, H, E] for E `slots`."""
    return t.unflatten(1, (heads, t.shape[1] // heads)).flatten(2)[..., :slots]


def first_free(positions: Tensor, owner: Tensor, heads: int, count: int) -> Tensor:
    """The first `count` empty slots of each head, counted over all pages, [B, H, count]; 0 beyond those that it has.

    Args:
        positions: [B, NB, P].
        owner: [B, NB].
        heads: H.
        count: How many of each head.

    Examples:
        >>> first_free(torch.tensor([[[7, -1], [-1, 3], [-1, -1]]]), torch.tensor([[0, 1, 0]]), 2, 2).tolist()
        [[[1, 4], [2, 0]]]
    """
    free = (positions < 0) & (owner < heads)[..., None]
    each = free.sum(-1)
    # Counted head by head, because pages that were added later may stand between those of other heads.
    up_to = (owned_by(owner, heads) * each[:, None]).cumsum(-1)  # [B, H, NB]
    before = up_to.gather(1, owner.clamp_max(heads - 1)[:, None]).squeeze(1) - each
    rank = before[..., None] + free.cumsum(-1) - 1
    # Slots that are not asked for are scattered to an extra entry, which is cut off.
    entry = torch.where(free & (rank < count), owner[..., None] * count + rank, heads * count).flatten(1)
    found = torch.zeros(entry.shape[0], heads * count + 1, dtype=torch.int64, device=entry.device)
    slots = torch.arange(entry.shape[1], device=entry.device).expand_as(entry)
    return found.scatter(1, entry, slots)[:, :-1].unflatten(1, (heads, count))


def write_pages(target: Tensor, slots: Tensor, data: Tensor, write_mask: Tensor) -> None:
    """Write tokens of each head into slots, in place; see `put`, with slots counted over all pages.

    Args:
        target: [B, NB, P, ...], contiguous.
        slots: [B, H, n] int64; arbitrary where `write_mask` is not set.
        data: [B, H, n, ...].
        write_mask: Which tokens are written, [B, H, n] bool.
    """
    batch, pages, size, *vector = target.shape
    row = target.view(batch, 1, pages * size, *vector)
    put(row, data.flatten(1, 2)[:, None], slots.flatten(1, 2)[:, None], write_mask.flatten(1, 2)[:, None])


def lowest_of_head(values: Tensor, owners: Owners) -> Tensor:
    """The smallest of the values [B, NB, P] fp32 of each page's head, [B, NB]; inf for unused pages."""
    low = owners.for_pages(values.amin(-1)[:, None].masked_fill(owners.others, torch.inf).amin(-1))
    return low if owners.unused is None else low.masked_fill(owners.unused, torch.inf)


def for_pages(t: Tensor, owner: Tensor) -> Tensor:
    """The entry of each page's head, [B, H, ...] -> [B, NB, ...]; of an unused page, that of the last head."""
    return of_their_heads(t, owner.clamp_max(t.shape[1] - 1))


def of_their_heads(t: Tensor, head: Tensor) -> Tensor:
    """The entries of heads [B, NB], [B, H, ...] -> [B, NB, ...]."""
    index = head.reshape(*head.shape, *[1] * (t.dim() - 2))
    return t.gather(1, index.expand(*head.shape, *t.shape[2:]))


def best_slot(values: Tensor, owners: Owners) -> Tensor:
    """The first slot of largest value of each head, counted over all pages, [B, H, 1] int64.

    Args:
        values: [B, NB, P] integers of at least -1.
        owners: The owners of the pages.
    """
    size = values.shape[-1]
    best, offset = values.max(-1)
    page = best[:, None].masked_fill(owners.others, -2).argmax(-1)
    return torch.add(offset.gather(-1, page), page, alpha=size)[..., None]


def paged_layout(buffer: int, pages: int, size: int, heads: int) -> Layout:
    """The slots of an average head: those of its buffer, and those of its pages."""
    return Layout(buffer, (-(-pages * size // max(1, heads)),))
