"""Undo log of a layer: the contents that single decode steps overwrite.

A step overwrites a slot or two of each head. The log keeps what these slots held, for a fixed number of steps, so that
its tensors have fixed shapes and a step compiles with it. Small tensors, and statistics that a step changes everywhere,
are copied before each step: subtracting what was added would not give back the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvpolicy.engine.decode import assert_async
from kvpolicy.engine.state import tensors
from kvpolicy.kernels.slot_writes import gather_slots, write_slots
from kvpolicy.protocols import State

TOO_MANY = "more steps than the mark allows: call cache.rollback(accepted)"


Targets = Mapping[str, tuple[Tensor, int]]
"""Tensors [B, H, S, ...] that a step writes to, by name, and how many slots of each head it writes.

Of two writes to one tensor, the first comes first.
"""


class UndoLog:
    """The steps that a layer can undo, one by one.

    Attributes:
        step: Steps in this log, [] int64.
    """

    def __init__(self, most: int, targets: Targets, copied: Mapping[str, State]) -> None:
        """Allocate the log.

        Args:
            most: The most steps.
            targets: The tensors that a step writes to.
            copied: The tensors that are copied before each step, by name.
        """
        self._most = most
        # Outside inference mode, because only inference mode may change tensors that were made in it.
        with torch.inference_mode(False):
            # The slots of each target that each step writes, [most, B, H, n], and what they held, [most, B, H, n, ...].
            self._slots: dict[str, Tensor] = {}
            self._held: dict[str, Tensor] = {}
            for name, (target, size) in targets.items():
                shape = (most, *target.shape[:2], size)
                self._slots[name] = torch.zeros(shape, dtype=torch.int64, device=target.device)
                self._held[name] = target.new_zeros(*shape, *target.shape[3:])
            self._copies = {name: [t.new_zeros(most, *t.shape) for t in tensors(part)] for name, part in copied.items()}
            positions, _ = targets["positions"]  # keys and values may lie in host memory
            self.step = torch.zeros((), dtype=torch.int64, device=positions.device)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        copies = (t for part in self._copies.values() for t in part)
        return sum(t.nbytes for t in (*self._slots.values(), *self._held.values(), *copies, self.step))

    # a decode step, traceable

    def begin(self, copied: Mapping[str, State]) -> None:
        """Begin a step, before it changes anything; `copied` as when the log was made."""
        assert_async(self.step < self._most, TOO_MANY)
        # The counter stays on the device: read as a number, it would wait for the device and break a compiled graph.
        for name, part in copied.items():
            for steps, tensor in zip(self._copies[name], tensors(part), strict=True):
                steps.index_copy_(0, self.step[None], tensor[None])

    def record(self, name: str, target: Tensor, slots: Tensor) -> None:
        """Keep what slots [B, H, n] of a target on the same device hold, before they are written."""
        step = self.step[None].to(slots.device)
        self._slots[name].index_copy_(0, step, slots[None])
        self._held[name].index_copy_(0, step, gather_slots(target, slots)[None])

    def end(self) -> None:
        """End a step."""
        self.step.add_(1)

    # undoing

    def undo(self, keep: int, targets: Targets, copied: Mapping[str, State]) -> list[Tensor]:
        """Undo all steps but the first `keep`; `targets` and `copied` as when the log was made.

        Returns:
            The slots [B, H, n] whose positions the undone steps wrote, or emptied.
        """
        undone = range(int(self.step) - 1, keep - 1, -1)
        # Backwards: a slot may have been written by several steps, or twice in one, and the first knows what it held.
        for step in undone:
            for name in reversed(self._slots):
                write_slots(targets[name][0], self._slots[name][step], self._held[name][step])
        # Copy `keep` was taken before step `keep`. If that step never ran, there is no such copy.
        if undone:
            for name, part in copied.items():
                for steps, tensor in zip(self._copies[name], tensors(part), strict=True):
                    tensor.copy_(steps[keep])
        written = [self._slots[name] for name in ("emptied", "positions") if name in self._slots]
        return [slots[step] for step in undone for slots in written]
