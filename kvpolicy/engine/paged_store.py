"""The slots of a layer with a budget for each head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine import capacity
from kvpolicy.engine.accounting import bytes_by_kind
from kvpolicy.engine.attention import Past, ScoreTransform
from kvpolicy.engine.decode import NO_PAGE, NO_SLOT, assert_async
from kvpolicy.engine.host import on_host
from kvpolicy.engine.link import Link
from kvpolicy.engine.page_attention import ExactPages, attend_pages
from kvpolicy.engine.pages import (
    RowPages,
    best_slot,
    lowest_of_head,
    owned_by,
    page_table,
    place_tokens,
    row_pages,
)
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.rollback import undoable
from kvpolicy.engine.selection import HeadBudgets, Selection, finite_priority, select_tokens
from kvpolicy.engine.state import alloc_paged_state, map_slots, slot_tensors
from kvpolicy.engine.store import LayerStore, RowBudget
from kvpolicy.engine.token_batch import BEYOND
from kvpolicy.engine.undo_log import UNDO_LOG
from kvpolicy.protocols import (
    SINGLE_RANK,
    Codec,
    DecodeMode,
    HeadAllocator,
    HeadShape,
    Layout,
    Ranks,
    Selector,
    State,
    View,
)


class PagedStore(LayerStore):
    """The slots of one layer in pages, each of which belongs to one KV head; see `kvpolicy.engine.pages`.

    The tensors have the shape [B, NB, P, ...] where those of `LayerStore` have [B, H, S, ...]. Every token is stored in
    full precision; see `kvpolicy.engine.coded_pages` for codes.

    Attributes:
        head_allocator: Divides the pages of a row among its heads, after each prompt.
        owner: KV head of each page, [B, NB] int64; H for a page that the row does not use.
        average: Tokens of an average head in whole pages, [B] int64: the budget that the selector sees.
        complete: Whether a row has all the pages of its budget, [B] bool: only then are tokens evicted in a step.
    """

    is_paged = True
    owner: Tensor
    average: Tensor
    complete: Tensor

    def __init__(
        self, layer_idx: int, selector: Selector, codec: Codec, decode: DecodeMode, head_allocator: HeadAllocator
    ) -> None:
        """Make an empty store from the parts of a layer."""
        super().__init__(layer_idx, selector, codec, decode)
        self.head_allocator = head_allocator

    def initialize(self, keys: Tensor, ranks: Ranks = SINGLE_RANK, group: int = 1) -> None:
        """Allocate a layer without pages, like `keys` [B, H, P, D], the first, with `group` query heads for each."""
        super().initialize(keys, ranks, group)
        batch, heads, _, dim = keys.shape
        self.keys = keys.new_empty(batch, 0, 0, dim)
        self.values = keys.new_empty(batch, 0, 0, dim)
        self.positions = torch.empty(batch, 0, 0, dtype=torch.int32, device=keys.device)
        self.state = alloc_paged_state(self.selector, batch, heads, 0, 0, keys.device, HeadShape(group, dim))
        self.owner = self.length.new_empty(batch, 0)
        self.average = torch.zeros_like(self.budget)
        self.complete = torch.zeros_like(self.budget, dtype=torch.bool)
        nothing = torch.zeros(batch, dtype=torch.int64)
        self._rows = RowPages(nothing, nothing, nothing)

    # a prompt

    @on_host
    def compress(
        self,
        pending: PendingPrompt,
        budget: RowBudget,
        *,
        massive: Tensor | None = None,
        rope_offset: Tensor | None = None,
    ) -> None:
        """Bring a prompt under the budget: select, divide the pages among the heads, and place the selected tokens.

        Args:
            pending: The prompt, from `attend_prompt`.
            budget: Tokens of each row.
            massive: Unused: nothing is pinned in pages.
            rope_offset: Unused: keys are stored rotated.
        """
        seen_before = self.length
        self.length = pending.lengths(seen_before)
        first = seen_before == 0  # such a row has no pages, whether it got a token now or not
        idle = None if pending.idle is None else (pending.idle & ~first).cpu()
        rows, last = self._budget_pages(budget, idle)
        device = self.positions.device
        size = rows.size.to(device)
        body = rows.body.to(device)
        each = body // self._all_heads
        self.average = each * size
        positions, state = self._held_slots()
        past = self.past() if pending.reads_past else None
        selected = select_tokens(
            self.selector,
            positions,
            state,
            pending,
            past,
            seen_before=seen_before,
            length=self.length,
            keep=self.average,
            layer_idx=self.layer_idx,
            ranks=self.ranks,
            heads=HeadBudgets(self.head_allocator, body, size, torch.maximum(-(-last.to(device) // size), each)),
        )
        assert selected.head_pages is not None
        pages = selected.head_pages + rows.tail.to(device)[:, None]
        if idle is not None:  # a row without a new token keeps the pages that it has, whatever was divided
            pages = torch.where(idle.to(device)[:, None], self._pages_by_head() // self._pieces(self._rows), pages)
        self._rows = rows
        self._set_expected(budget, idle)
        # A page of a row is cut to the smallest page of the batch, which is a divisor, as all are powers of two.
        smallest = int(rows.size.min())
        counts = pages * (rows.size // smallest).to(device)[:, None]
        self._place_selected(pending, selected, past, counts, smallest)
        self.layout = self.find_layout()
        self.fix_addresses()
        self.demote()

    def _budget_pages(self, budget: RowBudget, idle: Tensor | None) -> tuple[RowPages, Tensor]:
        """The pages of each row, and `budget.last`; a row without a new token keeps those that it has."""
        assert budget.last is not None, "pages depend on all tokens that will come"
        rows = row_pages(budget.keep.cpu(), budget.extra.cpu(), budget.last.cpu(), self._all_heads)
        if idle is not None:
            rows = RowPages(*(torch.where(idle, old, new) for old, new in zip(self._rows, rows, strict=True)))
        return rows, budget.last

    def _held_slots(self) -> tuple[Tensor, State]:
        """Positions [B, H, n] of the slots of each head, -1 for an empty one, and the selector's state of them."""
        table = page_table(self.owner, self.heads)
        return table.occupied(self.positions), map_slots(table.slots, self.state)

    def _place_selected(
        self, pending: PendingPrompt, selected: Selection, past: Past | None, counts: Tensor, size: int
    ) -> None:
        """Lay out the selected tokens in pages.

        Args:
            pending: The prompt.
            selected: The selection among the slots, as `_held_slots` has them, and the tokens of the prompt.
            past: The slots, decoded, if they were read.
            counts: Pages of each head, [B, H].
            size: Slots of a page.
        """
        keys = pending.keys
        values = pending.values
        if self.owner.shape[1]:  # a first prompt is not copied whole
            past = past or self.past()
            assert past is not None
            keys = torch.cat([past.keys, keys], 2)
            values = torch.cat([past.values, values], 2)
        placed = place_tokens(selected.positions, selected.chosen, counts, size)
        self.owner = placed.owner
        # Empty slots have a weight of 0, and 0 times an arbitrary number of padding might be NaN.
        self.keys = placed.take(keys).masked_fill_(placed.empty[..., None], 0)
        self.values = placed.take(values).masked_fill_(placed.empty[..., None], 0)
        self.positions = placed.take(selected.positions).masked_fill_(placed.empty, -1)
        self.state = map_slots(lambda t: placed.take(t).masked_fill_(placed.empty, 0), selected.state)

    def _set_expected(self, budget: RowBudget, idle: Tensor | None) -> None:
        """Record the budget of each row, and the tokens that it has slots for."""
        expected = budget.expected_len.tolist()
        self.expected_len = capacity.merge_expected(
            self.expected_len, expected, None if idle is None else idle.tolist()
        )
        self.capacity = max(*self.expected_len, self.capacity)
        most = (budget.keep + budget.extra).to(self.budget.device)
        self._set_budget(most if idle is None else torch.where(idle.to(most.device), self.budget, most))
        self.complete = self._find_complete()

    def find_layout(self) -> Layout:
        """The slots of an average head."""
        return Layout(-(-self.positions[0].numel() // max(1, self.heads)))

    # reading and writing

    def past(self) -> Past | None:
        """Every slot, [B, H, n, D], where n is that of the head with the most pages; None if there are none."""
        if not self.owner.shape[1]:
            return None
        table = page_table(self.owner, self.heads)
        return Past(table.slots(self.keys), table.slots(self.values), table.occupied(self.positions) >= 0)

    def step_targets(self) -> list[tuple[Tensor, int]]:
        """Tensors that a step writes slots of, in the order of the writes, and the heads of each."""
        per_slot = (self.keys, self.values, self.positions, *slot_tensors(self.state))
        return [(flat_pages(target), self.heads) for target in per_slot]

    def _write_rows(self, target: Tensor, slots: Tensor, data: Tensor, mask: Tensor | None) -> None:
        # All pages of a row are written as one head. Its slots are distinct, as they must be: heads share no page.
        flat = flat_pages(target)
        slots = slots.flatten(1, 2)[:, None]
        mask = None if mask is None else mask.flatten(1, 2)[:, None]
        super()._write_rows(flat, slots, data.flatten(1, 2)[:, None], mask)

    # a decode step

    def _view(self) -> View:
        return View(self.positions, self.length, self.average, self.layer_idx, self.ranks)

    def _attend(self, q: Tensor, transform: ScoreTransform, want_weights: bool) -> tuple[Tensor, Tensor | None]:
        self._count_read(self.link)
        occupied = self.positions >= 0
        pages = ExactPages(self.keys, self.values)
        out, weights = attend_pages(q, pages, occupied, self.owner, self.heads, transform)
        return out, weights if want_weights else None

    def _free_slot(self, view: View, valid: Tensor | None) -> tuple[Tensor, None]:
        """A slot for each head's new token, [B, H, 1], counted over all pages: an empty one, else the victim's."""
        self._require_pages(owned_by(self.owner, self.heads), valid)
        free = (~view.valid & (self.owner < self.heads)[..., None]).to(torch.int32) * BEYOND
        if self.can_run_out:
            has_free = (owned_by(self.owner, self.heads) & free.any(-1)[:, None]).any(-1).all(-1)
            fine = self.complete | has_free
            assert_async((fine if valid is None else fine | ~valid[:, 0]).all(), NO_SLOT)
        # An empty slot is taken before any token.
        return best_slot(torch.where(free > 0, free, self._victims(view)), self.owner, self.heads), None

    def _require_pages(self, owned: Tensor, valid: Tensor | None) -> None:
        """Refuse a step if a head that gets a token has no page: it would write into a page of another head.

        Args:
            owned: Which pages belong to each head, [B, H, NB] bool.
            valid: Which rows have a token, [B, 1] bool; None if all have.
        """
        has_page = owned.any(-1)
        assert_async((has_page if valid is None else has_page | ~valid).all(), NO_PAGE)

    def _victims(self, view: View) -> Tensor:
        """The position of each head's tokens of lowest priority, -1 for all others: of ties the latest is evicted."""
        priority = finite_priority(self.selector.priority(self.state, view)).masked_fill(~view.valid, torch.inf)
        low = lowest_of_head(priority, self.owner, self.heads)
        return view.positions.masked_fill(priority != low[..., None], -1)

    @property
    def moved(self) -> int:
        """Bytes that the last decode step read; the number that a step would read if none has been counted."""
        if not self.link.moved and self.is_initialized:
            expected = Link()
            expected.start()
            self._count_read(expected)
            return expected.moved
        return self.link.moved

    def _count_read(self, link: Link) -> None:
        link.whole((self.keys, self.values, self.positions, self.owner))

    # capacity

    def _count_free_steps(self) -> float:
        if bool(self.complete.all()):
            return capacity.UNLIMITED
        return int(self._free_slots().masked_fill(self.complete, BEYOND).min())

    def _find_complete(self) -> Tensor:
        if self.grows:
            return torch.zeros_like(self.budget, dtype=torch.bool)
        return self.budget <= self.budget.new_tensor(self.expected_len)

    def _free_slots(self) -> Tensor:
        """Empty slots of each row's fullest head, [B] int64."""
        return (self._pages_by_head() * self.positions.shape[-1] - self.tokens_by_head()).amin(-1)

    def ensure_capacity(self) -> int:
        """Add pages if the next step may find none: in a growing cache, or one that was announced too few tokens."""
        if self.free_steps >= 1:
            return 0
        steps = capacity.growth(self.tokens_by_head().amax(-1))
        if not self.grows:
            steps = torch.minimum(steps, self.budget - self.budget.new_tensor(self.expected_len))
        with undoable(self, ahead=1):
            return self._extend(steps.masked_fill(self.complete | (self._free_slots() > 0), 0).tolist())

    def reserve(self, new: int) -> int:
        """Make room for `new` more tokens at once, in a growing cache; returns how many the longest row was given."""
        more = (new - self._free_slots()).clamp_min(0)
        return self._extend(more.tolist()) if bool(more.any()) else 0

    def _extend(self, more: list[int]) -> int:
        """Let each head of a row hold so many tokens more; in a growing cache they raise the budget too."""
        old = self.capacity
        size = self._rows.size
        wanted = self._pages_by_head().cpu() // self._pieces(self._rows).cpu()
        for row, tokens in enumerate(more):
            if not tokens:
                continue
            self.expected_len[row] += tokens
            if self.grows:
                wanted[row] += -(-tokens // int(size[row]))
            else:
                # Not fewer than now: pages are rounded up while every token fits, and down at the full budget.
                wanted[row] = torch.maximum(wanted[row], self._evicting_pages(row))
        self.capacity = max(*self.expected_len, self.capacity)
        self._add_pages(wanted)
        self._set_budget(self.budget + self.budget.new_tensor(more) if self.grows else self.budget)
        self.complete = self._find_complete()
        self.layout = self.find_layout()
        self.fix_addresses()
        self.demote()
        return self.capacity - old

    def _evicting_pages(self, row: int) -> Tensor:
        """Pages of each head of a row that has not reached its budget: as many as fit, and equally many."""
        size = int(self._rows.size[row])
        budget = int(self.budget[row])
        if self.expected_len[row] < budget:
            return torch.full((self.heads,), -(-self.expected_len[row] // size))
        each, odd = divmod(budget * self._all_heads // size, self._all_heads)
        return (each + (torch.arange(self._all_heads) < odd).long())[self.ranks.held]

    def _add_pages(self, wanted: Tensor) -> None:
        """Give heads more pages, [B, H] in the page size of each row; pages that a row does not use come first."""
        new = (wanted * self._pieces(self._rows).cpu() - self._pages_by_head().cpu()).tolist()
        owners = self._body_owner.tolist()
        for row, heads in zip(owners, new, strict=True):
            asked = [head for head, count in enumerate(heads) for _ in range(count)]
            for page, head in enumerate(row):
                if head == self.heads and asked:
                    row[page] = asked.pop(0)
            row.extend(asked)
        pages = max(map(len, owners))
        self._lengthen_pages(self.owner.new_tensor([row + [self.heads] * (pages - len(row)) for row in owners]))

    def _lengthen_pages(self, owner: Tensor) -> None:
        """Have pages of these owners [B, NB], of which the first ones hold what they held."""
        added = owner.shape[1] - self.owner.shape[1]
        self.owner = owner
        if added:
            self.keys = F.pad(self.keys, (0, 0, 0, 0, 0, added))
            self.values = F.pad(self.values, (0, 0, 0, 0, 0, added))
            self.positions = F.pad(self.positions, (0, 0, 0, added), value=-1)
            self.state = map_slots(lambda t: F.pad(t, (0, 0, 0, added)), self.state)

    # sizes

    @property
    def _all_heads(self) -> int:
        """KV heads on all ranks."""
        return sum(self.ranks.heads) // self.ranks.replicas or self.heads

    def _pieces(self, rows: RowPages) -> Tensor:
        """Pages of the batch that make one page of a row, [B, 1]."""
        size = self.positions.shape[-1] or 1
        return (rows.size.clamp_min(size) // size).to(self.owner.device)[:, None]

    @property
    def _body_owner(self) -> Tensor:
        """The owners of the pages that the head allocator divides, [B, NB]."""
        return self.owner

    def _pages_by_head(self) -> Tensor:
        """[B, H] int64."""
        return owned_by(self._body_owner, self.heads).sum(-1)

    def tokens_by_head(self) -> Tensor:
        """Tokens that each head holds, [B, H] int64."""
        held = (self.positions >= 0).sum(-1)
        return (owned_by(self.owner, self.heads) * held[:, None]).sum(-1)

    def head_positions(self) -> Tensor:
        """Positions of the tokens of each head, [B, H, n] int32, -1 for an empty slot."""
        return page_table(self.owner, self.heads).occupied(self.positions)

    def describe(self) -> str:
        """Sizes of an initialized store, as a `repr` shows them."""
        rows, pages = self._body_owner.shape
        buffer = f", exact={self.layout.exact}" if self.layout.coded else ""
        held = f"pages={pages} of {self.positions.shape[-1]} slots{buffer}"
        return f"layer_idx={self.layer_idx}, rows={rows}, heads={self.heads}, {held}"

    def nbytes_by_kind(self) -> dict[str, int]:
        """Bytes by kind: exact, codes, scales, positions, statistics, counters."""
        if not self.is_initialized:
            return {}
        counters = (self.length, self.budget, self.average, self.complete, self.columns, *(self.limits or ()))
        kinds = bytes_by_kind((self.keys, self.values), self.codes, self.positions, self.state, counters)
        kinds["positions"] += self.owner.nbytes
        return kinds if self.undo is None else kinds | {UNDO_LOG: self.undo.nbytes}

    # rows

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every per-row tensor by `fn` of it, which selects or repeats rows."""
        if not self.is_initialized:
            return
        self.owner = fn(self.owner)
        self.average = fn(self.average)
        self.complete = fn(self.complete)
        self._rows = RowPages(*(fn(t) for t in self._rows))
        super().map_rows(fn)

    # all of it

    def parts(self) -> dict[str, State]:
        """Every tensor that the layer holds, by attribute."""
        return super().parts() | {"owner": self.owner, "average": self.average, "complete": self.complete}

    def empty_parts(self) -> dict[str, State]:
        """Tensors on the device `meta`, or empty ones, like those of `parts`, for the pages that are set."""
        batch = self.length.shape[0]
        dim = self.keys.shape[-1]
        pages, size = self._page_shape
        nowhere = torch.device("meta")
        per_slot = torch.empty(batch, pages, size, device=nowhere)
        exact = self.keys.new_empty(batch, pages, size, dim, device=nowhere)
        return self.parts() | {
            "keys": exact,
            "values": exact,
            "positions": per_slot.to(torch.int32),
            "state": alloc_paged_state(
                self.selector, batch, self.heads, pages, size, nowhere, HeadShape(self.group, dim)
            ),
            "owner": per_slot[..., 0].long(),
        }

    def numbers(self) -> dict[str, Any]:
        """The numbers of the layer on the host, as JSON values."""
        return super().numbers() | {
            "rows": [part.tolist() for part in self._rows],
            "pages": list(self.positions.shape[1:]),
        }

    def set_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Restore the result of `numbers`."""
        super().set_numbers(numbers)
        self._rows = RowPages(*map(torch.tensor, numbers["rows"]))
        pages, size = numbers["pages"]
        self._page_shape: tuple[int, int] = pages, size


def flat_pages(target: Tensor) -> Tensor:
    """All pages of a row as one long row of slots, [B, NB, P, ...] -> [B, 1, NB * P, ...]."""
    return target.view(target.shape[0], 1, -1, *target.shape[3:])
