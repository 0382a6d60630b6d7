"""Marking a layer, and undoing the decode steps since the mark. Without a mark, nothing here does anything."""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine.geometry import Geometry
from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.state import map_state, tensors
from kvpolicy.engine.undo_log import Content, UndoLog
from kvpolicy.protocols import State


def mark(layer: LayerContents, geometry: Geometry, most: int, digest: Tensor | None = None) -> None:
    """Make the next `most` decode steps of a layer undoable, and no longer those before.

    Args:
        layer: The layer.
        geometry: The arrangement of its slots.
        most: The most steps until a rollback.
        digest: The digest of the mask, [B] int64, if the owner of the layer keeps it here.
    """
    layer.undo = UndoLog(most)
    layer.records_digest = digest is not None
    _make_room(layer, geometry)
    note_counters(layer)


def roll_back(layer: LayerContents, geometry: Geometry, accepted: int) -> Tensor | None:
    """Leave every tensor as if only the first `accepted` steps since the mark had been, and forget the mark.

    Returns:
        The digest of the mask, [B] int64, if the mark was given one and it changes.
    """
    log = layer.undo
    assert log is not None, "the cache checks that there is a mark"
    layer.undo = None  # so that what is written back is not recorded
    digest = None
    while log.before is not None and accepted < log.first:
        assert log.below is not None
        digest = log.digest(0, digest)
        _restore(layer, geometry, log.before)
        log = log.below
    keep = accepted - log.start
    for slots in log.undo(keep, geometry.step_targets(), copied_tensors(layer)):
        geometry.refresh(slots)
    layer.forget_columns()
    _set_counters(layer, log.counters[min(accepted, len(log.counters) - 1)])
    return log.digest(keep, digest)


def note_counters(layer: LayerContents) -> None:
    """Note the counters of the host after a step, or at a mark."""
    if layer.undo is not None:
        link = layer.link
        counted = (link.moved, link.loaded, link.stored)
        layer.undo.counters.append((layer.free_steps, layer.schedule.numbers(), counted, layer.steps_unsorted))


@contextmanager
def undoable(layer: LayerContents, geometry: Geometry, ahead: int = 0) -> Generator[None]:
    """Do block work between steps so that a rollback undoes it: on a copy of the layer's tensors.

    Args:
        layer: The layer.
        geometry: The arrangement of its slots.
        ahead: 1 for work that belongs to the next step, 0 for work of the last one.
    """
    log = layer.undo
    if log is None or not log.has_room:  # nested: the outer call keeps the copy
        yield
        return
    fed = log.fed
    if log.before is None or (log.start, log.first) != (fed, fed + ahead):
        log = UndoLog(log.most, fed, fed + ahead, _content(layer, geometry), log)
    log.has_room = False
    layer.undo = log
    yield
    _make_room(layer, geometry)


def _set_counters(layer: LayerContents, counters: tuple[Any, ...]) -> None:
    layer.free_steps, schedule, counted, layer.steps_unsorted = counters
    layer.link.moved, layer.link.loaded, layer.link.stored = counted
    layer.schedule.set_numbers(schedule)


def _make_room(layer: LayerContents, geometry: Geometry) -> None:
    assert layer.undo is not None
    # Row counts have the shape of a digest.
    digest = layer.tensors.length if layer.records_digest else None
    layer.undo.make_room(geometry.step_targets(), copied_tensors(layer), digest)


def copied_tensors(layer: LayerContents) -> dict[str, State]:
    """Tensors that are copied before each step, since steps change them otherwise than by writing slots."""
    tensors = layer.tensors
    copied: dict[str, State] = {"length": tensors.length, "columns": tensors.columns}
    if layer.spec.sees_steps:
        copied["state"] = tensors.state
    if layer.spec.merges_in_steps:
        copied["merged"] = tensors.merged
    if tensors.reads:
        copied["choice"] = tensors.reads.choice
    return copied


def _content(layer: LayerContents, geometry: Geometry) -> Content:
    """A copy of what the layer holds."""
    # In the mode in which the layer's tensors were made, as they are changed in it.
    with torch.inference_mode(layer.is_inference):
        parts = {name: map_state(torch.clone, part) for name, part in layer.tensors.parts().items()}
    return Content(parts, copy.deepcopy(geometry.numbers()), list(layer.sizes.entries))


def _restore(layer: LayerContents, geometry: Geometry, content: Content) -> None:
    """Bring back what the layer held, in place where the shapes are the same."""
    for name, part in content.parts.items():
        layer.tensors.set_part(name, _restored(layer.tensors.parts()[name], part))
    geometry.set_numbers(content.numbers)
    layer.sizes.entries = list(content.sizes)
    geometry.fix_addresses()


def _restored(now: State, then: State) -> State:
    """A part of a layer as it was; compiled steps refer to its tensors, which therefore stay where they can."""
    pairs = zip(tensors(now), tensors(then), strict=True) if _alike(now, then) else ()
    for held, old in pairs:
        held.copy_(old)
    return now if _alike(now, then) else map_state(torch.clone, then)


def _alike(one: State, other: State) -> bool:
    """Whether two states have tensors of the same shapes."""
    return [t.shape for t in tensors(one)] == [t.shape for t in tensors(other)]
