"""Undo log of a layer: the contents that single decode steps overwrite.

A step overwrites a slot or two of each head. The log keeps what these slots held, for a fixed number of steps, so that
its tensors have fixed shapes and a step compiles with it. Small tensors, and statistics that a step changes everywhere,
are copied before each step: subtracting what was added would not give back the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.decode import assert_async
from kvpolicy.engine.state import tensors
from kvpolicy.kernels.slot_writes import gather_slots, write_slots
from kvpolicy.protocols import State

UNDO_LOG = "undo log"
"""The kind of its bytes in reports."""

TOO_MANY = "more steps than the mark allows: call cache.rollback(accepted)"


Targets = Mapping[str, tuple[Tensor, int]]
"""Tensors [B, H, S, ...] that a step writes to, by name, and how many slots of each head it writes."""


class Overwritten(NamedTuple):
    """The slots of one tensor that each step writes, and their contents before it.

    Attributes:
        slots: [steps, B, H, n] int64.
        held: [steps, B, H, n, ...].
    """

    slots: Tensor
    held: Tensor


class Content(NamedTuple):
    """A copy of what a layer holds.

    Attributes:
        parts: Its tensors, by attribute.
        numbers: Its numbers on the host.
        sizes: Sizes that a crop restores; see `SizeHistory`.
    """

    parts: dict[str, State]
    numbers: dict[str, Any]
    sizes: Sequence[Any] = ()


class UndoLog:
    """The steps since a mark, or since the last block work behind it.

    Block work (a demotion, a new ranking, more slots) changes a layer as a whole. It is done when it is due, as without
    a mark, on a copy of the layer: `before`. Logs form a chain, since the work may be due several times.

    Attributes:
        most: The most steps.
        start: Steps between the mark and this log.
        first: The fewest accepted steps with which the block work of this log was due.
        before: Content of the layer before that work; None for the first log.
        below: The log before that work; None for the first log.
        has_room: Whether its tensors are allocated; they are not while block work runs.
        step: Steps in this log, [] int64.
        counters: Counters of the host after each step since the mark, the first at the mark; one list for all logs.
    """

    def __init__(
        self,
        most: int,
        start: int = 0,
        first: int = 0,
        before: Content | None = None,
        below: UndoLog | None = None,
    ) -> None:
        """Make a log without room; `make_room` follows."""
        self.most = most
        self.start = start
        self.first = first
        self.before = before
        self.below = below
        self.counters: list[tuple[Any, ...]] = [] if below is None else below.counters
        self.has_room = False
        self._written: dict[str, Overwritten] = {}
        self._copies: dict[str, list[Tensor]] = {}
        self._digests: Tensor | None = None

    def make_room(self, targets: Targets, copied: Mapping[str, State], digest: Tensor | None) -> None:
        """Allocate the log.

        Args:
            targets: The tensors [B, H, S, ...] that a step writes to by name, and the slots of each head; of two writes
                to one tensor, the first comes first.
            copied: The tensors that are copied before each step, by name.
            digest: The digest of the mask, [B] int64, if the layer holds it.
        """
        # Outside inference mode, because only inference mode may change tensors that were made in it.
        with torch.inference_mode(False):
            self._written = {
                name: Overwritten(
                    torch.zeros(self.most, *target.shape[:2], size, dtype=torch.int64, device=target.device),
                    torch.zeros(
                        self.most,
                        *target.shape[:2],
                        size,
                        *target.shape[3:],
                        dtype=target.dtype,
                        device=target.device,
                    ),
                )
                for name, (target, size) in targets.items()
            }
            self._copies = {name: [_steps_of(self.most, t) for t in tensors(part)] for name, part in copied.items()}
            self._digests = None if digest is None else _steps_of(self.most, digest)
            positions, _ = targets["positions"]  # keys and values may lie in host memory
            self.step = torch.zeros((), dtype=torch.int64, device=positions.device)
        self.has_room = True

    @property
    def fed(self) -> int:
        """Steps since the mark."""
        return self.start + int(self.step)

    @property
    def nbytes(self) -> int:
        """Bytes of all logs since the mark, and of the copies of the layer."""
        own = [part for written in self._written.values() for part in written]
        own += [part for copies in self._copies.values() for part in copies]
        own += [] if self._digests is None else [self._digests]
        own += [self.step] if self.has_room else []
        copied = [] if self.before is None else [t for part in self.before.parts.values() for t in tensors(part)]
        below = 0 if self.below is None else self.below.nbytes
        return sum(t.nbytes for t in (*own, *copied)) + below

    # a decode step, traceable

    def begin(self, copied: Mapping[str, State]) -> None:
        """Begin a step, before it changes anything; `copied` as in `make_room`."""
        assert_async(self.step < self.most, TOO_MANY)
        # The counter stays on the device: read as a number, it would wait for the device and break a compiled graph.
        for name, part in copied.items():
            for steps, tensor in zip(self._copies[name], tensors(part), strict=True):
                steps.index_copy_(0, self.step[None], tensor[None])

    def record(self, name: str, target: Tensor, slots: Tensor) -> None:
        """Keep what slots [B, H, n] of a tensor on the same device hold, before they are written, as in `make_room`."""
        written = self._written[name]
        step = self.step[None].to(slots.device)
        written.slots.index_copy_(0, step, slots[None])
        written.held.index_copy_(0, step, gather_slots(target, slots)[None])

    def end(self) -> None:
        """End a step."""
        self.step.add_(1)

    def record_digest(self, digest: Tensor) -> None:
        """Keep the digest of the mask of the step that has just ended, before the step's column is added."""
        if self._digests is not None:
            self._digests.index_copy_(0, self.step[None] - 1, digest[None])

    # undoing

    def undo(self, keep: int, targets: Targets, copied: Mapping[str, State]) -> list[Tensor]:
        """Undo all steps of this log but the first `keep`.

        Args:
            keep: How many of this log's steps stay.
            targets: As in `make_room`.
            copied: As in `make_room`.

        Returns:
            For each step that was undone, the slots [B, H, n] whose positions it wrote last.
        """
        undone = range(int(self.step) - 1, keep - 1, -1)
        # Backwards: a slot may have been written by several steps, or twice in one, and the first knows what it held.
        for step in undone:
            for name in reversed(self._written):
                written = self._written[name]
                write_slots(targets[name][0], written.slots[step], written.held[step])
        # Copy `keep` was taken before step `keep`. If that step never ran, there is no such copy.
        if undone:
            for name, part in copied.items():
                for steps, tensor in zip(self._copies[name], tensors(part), strict=True):
                    tensor.copy_(steps[keep])
        return [self._written["positions"].slots[step] for step in undone]

    def digest(self, keep: int, later: Tensor | None) -> Tensor | None:
        """The digest of the mask after the first `keep` steps of this log; `later` if these are all its steps.

        A log has the digests before its steps, so that the one after its last step is the first of the next log, or
        the newest one.
        """
        return later if self._digests is None or keep >= int(self.step) else self._digests[keep]


def _steps_of(most: int, tensor: Tensor) -> Tensor:
    return torch.zeros(most, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
