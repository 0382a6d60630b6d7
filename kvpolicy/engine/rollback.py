"""Marking a layer, and undoing the decode steps since the mark. Without a mark, nothing here does anything."""

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


def mark(store: LayerSlots, most: int, digest: Tensor | None = None) -> None:
    """Make the next `most` decode steps of a layer undoable, and no longer those before.

    Args:
        store: The layer.
        most: The most steps until a rollback.
        digest: The digest of the mask, [B] int64, if the owner of the layer keeps it here.
    """
    store.undo = UndoLog(most)
    store.records_digest = digest is not None
    _make_room(store)
    note_counters(store)


def roll_back(store: LayerSlots, accepted: int) -> Tensor | None:
    """Leave every tensor as if only the first `accepted` steps since the mark had been, and forget the mark.

    Returns:
        The digest of the mask, [B] int64, if the mark was given one and it changes.
    """
    log = store.undo
    assert log is not None, "the cache checks that there is a mark"
    store.undo = None  # so that what is written back is not recorded
    digest = None
    while log.before is not None and accepted < log.first:
        assert log.below is not None
        digest = log.digest(0, digest)
        _restore(store, log.before)
        log = log.below
    keep = accepted - log.start
    for slots in log.undo(keep, store.step_targets(), copied_tensors(store)):
        # An index depends on what the slots hold alone, so that it is computed again and not kept.
        store.refresh_slots(slots, None)
    _set_counters(store, log.counters[min(accepted, len(log.counters) - 1)])
    return log.digest(keep, digest)


def note_counters(store: LayerSlots) -> None:
    """Note the counters of the host after a step, or at a mark."""
    if store.undo is not None:
        counters = (store.free_steps, store.schedule.numbers(), store.link.moved, store.steps_unsorted)
        store.undo.counters.append(counters)


@contextmanager
def undoable(store: LayerSlots, ahead: int = 0) -> Generator[None]:
    """Do block work between steps so that a rollback undoes it: on a copy of the layer's tensors.

    Args:
        store: The layer.
        ahead: 1 for work that belongs to the next step, 0 for work of the last one.
    """
    log = store.undo
    if log is None or not log.has_room:  # nested: the outer call keeps the copy
        yield
        return
    fed = log.fed
    if log.before is None or (log.start, log.first) != (fed, fed + ahead):
        log = UndoLog(log.most, fed, fed + ahead, _content(store), log)
    log.has_room = False
    store.undo = log
    yield
    _make_room(store)


def _set_counters(store: LayerSlots, counters: tuple[Any, ...]) -> None:
    store.free_steps, schedule, store.link.moved, store.steps_unsorted = counters
    store.schedule.set_numbers(schedule)


def _make_room(store: LayerSlots) -> None:
    assert store.undo is not None
    # Row counts have the shape of a digest.
    digest = store.length if store.records_digest else None
    store.undo.make_room(store.step_targets(), copied_tensors(store), digest)


def copied_tensors(store: LayerSlots) -> list[Tensor]:
    """Tensors that are copied before each step, since steps change them otherwise than by writing slots."""
    needs = store.selector.needs
    copied = [store.length, store.columns]
    if needs.decode_attn or needs.vectors:
        copied += tensors(store.state)
    if merging.merges_in_steps(store.merger, store.grows):
        copied += tensors(store.merged)
    if store.reads:
        copied += tensors(store.reads.choice)
    return copied


def _content(store: LayerSlots) -> Content:
    """A copy of what the layer holds."""
    # In the mode in which the layer's tensors were made, as they are changed in it.
    with torch.inference_mode(store.is_inference):
        parts = {name: map_state(torch.clone, part) for name, part in store.parts().items()}
    return Content(parts, copy.deepcopy(store.numbers()), list(store.sizes.entries))


def _restore(store: LayerSlots, content: Content) -> None:
    """Bring back what the layer held, in place where the shapes are the same."""
    for name, part in content.parts.items():
        store.set_part(name, _restored(store.parts()[name], part))
    store.set_numbers(content.numbers)
    store.sizes.entries = list(content.sizes)
    store.fix_addresses()


def _restored(now: State, then: State) -> State:
    """A part of a layer as it was; compiled steps refer to its tensors, which therefore stay where they can."""
    pairs = zip(tensors(now), tensors(then), strict=True) if _alike(now, then) else ()
    for held, old in pairs:
        held.copy_(old)
    return now if _alike(now, then) else map_state(torch.clone, then)


def _alike(one: State, other: State) -> bool:
    """Whether two states have tensors of the same shapes."""
    return [t.shape for t in tensors(one)] == [t.shape for t in tensors(other)]
