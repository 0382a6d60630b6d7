"""A budget for each head of a layer: its slots are pages, each of which belongs to one KV head.

See `kvpolicy.engine.pages`. The tensors have the shape [B, NB, P, ...] where those of equal heads have [B, H, S, ...].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine import layout
from kvpolicy.engine.attention_part import Part
from kvpolicy.engine.coded_pages import CodedPageBody
from kvpolicy.engine.exact_pages import ExactPageBody
from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.layer_tensors import LayerTensors
from kvpolicy.engine.link import Link
from kvpolicy.engine.merging import SlotMerge
from kvpolicy.engine.page_slots import tokens_by_head
from kvpolicy.engine.pages import Pages, RowPages, buffer_pages, owned_by, page_table, row_pages
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.row_limits import RowBudget, buffer_slots
from kvpolicy.engine.selection import HeadBudgets, rank_candidates, select_tokens
from kvpolicy.engine.token_batch import BEYOND, SlotData
from kvpolicy.engine.undo_log import Targets
from kvpolicy.protocols import LayerShape, Layout, State, View
from kvpolicy.statistics.windows import Past, ScoreTransform


class Room(NamedTuple):
    """Pages for a prompt and for what is held, of each row.

    Attributes:
        rows: The pages.
        average: Slots of an average head, [B] int64.
        keep: The tokens that the selector is to reckon with, [B] int64.
        most: The new budget, [B] int64.
        expected: The most tokens that the row will hold, as far as is known, [B] int64.
        heads: Divides the pages among the heads; None if every token is kept.
    """

    rows: RowPages
    average: Tensor
    keep: Tensor
    most: Tensor
    expected: Tensor
    heads: HeadBudgets | None = None


class PageGeometry:
    """The slots of a layer with a budget for each head; see `kvpolicy.engine.geometry.Geometry`.

    The layer's head allocator divides the pages of a row among its heads, after each prompt.
    """

    def __init__(self, layer: LayerContents) -> None:
        """Arrange the slots of `layer`, which has a head allocator."""
        heads = layer.spec.heads
        assert heads is not None, "a layer without a head allocator has no pages"
        self._layer = layer
        self._spec = layer.spec
        self._allocator = heads
        self._body = CodedPageBody(layer) if layer.spec.stages else ExactPageBody(layer)
        self._page_shape: tuple[int, int] = (0, 0)  # pages and their slots, as `set_numbers` restored them

    def alloc(self, batch: int, shape: LayerShape, device: torch.device | str) -> LayerTensors:
        """Empty tensors for the pages that `set_numbers` restored, none before; on the device `meta` too."""
        number, size = self._page_shape
        buffer = self._layer.layout.exact if self._spec.stages else 0
        pages = Pages(number - shape.heads * buffer_pages(buffer, size), size)
        return LayerTensors.of_pages(self._spec, batch, shape, pages, buffer, device)

    def find_layout(self) -> Layout:
        """The layout, from the tensors where they determine it."""
        return self._body.find_layout()

    # a prompt

    def compress(self, pending: PendingPrompt, budget: RowBudget, *, massive: Tensor | None = None) -> None:
        """Bring a prompt under the budget: select, divide the pages among the heads, and place the selected tokens.

        Args:
            pending: The prompt, from `attend_prompt`.
            budget: Tokens of each row.
            massive: Unused: nothing is pinned in pages.
        """
        layer = self._layer
        tensors = layer.tensors
        seen_before = tensors.length
        tensors.length = pending.lengths(seen_before)
        first = seen_before == 0  # such a row has no pages, whether it got a token now or not
        idle = None if pending.idle is None else (pending.idle & ~first).cpu()
        device = tensors.positions.device
        room = self._divided(budget, idle) if budget.added is None else self._added(budget, budget.added)
        tensors.paged().average = room.average
        merges = self._spec.merger_traits.when != "never"
        past = self.past() if pending.reads_past or merges else None
        # The ranking has no name here, so that its statistics are freed before the tokens are placed.
        selected = select_tokens(
            rank_candidates(layer, self.held_slots(), pending, past, seen_before, room.keep), pending.idle, room.heads
        )
        held = self._pages_by_head() // self._pieces()
        if selected.head_pages is None:
            pages = held + (room.rows.tail - self._rows.tail).to(device)[:, None]
        else:
            pages = selected.head_pages + room.rows.tail.to(device)[:, None]
            if idle is not None:  # a row without a new token keeps the pages that it has, whatever was divided
                pages = torch.where(idle.to(device)[:, None], held, pages)
        layer.row_pages = room.rows
        # Pages are made anew, so that a row may have fewer of them than before, where its end became known.
        before = torch.tensor(layer.expected_len, device="cpu")
        layer.expected_len = (room.expected if idle is None else torch.where(idle, before, room.expected)).tolist()
        layer.capacity = max(layer.expected_len)
        layer.set_budget(room.most if idle is None else torch.where(idle.to(device), tensors.budget, room.most))
        tensors.paged().complete = self._find_complete()
        # A page of a row is cut to the smallest page of the batch, which is a divisor, as all are powers of two.
        smallest = int(room.rows.size.min())
        counts = pages * (room.rows.size // smallest).to(device)[:, None]
        self._body.place(pending, selected, past, counts, smallest)
        layer.layout = self.find_layout()
        self.fix_addresses()

    def _divided(self, budget: RowBudget, idle: Tensor | None) -> Room:
        """Room for what fits into a budget, which the head allocator divides."""
        device = self._layer.tensors.positions.device
        rows, last = self._budget_pages(budget, idle)
        size = rows.size.to(device)
        body = rows.body.to(device)
        each = body // self._all_heads
        heads = HeadBudgets(self._allocator, body, size, torch.maximum(-(-last.to(device) // size), each))
        most = (budget.keep + budget.extra).to(device)
        return Room(rows, each * size, each * size, most, budget.expected_len, heads)

    def _added(self, budget: RowBudget, added: Tensor) -> Room:
        """Room for all that is held and `added` [B] tokens more: whole pages for every head, of its page size."""
        tensors = self._layer.tensors
        lacking = ((budget.keep + budget.extra).cpu() - tensors.budget.cpu()).clamp_min(0)
        pages = -(-lacking // self._rows.size.clamp_min(1))
        rows = self._rows._replace(tail=self._rows.tail + pages)
        more = (pages * rows.size).to(tensors.positions.device)  # all slots of a page may be used
        most = tensors.budget + more
        keep = self.tokens_by_head().amax(-1) + added.to(most.device)
        expected = torch.tensor(self._layer.expected_len, device="cpu") + more.cpu()
        return Room(rows, tensors.paged().average + more, keep, most, expected)

    def _budget_pages(self, budget: RowBudget, idle: Tensor | None) -> tuple[RowPages, Tensor]:
        """The pages of each row, and `budget.last`; a row without a new token keeps those that it has."""
        assert budget.last is not None, "pages depend on all tokens that will come"
        rows = row_pages(budget.keep.cpu(), budget.extra.cpu(), budget.last.cpu(), self._all_heads)
        if idle is not None:
            rows = RowPages(*(torch.where(idle, old, new) for old, new in zip(self._rows, rows, strict=True)))
        return rows, budget.last

    # reading and writing

    def past(self) -> Past | None:
        """Every slot, decoded, [B, H, n, D], n as many as the fullest head has; None if there are none."""
        return self._body.past()

    def held_slots(self) -> tuple[Tensor, State]:
        """Positions of the slots of each head, [B, H, n] int32, and the selector's state of them."""
        return self._body.held_slots()

    def write(self, slots: Tensor, data: SlotData, mask: Tensor | None) -> None:
        """Write new tokens to the slots that `free_slot` found, in place, where `mask` [B, H, n] is set."""
        self._body.write(slots, data, mask)

    def step_targets(self) -> Targets:
        """The tensors that a decode step writes to, by name, and the slots of each head."""
        return self._body.step_targets()

    def refresh(self, slots: Tensor) -> None:
        """Update what is computed from slots after they were written back: nothing."""

    # a decode step

    def free_slot(self, view: View, valid: Tensor | None) -> tuple[Tensor, SlotMerge | None]:
        """A slot for each head's new token, [B, H, 1], as the pages count them, and where an evicted one goes."""
        return self._body.free_slot(view, valid)

    def attend(self, q: Tensor, transform: ScoreTransform, want_weights: bool) -> tuple[Tensor, Tensor | None]:
        """Attend from one token per row to every page."""
        self.count_read(self._layer.link)
        found = self._body.attend(q, transform)
        return found.out, found.weights if want_weights else None

    def attend_part(self, queries: Tensor, transform: ScoreTransform, *, whole: bool) -> Part:
        """Attend from many queries of each head to every page; see `Geometry.attend_part`."""
        heads, number = queries.shape[1:3]
        found = self._body.attend(queries.flatten(1, 2)[:, :, None], transform)
        return Part(found.out.unflatten(1, (heads, number))[:, :, :, 0], found.normalizer)

    def count_read(self, link: Link) -> None:
        """Count on `link` what a decode step reads."""
        self._body.count_read(link)

    # demotion

    def full_rows(self) -> Tensor | None:
        """Rows with a head whose full-precision buffer is full, [B] bool; None if no codec demotes tokens."""
        room = self._body.buffer_room()
        return None if room is None else (room <= 0).any(-1)

    def demote(self) -> None:
        """Demote a block of every head with a full buffer. Traceable, no host sync."""
        self._body.demote_block()

    # growing

    def count_free_steps(self) -> float:
        """Decode steps until tokens must be demoted, or pages added."""
        complete = self._layer.tensors.paged().complete
        steps = layout.UNLIMITED
        if not bool(complete.all()):
            steps = int(self._free_slots().masked_fill(complete, BEYOND).min())
        room = self._body.buffer_room()
        return steps if room is None else min(steps, int(room.min()))

    def _find_complete(self) -> Tensor:
        """Whether each row has slots for its whole budget, so that it evicts, [B] bool."""
        budget = self._layer.tensors.budget
        if self._spec.grows:
            return torch.zeros_like(budget, dtype=torch.bool)
        return budget <= budget.new_tensor(self._layer.expected_len)

    def _free_slots(self) -> Tensor:
        """Empty slots of each row's fullest head, [B] int64."""
        return (self._pages_by_head() * self._layer.tensors.positions.shape[-1] - self.tokens_by_head()).amin(-1)

    def tokens_needed(self) -> list[int]:
        """Tokens that each head of a row must be given slots for before the next step."""
        tensors = self._layer.tensors
        steps = layout.growth(self.tokens_by_head().amax(-1))
        if not self._spec.grows:
            steps = torch.minimum(steps, tensors.budget - tensors.budget.new_tensor(self._layer.expected_len))
        return steps.masked_fill(tensors.paged().complete | (self._free_slots() > 0), 0).tolist()

    def tokens_lacking(self, new: int) -> list[int]:
        """Tokens that each head of a row must be given slots for so that `new` more fit at once."""
        return (new - self._free_slots()).clamp_min(0).tolist()

    def extend(self, more: list[int]) -> int:
        """Let each head of a row hold so many tokens more; in a growing cache they raise the budget too."""
        layer = self._layer
        tensors = layer.tensors
        old = layer.capacity
        size = self._rows.size
        wanted = self._pages_by_head().cpu() // self._pieces().cpu()
        for row, tokens in enumerate(more):
            if not tokens:
                continue
            layer.expected_len[row] += tokens
            if self._spec.grows:
                wanted[row] += -(-tokens // int(size[row]))
            else:
                # Not fewer than now: pages are rounded up while every token fits, and down at the full budget.
                wanted[row] = torch.maximum(wanted[row], self._evicting_pages(row))
        layer.capacity = max(*layer.expected_len, layer.capacity)
        self._add_pages(wanted)
        budget = tensors.budget + tensors.budget.new_tensor(more) if self._spec.grows else tensors.budget
        layer.set_budget(budget)
        tensors.paged().complete = self._find_complete()
        layer.layout = self.find_layout()
        self.fix_addresses()
        return layer.capacity - old

    # rows that come and go

    def begin_rows(self, each: int, size: int) -> None:
        """Give every head of a layer without pages `each` pages of `size` slots in each row."""
        layer = self._layer
        heads = layer.shape.heads
        rows = len(layer.expected_len)
        buffer = buffer_slots(self._spec.codec, layer.capacity) if self._spec.stages else 0
        layer.layout = Layout(buffer)
        self._page_shape = (each * heads + heads * buffer_pages(buffer, size), size)
        tensors = layer.tensors = self.alloc(rows, layer.shape, layer.tensors.device)
        tensors.positions.fill_(-1)
        for part in (tensors.keys, tensors.values):
            part.zero_()
        tensors.paged().owner.copy_(self.even_owners())
        sizes = (size, each * heads, 0)
        layer.row_pages = RowPages(*(torch.full((rows,), n, dtype=torch.int64, device="cpu") for n in sizes))
        layer.layout = self.find_layout()

    def even_owners(self) -> Tensor:
        """The owners of the pages of one row in which all heads have equally many, [NB] int64."""
        layer = self._layer
        tensors = layer.tensors
        head = torch.arange(layer.shape.heads, device=tensors.device)
        buffers = buffer_pages(tensors.keys.shape[2], tensors.positions.shape[-1]) if self._spec.stages else 0
        each, odd = divmod(tensors.positions.shape[1], layer.shape.heads)
        owner = F.pad(head.repeat_interleave(each - buffers), (0, odd), value=layer.shape.heads)
        return torch.cat([owner, head.repeat_interleave(buffers)])

    def cut(self, size: int) -> None:
        """Cut pages into ones of `size` slots, a divisor of theirs."""
        if size < self._layer.tensors.positions.shape[-1]:
            self._body.cut(size)
            self._layer.layout = self.find_layout()
            self.fix_addresses()

    def lengthen(self, pages: int) -> None:
        """Append pages that belong to no head, so that there are at least so many beside the buffers."""
        owner = self._body.owner
        self._body.lengthen(F.pad(owner, (0, max(pages - owner.shape[1], 0)), value=self._layer.shape.heads))
        self._layer.layout = self.find_layout()
        self.fix_addresses()

    @property
    def pages(self) -> int:
        """Pages of a row beside the buffers."""
        return self._body.owner.shape[1]

    def note_complete(self) -> None:
        """Note which rows have slots for their whole budget, in the tensor that is there."""
        self._layer.tensors.paged().complete.copy_(self._find_complete())

    def _evicting_pages(self, row: int) -> Tensor:
        """Pages of each head of a row that has not reached its budget: as many as fit, and equally many."""
        layer = self._layer
        size = int(self._rows.size[row])
        budget = int(layer.tensors.budget[row])
        expected = layer.expected_len[row]
        if expected < budget:
            return torch.full((layer.shape.heads,), -(-expected // size), device="cpu")
        each, odd = divmod(budget * self._all_heads // size, self._all_heads)
        return (each + (torch.arange(self._all_heads, device="cpu") < odd).long())[layer.ranks.held]

    def _add_pages(self, wanted: Tensor) -> None:
        """Give heads more pages, [B, H] in the page size of each row; pages that a row does not use come first."""
        unused = self._layer.shape.heads
        new = (wanted * self._pieces().cpu() - self._pages_by_head().cpu()).tolist()
        owners = self._body.owner.tolist()
        for row, heads in zip(owners, new, strict=True):
            asked = [head for head, count in enumerate(heads) for _ in range(count)]
            for page, head in enumerate(row):
                if head == unused and asked:
                    row[page] = asked.pop(0)
            row.extend(asked)
        pages = max(map(len, owners))
        rows = [row + [unused] * (pages - len(row)) for row in owners]
        self._body.lengthen(self._body.owner.new_tensor(rows))

    # sizes

    @property
    def _rows(self) -> RowPages:
        rows = self._layer.row_pages
        assert rows is not None, "a layer with head budgets has them from its first keys on"
        return rows

    @property
    def _all_heads(self) -> int:
        """KV heads on all ranks."""
        layer = self._layer
        return sum(layer.ranks.heads) // layer.ranks.replicas or layer.shape.heads

    def _pieces(self) -> Tensor:
        """Pages of the batch that make one page of a row, [B, 1]."""
        size = self._layer.tensors.positions.shape[-1] or 1
        return (self._rows.size.clamp_min(size) // size).to(self._body.owner.device)[:, None]

    def _pages_by_head(self) -> Tensor:
        """[B, H] int64."""
        return owned_by(self._body.owner, self._layer.shape.heads).sum(-1)

    def tokens_by_head(self) -> Tensor:
        """Tokens that each head holds, [B, H] int64."""
        return tokens_by_head(self._layer)

    def tokens_counted(self) -> Tensor:
        """Tokens of each row that its budget is taken up by, [B] int64.

        Heads hold different numbers of tokens, each in pages of its own: the budget is taken up but for the slots that
        every head has left.
        """
        return self._layer.tensors.budget - self._free_slots()

    def head_positions(self) -> Tensor:
        """Positions of the tokens of each head, [B, H, n] int32, -1 for an empty slot."""
        tensors = self._layer.tensors
        return page_table(tensors.paged().owner, self._layer.shape.heads).occupied(tensors.positions)

    def describe(self) -> str:
        """The pages and slots, as a `repr` shows them."""
        layer = self._layer
        buffer = f", exact={layer.layout.exact}" if layer.layout.coded else ""
        pages = f"pages={self._body.owner.shape[1]} of {layer.tensors.positions.shape[-1]} slots"
        return f"heads={layer.shape.heads}, {pages}{buffer}"

    # rows and numbers

    def fix_addresses(self) -> None:
        """Tell the compiler what stays of every tensor, after any of them was replaced."""
        self._layer.fix_addresses()

    def numbers(self) -> dict[str, Any]:
        """The numbers of the layer on the host, as JSON values."""
        return self._layer.numbers() | {
            "rows": [part.tolist() for part in self._rows],
            "pages": list(self._layer.tensors.positions.shape[1:]),
        }

    def set_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Restore the result of `numbers`."""
        self._layer.set_numbers(numbers)
        self._layer.row_pages = RowPages(*map(torch.tensor, numbers["rows"]))
        number, size = numbers["pages"]
        self._page_shape = number, size
