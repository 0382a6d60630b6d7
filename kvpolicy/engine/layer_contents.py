"""Contents of one layer: its parts, its tensors, and the numbers that it keeps on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine import layout
from kvpolicy.engine.decode import SharedStep
from kvpolicy.engine.layer_group import LayerGroup
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_tensors import LayerTensors
from kvpolicy.engine.layout import fix_addresses
from kvpolicy.engine.link import Link
from kvpolicy.engine.pages import RowPages, buffer_pages, owned_by
from kvpolicy.engine.rank_schedule import RankSchedule
from kvpolicy.engine.reading import load_basis
from kvpolicy.engine.row_limits import with_tokens
from kvpolicy.engine.state import map_numbers
from kvpolicy.engine.state import tensors as all_tensors
from kvpolicy.engine.undo_log import UndoLog
from kvpolicy.protocols import (
    ALONE,
    SINGLE_RANK,
    Calibration,
    Codes,
    LayerShape,
    Layout,
    Ranks,
    View,
    rerank_every,
    traits_for,
)
from kvpolicy.statistics import AttentionSum, Statistic, union
from kvpolicy.statistics.input_scores import Gate
from kvpolicy.statistics.statistic import first_of
from kvpolicy.text.errors import KVPolicyError

NUMBERS = ("capacity", "expected_len", "reserved", "largest_block", "scale", "may_exceed_plan")
"""The attributes of a layer that are numbers on the host, or lists of them."""


class RowRoom(NamedTuple):
    """Room of a free row, in a layer whose rows come and go.

    Attributes:
        tokens: Tokens that it has slots for.
        budget: The most tokens that it may hold.
    """

    tokens: int
    budget: int


class LayerContents:
    """Contents of one layer under a policy; a `LayerStore` and its geometry operate on them.

    Attributes:
        spec: The parts of the policy.
        tensors: Every tensor that counts as the layer's; missing before `begin`.
        calibrations: The model's calibrated tensors of each stage.
        gate: Those by which the selector scores tokens, if it scores inputs.
        basis: The basis of the reader's index, [H, D, r] fp32; the empty tuple if it has none.
        shape: The shape of the layer on this rank.
        ranks: The ranks that hold the layer's other heads.
        scale: The factor of the products of queries and keys, as in the last prompt.
        layout: Slots of the full-precision buffer and of each stage.
        capacity: Tokens that the layout was made for.
        expected_len: Tokens that each row has slots for.
        may_exceed_plan: Whether a row may hold more tokens than it has slots for; said of any rows that come and go, so
            that a step is the same graph for all of them.
        schedule: When the slots are ranked together again.
        reserved: Dictionary slots, the first of the full-precision buffer.
        largest_block: The most tokens that any row demotes at a time.
        free_steps: Steps until the layer must demote tokens, or needs more slots.
        steps_unsorted: Steps since the slots of each row were sorted, if the reader wants them sorted.
        link: The link that every read of a decode step goes through.
        has_pages: Whether every head of each row is known to have a page, for good.
        in_order: Whether slot n of each head is known to hold its row's token n, for good.
        shared: What the layers of the running step share; None in a compiled step, of a layer alone, and between steps.
        memo: What they compute alike.
        undo: The log to which steps write what they overwrite; None without a mark, and while block work is done.
        row_pages: Pages of each row, as it would have them alone in a batch; None in a layer without head budgets.
        group: The layers that store a part of what they hold together with this one; None if it is alone.
        number: Its number in the group.
        room: What a free row has room for; None unless rows come and go.
    """

    tensors: LayerTensors
    shape: LayerShape

    def __init__(self, spec: LayerSpec) -> None:
        """Make the contents of a layer without keys."""
        self.spec = spec
        self.is_initialized = False
        self.calibrations: tuple[Calibration, ...] = ()
        self.gate: Gate = ()
        self.basis: Tensor | tuple[()] = ()
        self.ranks = SINGLE_RANK
        self.scale = 1.0
        self.layout = Layout(0)
        self.capacity = 0
        self.expected_len: list[int] = []
        self.may_exceed_plan = False
        self.schedule = RankSchedule(rerank_every(spec.selector))
        self.reserved = 0
        self.largest_block = spec.codec_traits.block
        self.free_steps: float = 0
        self.steps_unsorted: list[int] = []
        self.link = Link(spec.host)
        self._evicts = False
        self.has_pages = False
        self.in_order = False
        self.shared: SharedStep | None = None
        self.memo = ALONE
        self.undo: UndoLog | None = None
        self.row_pages: RowPages | None = None
        self.group: LayerGroup | None = None
        self.number = 0
        self.room: RowRoom | None = None
        self._columns: int | None = None
        self._row_budgets: tuple[int, ...] | None = None

    def join(self, group: LayerGroup, number: int) -> None:
        """Store a part of what the layer holds together with the other layers of a group."""
        self.group = group
        self.number = number
        group.join(number, self)

    @property
    def waiting_nbytes(self) -> int:
        """Bytes of tokens that wait for the other layers of the group to be encoded, while a forward runs."""
        return 0 if self.group is None else self.group.waiting_nbytes(self.number)

    @property
    def shared_codes(self) -> tuple[Codes, ...]:
        """Of each stage, the tensors that another layer of the group holds and that this one reads."""
        if self.group is None or not self.number:
            return ()
        return tuple(self.group.shared(stage) for stage in range(len(self.layout.coded)))

    def begin(self, tensors: LayerTensors, shape: LayerShape, ranks: Ranks) -> None:
        """Begin with empty tensors, of a layer of this shape on its rank."""
        self.tensors = tensors
        self._columns = 0
        self.shape = shape
        self.ranks = ranks
        batch = tensors.length.shape[0]
        device = tensors.length.device
        stages = self.spec.stages
        self.calibrations = tuple(stage.load_calibration(self.spec.layer_idx, device, ranks.held) for stage in stages)
        if self.spec.input_scorer is not None:
            self.gate = self.spec.input_scorer.load_gate(self.spec.layer_idx, device, ranks.held)
        self.basis = load_basis(self.spec.reader, self.spec.layer_idx, device, ranks.held)
        self.expected_len = [0] * batch
        self.steps_unsorted = [0] * batch
        self.schedule.start(batch)
        if self.spec.heads is not None:
            self.row_pages = RowPages(*(torch.zeros(batch, dtype=torch.int64, device="cpu") for _ in range(3)))
        self.is_initialized = True

    def check_compatible(self, keys: Tensor, values: Tensor) -> None:
        """Refuse keys and values of another dtype or device than those of the slots.

        Raises:
            KVPolicyError: If they differ.
        """
        if not self.is_initialized:
            return
        device = self.tensors.length.device  # keys and values may lie in host memory
        for held, new in ((self.tensors.keys, keys), (self.tensors.values, values)):
            if held.dtype != new.dtype or device != new.device:
                raise KVPolicyError(
                    f"Keys and values must be {held.dtype} on {device} like the cache, got {new.dtype} on "
                    f"{new.device}; try a new cache after moving the model or switching autocast."
                )

    @property
    def resident(self) -> tuple[Any, ...]:
        """The calibrated tensors of the layer, which belong to the model."""
        return (*self.calibrations, self.gate, self.basis)

    @property
    def evicts(self) -> bool:
        """Whether every head is known to hold all tokens that it may, for good: a step evicts one of each head.

        Never in a compiled step, which is one graph for full layers and others.
        """
        return not torch.compiler.is_compiling() and self._evicts

    @property
    def is_full(self) -> bool:
        """Whether every slot is known to hold a token, for good: a step masks none.

        With a codec, the slots of a buffer wait for tokens.
        """
        return self.evicts and not sum(self.layout.coded)

    @property
    def can_run_out(self) -> bool:
        """Whether a step may find no free slot, because it must wait for a demotion or for more slots."""
        return self.spec.grows or self.may_exceed_plan or sum(self.layout.coded) > 0

    def note_slots(self) -> None:
        """Note on the host what steps keep as it is, after slots were filled or emptied otherwise than by steps.

        What is true of a layer is true of some of its rows.
        """
        tensors = self.tensors
        self._evicts = False
        self.has_pages = tensors.pages is not None and self._each_head_has_pages(tensors.pages.owner)
        is_plain = tensors.pages is None and not sum(self.layout.coded)
        self.in_order = self.spec.grows and is_plain and self.holds_in_order()
        if not self.spec.grows and not self.may_exceed_plan:
            if self._row_budgets is None:
                budget = tensors.budget if tensors.pages is None else tensors.pages.average
                self._row_budgets = tuple(budget.tolist())
            self._evicts = self.holds_all_it_may()

    def holds_all_it_may(self) -> bool:
        """Whether every head holds all tokens that it may."""
        tensors = self.tensors
        occupied = tensors.positions >= 0
        coded = sum(self.layout.coded) > 0
        if tensors.pages is not None:
            # No head holds more than its pages have slots, so all do if a row does; a page that it does not use is
            # empty. A head without a page has no slot that could be empty.
            pages = tensors.pages.owner.shape[1] - (self._buffer_pages() if coded else 0)
            return self.has_pages and bool((occupied.sum((1, 2)) == pages * occupied.shape[-1]).all())
        full = occupied.sum(-1) >= tensors.budget[:, None] if coded else occupied
        return bool(full.all())

    def _each_head_has_pages(self, owner: Tensor) -> bool:
        """Whether each head of each row has a page besides those of its buffer, of the owners [B, NB] of all pages."""
        buffers = self._buffer_pages() if sum(self.layout.coded) else 0
        return bool(owned_by(owner[:, : owner.shape[1] - buffers], self.shape.heads).any(-1).all())

    def _buffer_pages(self) -> int:
        """Pages of a row that are buffers."""
        tensors = self.tensors
        return buffer_pages(tensors.keys.shape[2], tensors.positions.shape[-1]) * self.shape.heads

    def holds_in_order(self) -> bool:
        """Whether slot n of each head holds its row's token n, and the others none; not in pages."""
        tensors = self.tensors
        slot = torch.arange(tensors.positions.shape[-1], device=tensors.positions.device)
        length = tensors.length[:, None, None]
        return bool((tensors.positions == torch.where(slot < length, slot, -1)).all() & (length <= len(slot)).all())

    @property
    def prompt_statistics(self) -> tuple[Statistic[Any], ...]:
        """The statistics that the parts need of a prompt that comes now: the allocator those of a first one."""
        if not self.spec.allocator_statistics:  # without waiting for the device
            return self.spec.prompt_statistics
        # Not by `expected_len`: a row that has not begun beside others has slots already.
        has_unbegun = bool((self.tensors.length == 0).any())
        first = self.spec.allocator_statistics if has_unbegun else ()
        return union(self.spec.prompt_statistics, first)

    @property
    def sums_attention(self) -> bool:
        """Whether the attention that a prompt that comes now pays to every token is summed."""
        return first_of(AttentionSum, self.prompt_statistics) is not None

    @property
    def measures_salience(self) -> bool:
        """Whether the reader needs the salience of the channels in a prompt."""
        reads = self.tensors.reads
        salience = self.spec.reader_traits.salience
        return bool(reads and reads.index) and salience is not None and not salience.is_calibrated

    # a decode step

    def count_token(self, valid: Tensor | None, shared: SharedStep | None) -> Tensor:
        """Count the token of a step; its position, [B, 1, 1] int32.

        Args:
            valid: Which rows have a token, [B, 1] bool; None if all have.
            shared: What the layers of the step share, which counts the token on the device at its end.
        """
        tensors = self.tensors
        if shared is not None:
            self.shared = shared
            self.memo = shared.memo
            self._columns = self.columns + 1
            return shared.count(tensors.length, tensors.columns, valid)
        position = tensors.length.to(torch.int32)[:, None, None]  # of the new token: as many came before it
        tensors.length.add_(1 if valid is None else valid[:, 0].long())
        self.add_columns(1)
        return position

    @property
    def length(self) -> Tensor:
        """Tokens that each row has seen, that of the running step included, [B] int64."""
        length = self.tensors.length
        return length if self.shared is None else self.shared.lengths[length.device]

    def view(self) -> View:
        """The slots as the selector sees them in a step; in pages, with the budget of an average head."""
        tensors = self.tensors
        budget = tensors.budget if tensors.pages is None else tensors.pages.average
        if self.shared is not None and self._row_budgets is not None:
            budget = self.shared.budgets.setdefault((budget.device, self._row_budgets), budget)
        return View(tensors.positions, self.length, budget, self.spec.layer_idx, self.ranks, memo=self.memo)

    def set_budget(self, budget: Tensor) -> None:
        """Let each row hold `budget` [B] tokens."""
        tensors = self.tensors
        codec = self.spec.codec
        tensors.budget = budget
        tokens = budget.tolist()
        self._row_budgets = tuple(tokens if tensors.pages is None else tensors.pages.average.tolist())
        if tensors.limits is not None:
            # A budget may exceed all tokens that are expected, and slots are allocated for no more than those.
            allocated = [min(pair) for pair in zip(tokens, self.expected_len, strict=True)]
            tensors.limits = with_tokens(tensors.limits, codec, allocated, self.reserved)
            self.largest_block = max(traits_for(codec, count).block for count in allocated)
        may_exceed = self.room is not None or layout.may_exceed_plan(self.expected_len, tokens)
        self.may_exceed_plan = not self.spec.grows and may_exceed

    def set_budget_in_place(self, budget: Tensor) -> None:
        """The same in the tensors that are there, so that a compiled step finds them."""
        tensors = self.tensors
        held = tensors.budget
        limits = tensors.limits
        self.set_budget(budget)
        tensors.budget = held.copy_(budget)
        if limits is not None and tensors.limits is not None:
            for target, new in zip(all_tensors(limits), all_tensors(tensors.limits), strict=True):
                target.copy_(new)
            tensors.limits = limits

    def expect(self, expected_len: list[int], idle: Tensor | None) -> None:
        """Raise the expected length of every row that is not `idle` [B] bool; it never falls."""
        self.expected_len = layout.merge_expected(
            self.expected_len, expected_len, None if idle is None else idle.tolist()
        )
        self.capacity = max(*self.expected_len, self.capacity)

    def nbytes_by_kind(self) -> dict[str, int]:
        """Bytes by kind: exact, codes, scales, positions, statistics, index, counters; counts if any."""
        return self.tensors.nbytes_by_kind() if self.is_initialized else {}

    # columns

    @property
    def columns(self) -> int:
        """Columns seen, counted on the host, so that no step waits; read from the device after compiled steps."""
        if self._columns is None:
            self._columns = int(self.tensors.columns)
        return self._columns

    def add_columns(self, new: int) -> None:
        """Count `new` more columns."""
        self.tensors.columns.add_(new)
        # A compiled step runs again without this code, but for what it assigns, which must be the same each time.
        is_unknown = torch.compiler.is_compiling() or self._columns is None
        self._columns = None if is_unknown else self._columns + new  # pyright: ignore[reportOptionalOperand]

    def set_columns(self, columns: int) -> None:
        """Forget columns behind the first `columns`."""
        self.tensors.columns.fill_(columns)
        self._columns = columns

    def forget_columns(self) -> None:
        """Read the columns from the device when they are asked for next, after its tensors were replaced."""
        self._columns = None

    # rows

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace everything that rows have by `fn` of it, which selects or repeats rows."""
        self.tensors.map_rows(fn)
        self.expected_len = map_numbers(fn, self.expected_len)
        if self._row_budgets is not None:
            self._row_budgets = tuple(map_numbers(fn, [*self._row_budgets]))
        self.steps_unsorted = map_numbers(fn, self.steps_unsorted)
        self.schedule.map_rows(fn)
        if self.row_pages is not None:
            self.row_pages = RowPages(*(fn(t) for t in self.row_pages))

    @property
    def is_inference(self) -> bool:
        """Whether some tensors may be changed in inference mode only."""
        # Rows may be selected outside of it, which replaces all tensors but this one, or inside of it later.
        return self.tensors.columns.is_inference() or self.tensors.length.is_inference()

    def fix_addresses(self) -> None:
        """Tell the compiler what stays of every tensor, after any of them was replaced."""
        fix_addresses([*self.tensors.parts().values(), self.resident], 2 if self.tensors.pages is None else 1)

    # numbers

    def numbers(self) -> dict[str, Any]:
        """The numbers of the layer on the host, as JSON values; infinity is None."""
        return {
            "layout": [self.layout.exact, list(self.layout.coded)],
            "schedule": self.schedule.numbers(),
            "free_steps": None if self.free_steps == layout.UNLIMITED else self.free_steps,
            **{name: getattr(self, name) for name in NUMBERS},
        }

    def set_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Restore the result of `numbers`."""
        exact, coded = numbers["layout"]
        self.layout = Layout(exact, tuple(coded))
        self.schedule.set_numbers(numbers["schedule"])
        free = numbers["free_steps"]
        self.free_steps = layout.UNLIMITED if free is None else free
        self._row_budgets = None
        for name in NUMBERS:
            setattr(self, name, numbers[name])
