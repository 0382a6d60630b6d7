"""Journal of a layer: what was changed since a mark, or since a prompt began, and how it is taken back.

- Behind a mark, each decode step is logged, and undone bit for bit whatever it evicted; see `UndoLog`.
- Without one, the newest tokens are taken back from a layer from which nothing was evicted, under a policy that
  `crop_obstacle` allows: slot n of each head then holds its row's token n.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.geometry import Geometry
from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.state import map_numbers, map_slots, map_state, slot_tensors, tensors
from kvpolicy.engine.undo_log import UndoLog
from kvpolicy.protocols import Layout, State, rerank_every
from kvpolicy.readers.all import ReadAll
from kvpolicy.statistics import Replay, UnrotatedKeys
from kvpolicy.statistics.windows import ScoreTransform

UNDO_LOG = "undo log"
"""The kind of the bytes of logs in reports."""


class Sizes(NamedTuple):
    """The sizes of a layer before a prompt, or before slots were added.

    Attributes:
        columns: Columns seen then.
        exact: Slots.
        capacity: Tokens that the slots were made for.
        expected_len: Tokens that each row had slots for.
        budget: The most tokens of each row.
    """

    columns: int
    exact: int
    capacity: int
    expected_len: list[int]
    budget: list[int]

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> Sizes:
        """Select or repeat rows."""
        expected_len, budget = (map_numbers(fn, rows) for rows in (self.expected_len, self.budget))
        return self._replace(expected_len=expected_len, budget=budget)


class Content(NamedTuple):
    """A copy of what a layer holds.

    Attributes:
        parts: Its tensors, by attribute.
        numbers: Its numbers on the host.
        sizes: Its sizes before its prompts.
    """

    parts: dict[str, State]
    numbers: dict[str, Any]
    sizes: list[Sizes]


@dataclass
class Entry:
    """Block work under a mark, and the steps behind it; the first entry has no work.

    A demotion, a new ranking or more slots change a layer as a whole. This is done when it is due, as without a mark,
    and undone by a copy of the layer.

    Attributes:
        log: The steps.
        start: Steps between the mark and this entry.
        first: The fewest accepted steps with which the work was due.
        before: Content of the layer before the work; None for the first entry.
    """

    log: UndoLog
    start: int = 0
    first: int = 0
    before: Content | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the log, and of the copy of the layer."""
        copied = () if self.before is None else tensors(tuple(self.before.parts.values()))
        return self.log.nbytes + sum(t.nbytes for t in copied)


