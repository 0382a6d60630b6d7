"""Marking a layer, and undoing the decode steps since the mark."""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine import merging
from kvpolicy.engine.slots import LayerSlots
from kvpolicy.engine.state import map_state, tensors
from kvpolicy.engine.undo_log import Content, UndoLog
from kvpolicy.protocols import State


class LayerRollback(LayerSlots):
    """The slots of a layer with decode steps that can be undone. `LayerStore` operates on them.

    Without a mark, this class records nothing.
    """

    def mark(self, most: int, digest: Tensor | None = None) -> None:
        """Make the next `most` decode steps undoable, and no longer those before.

        Args:
            most: The most steps until a rollback.
            digest: The digest of the mask, [B] int64, if this layer's owner keeps it here.
        """
        self.undo = UndoLog(most)
        self._has_digest = digest is not None
        self._make_room()
        self.note_counters()

    def rollback(self, accepted: int) -> Tensor | None:
        """Leave every tensor as if only the first `accepted` steps since the mark had been, and forget the mark.

        Returns:
            The digest of the mask, [B] int64, if the mark was given one and it changes.
        """
        log = self.undo
        assert log is not None, "the cache checks that there is a mark"
        self.undo = None  # so that what is written back is not recorded
        digest = None
        while log.before is not None and accepted < log.first:
            assert log.below is not None
            digest = log.digest(0, digest)
            self._restore(log.before)
            log = log.below
        keep = accepted - log.start
        for slots in log.undo(keep, self._step_targets(), self._copied_tensors()):
            # An index depends on what the slots hold alone, so that it is computed again and not kept.
            self._refresh_slots(slots, None)
        self._set_counters(log.counters[min(accepted, len(log.counters) - 1)])
        return log.digest(keep, digest)

    def note_counters(self) -> None:
        """Note the counters of the host after a step, or at a mark."""
        if self.undo is not None:
            counters = (self._free_steps, self.schedule.numbers(), self.link.moved, self._steps_unsorted)
            self.undo.counters.append(counters)

    def _set_counters(self, counters: tuple[Any, ...]) -> None:
        self._free_steps, schedule, self.link.moved, self._steps_unsorted = counters
        self.schedule.set_numbers(schedule)

    _steps_unsorted: int = 0
    """Steps since slots were sorted; see `LayerReading`."""

    @contextmanager
    def undoable(self, ahead: int = 0) -> Generator[None]:
        """Do block work between steps so that a rollback undoes it: on a copy of the layer's tensors.

        Args:
            ahead: 1 for work that belongs to the next step, 0 for work of the last one.
        """
        log = self.undo
        if log is None or not log.has_room:  # nested: the outer call keeps the copy
            yield
            return
        fed = log.fed
        if log.before is None or (log.start, log.first) != (fed, fed + ahead):
            log = UndoLog(log.most, fed, fed + ahead, self._content(), log)
        log.has_room = False
        self.undo = log
        yield
        self._make_room()

    def _make_room(self) -> None:
        assert self.undo is not None
        # Row counts have the shape of a digest.
        digest = self.length if self._has_digest else None
        self.undo.make_room(self._step_targets(), self._copied_tensors(), digest)

    def _copied_tensors(self) -> list[Tensor]:
        """The tensors that are copied before each step, since steps change more of them than single slots."""
        needs = self.selector.needs
        copied = [self.length, self.columns]
        if needs.decode_attn or needs.vectors:
            copied += tensors(self.state)
        if merging.merges_in_steps(self.merger, self.grows):
            copied += tensors(self.merged)
        if self.reads:
            copied += tensors(self.reads.choice)
        return copied

    def _content(self) -> Content:
        """A copy of what the layer holds."""
        # In the mode in which the layer's tensors were made, as they are changed in it.
        with torch.inference_mode(self.is_inference):
            parts = {name: map_state(torch.clone, part) for name, part in self.parts().items()}
        return Content(parts, copy.deepcopy(self.numbers()), list(self.sizes.entries))

    def _restore(self, content: Content) -> None:
        """Bring back what the layer held, in place where the shapes are the same."""
        for name, part in content.parts.items():
            self.set_part(name, _restored(self.parts()[name], part))
        self.set_numbers(content.numbers)
        self.sizes.entries = list(content.sizes)
        self.fix_addresses()


def _restored(now: State, then: State) -> State:
    """A part of a layer as it was; compiled steps refer to its tensors, which therefore stay where they can."""
    pairs = zip(tensors(now), tensors(then), strict=True) if _alike(now, then) else ()
    for held, old in pairs:
        held.copy_(old)
    return now if _alike(now, then) else map_state(torch.clone, then)


def _alike(one: State, other: State) -> bool:
    """Whether two states have tensors of the same shapes."""
    return [t.shape for t in tensors(one)] == [t.shape for t in tensors(other)]