class Journal:
    """The steps since a mark, and the sizes before each prompt, which a layer can take back.

    Attributes:
        digest: Digest of the mask of the columns seen, [B] int64, if the owner of the layer keeps it here; it is taken
            back with the steps.
        entries: Entries since the mark, the latest last; empty without a mark.
        sizes: Sizes of the layer before each prompt and each addition of slots, the latest last. Nothing is noted
            if a part of the policy does not allow a crop.
    """

    def __init__(self, layer: LayerContents, geometry: Geometry) -> None:
        """Make an empty journal of a layer and the arrangement of its slots."""
        self._layer = layer
        self._geometry = geometry
        self._keeps_sizes = not crop_obstacle(layer.spec)
        self._most = 0  # steps that the mark allows
        # Numbers on the host at the mark, and after each step since then.
        self._numbers: list[tuple[Any, ...]] = []
        self.digest: Tensor | None = None
        self.entries: list[Entry] = []
        self.sizes: list[Sizes] = []

    @property
    def nbytes(self) -> int:
        """Bytes that are held to undo steps."""
        return sum(entry.nbytes for entry in self.entries)

    # steps since a mark

    def mark(self, most: int) -> None:
        """Make the next `most` decode steps undoable, and no longer those before."""
        self._most = most
        self._numbers = []
        self.entries = [Entry(self._begin_log())]
        self.note_numbers()

    def note_numbers(self) -> None:
        """Note the numbers on the host after a step, or at a mark."""
        layer = self._layer
        link = layer.link
        counted = (link.moved, link.loaded, link.stored)
        self._numbers.append((layer.free_steps, layer.schedule.numbers(), counted, layer.steps_unsorted))

    def copied(self) -> dict[str, State]:
        """Tensors that are copied before each step, since steps change them otherwise than by writing slots."""
        spec = self._layer.spec
        tensors = self._layer.tensors
        copied: dict[str, State] = {"length": tensors.length, "columns": tensors.columns}
        if spec.sees_steps:
            copied["state"] = tensors.state
        if spec.merges_in_steps:
            copied["merged"] = tensors.merged
        if tensors.reads:
            copied["choice"] = tensors.reads.choice
        if self.digest is not None:
            copied["digest"] = self.digest
        return copied

    @contextmanager
    def block_work(self, ahead: int = 0) -> Generator[None]:
        """Do block work between steps so that a rollback undoes it: by a copy of the layer.

        Args:
            ahead: 1 for work that belongs to the next step, 0 for work of the last one.
        """
        layer = self._layer
        if layer.undo is None:  # without a mark, or inside other block work, whose copy serves both
            yield
            return
        latest = self.entries[-1]
        fed = latest.start + int(layer.undo.step)
        before = latest.before
        if before is not None and (latest.start, latest.first) == (fed, fed + ahead):
            self.entries.pop()  # no step was between both works, so that they are undone as one
        else:
            before = self._content()
        layer.undo = None
        yield
        self.entries.append(Entry(self._begin_log(), fed, fed + ahead, before))

    def forget_mark(self) -> None:
        """Keep all tokens, and forget what steps have overwritten."""
        self._layer.undo = None
        self.entries = []

    def roll_back(self, accepted: int) -> None:
        """Leave every tensor as if only the first `accepted` steps since the mark had been, and forget the mark."""
        layer = self._layer
        layer.undo = None  # so that what is written back is not recorded
        while (entry := self.entries.pop()).before is not None and accepted < entry.first:
            self._undo(entry, 0)
            self._restore(entry.before)
        for slots in self._undo(entry, accepted - entry.start):
            self._geometry.refresh(slots)
        layer.forget_columns()
        numbers = self._numbers[min(accepted, len(self._numbers) - 1)]
        layer.free_steps, schedule, counted, layer.steps_unsorted = numbers
        layer.schedule.set_numbers(schedule)
        layer.link.moved, layer.link.loaded, layer.link.stored = counted
        layer.note_slots()  # work between steps may have noted that all heads were full
        self.entries = []

    def _undo(self, entry: Entry, keep: int) -> list[Tensor]:
        """Undo the steps of an entry but the first `keep`; the slots that each one wrote."""
        return entry.log.undo(keep, self._geometry.step_targets(), self.copied())

    def _begin_log(self) -> UndoLog:
        """Let the steps that follow write to a new log."""
        self._layer.undo = UndoLog(self._most, self._geometry.step_targets(), self.copied())
        return self._layer.undo

    def _content(self) -> Content:
        """A copy of what the layer holds."""
        layer = self._layer
        # In the mode in which the layer's tensors were made, as they are changed in it.
        with torch.inference_mode(layer.is_inference):
            parts = {name: map_state(torch.clone, part) for name, part in layer.tensors.parts().items()}
        return Content(parts, copy.deepcopy(self._geometry.numbers()), list(self.sizes))

    def _restore(self, content: Content) -> None:
        """Bring back what the layer held, in place where the shapes are the same."""
        now = self._layer.tensors.parts()
        for name, part in content.parts.items():
            self._layer.tensors.set_part(name, _restored(now[name], part))
        self._geometry.set_numbers(content.numbers)
        self.sizes = list(content.sizes)
        self._geometry.fix_addresses()
        self._layer.note_slots()

    # the newest tokens, without a mark

    def note_sizes(self, new: int = 0) -> None:
        """Note the sizes of the layer before they change for a prompt of `new` columns that were counted already."""
        layer = self._layer
        if self._keeps_sizes:
            budget = layer.tensors.budget.tolist()
            sizes = (layer.layout.exact, layer.capacity, list(layer.expected_len), budget)
            self.sizes.append(Sizes(layer.columns - new, *sizes))

    def forget_sizes(self, columns: int) -> None:
        """Forget the sizes before so many columns, to which nothing is cropped any more."""
        self.sizes = [sizes for sizes in self.sizes if sizes.columns >= columns]

    def take_sizes(self, columns: int) -> Sizes | None:
        """Take back all changes since so many columns; the sizes before them, or None if there were none."""
        sizes = None
        # The last one popped belongs to the earliest change that is taken back, and so has the sizes to return to.
        while self.sizes and self.sizes[-1].columns >= columns:
            sizes = self.sizes.pop()
        return sizes

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Select or repeat rows."""
        self.sizes = [sizes.map_rows(fn) for sizes in self.sizes]

    def keeps_all(self) -> bool:
        """Whether every head holds every token of its row, in order."""
        return self._layer.holds_in_order()

    def newest_tokens(self, length: Tensor, count: int, valid: Tensor | None) -> PendingPrompt:
        """The tokens behind the first `length` [B] of each row, as a prompt of `count` columns that was attended to.

        Args:
            length: Tokens of each row before it.
            count: Its columns.
            valid: Which of these are not padding, [B, count] bool; None if all are.
        """
        tensors = self._layer.tensors
        place = torch.arange(1, count + 1, device=length.device) if valid is None else valid.long().cumsum(-1)
        slots = (length[:, None] + place - 1).clamp_min(0)  # of padding, that of any token
        rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
        held = (tensors.keys, tensors.values)
        keys, values = (t.transpose(1, 2)[rows, slots].transpose(1, 2).contiguous() for t in held)
        return PendingPrompt(keys, values, valid, ScoreTransform(self._layer.scale))

    def crop(self, columns: int, length: Tensor) -> None:
        """Leave a layer that keeps all of its tokens as it was after so many columns, of no part of a prompt.

        Args:
            columns: Columns to keep.
            length: Tokens of each row that these hold, [B] int64.
        """
        layer = self._layer
        tensors = layer.tensors
        sizes = self.take_sizes(columns)
        if sizes is not None:
            _truncate(layer, sizes)
        layer.set_columns(columns)
        tensors.length.copy_(length)
        slot = torch.arange(layer.layout.exact, device=tensors.positions.device)
        beyond = (slot >= tensors.length[:, None])[:, None]
        tensors.positions.masked_fill_(beyond, -1)
        for tensor in slot_tensors(tensors.state):
            tensor.masked_fill_(beyond, 0)
        for vectors in (tensors.keys, tensors.values):
            vectors.masked_fill_(beyond[..., None], 0)
        layer.free_steps = self._geometry.count_free_steps()
        layer.note_slots()
        self._geometry.fix_addresses()


def crop_obstacle(spec: LayerSpec) -> str:
    """Which part of a policy keeps a token from being taken back without a mark; empty if none does."""
    if spec.heads is not None:
        return "budgets by head"
    if spec.stages:
        return f"the codec {spec.codec}"
    if spec.merger_traits.when != "never":
        return f"the merger {spec.merger}"
    if not isinstance(spec.reader, ReadAll):
        return f"the reader {spec.reader}"
    asked = {type(each) for each in spec.statistics}
    looks = spec.step_attention or spec.step_vectors or not asked.isdisjoint({UnrotatedKeys, Replay})
    if looks or rerank_every(spec.selector):
        return f"the selector {spec.selector}, whose statistics every token changes"
    return ""


def _truncate(layer: LayerContents, sizes: Sizes) -> None:
    """Truncate a layer to an earlier size."""
    tensors = layer.tensors
    layer.layout = Layout(sizes.exact)
    layer.capacity = sizes.capacity
    layer.expected_len = list(sizes.expected_len)
    tensors.keys = tensors.keys[:, :, : sizes.exact].clone()
    tensors.values = tensors.values[:, :, : sizes.exact].clone()
    tensors.positions = tensors.positions[..., : sizes.exact].clone()
    tensors.state = map_slots(lambda t: t[..., : sizes.exact].clone(), tensors.state)
    layer.set_budget(tensors.budget.new_tensor(sizes.budget))


def _restored(now: State, then: State) -> State:
    """A part of a layer as it was; compiled steps refer to its tensors, which therefore stay where they can."""
    if [t.shape for t in tensors(now)] != [t.shape for t in tensors(then)]:
        return map_state(torch.clone, then)
    for held, old in zip(tensors(now), tensors(then), strict=True):
        held.copy_(old)
    return now
