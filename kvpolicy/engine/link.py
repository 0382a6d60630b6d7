"""The bytes that a decode step moves: every read of a step goes through a link, which counts it.

What lies in host memory is copied to the device as it is read, and counted apart too. A plan makes the same calls with
tensors on the device meta, so that it predicts the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.state import tensors
from kvpolicy.kernels.slot_writes import flat_slots


def pins(device: torch.device) -> bool:
    """Whether memory of the host is pinned for copies to and from a device."""
    return device.type not in ("cpu", "meta") and torch.accelerator.is_available()


def to_host(t: Tensor, device: torch.device) -> Tensor:
    """A tensor in host memory, pinned for copies to `device`; the tensor itself if it is there already, or on meta."""
    if t.is_meta:
        return t
    if not pins(device):
        return t.cpu()
    if t.is_pinned():
        return t
    held = torch.empty(t.shape, dtype=t.dtype, pin_memory=True, device="cpu")
    return held.copy_(t)


def load_slots(sources: Sequence[Tensor], slots: Tensor) -> tuple[Tensor, ...]:
    """Copy vectors of the same slots of several tensors to the device of `slots`.

    Args:
        sources: [B, H, S, D] each, in host memory, or still on the device, contiguous.
        slots: [B, H, n] int64.

    Returns:
        [B, H, n, D] each.
    """
    batch, heads, size, _ = sources[0].shape
    index = flat_slots(slots.to(sources[0].device), size)  # waits for the device, once for all of them
    flat = [source.view(batch * heads * size, -1) for source in sources]
    return tuple(_gathered(source, index, slots.device).view(*slots.shape, -1) for source in flat)


def _gathered(flat: Tensor, index: Tensor, device: torch.device) -> Tensor:
    """Vectors of `flat` [N, D], gathered where they lie, on a device."""
    if not (flat.is_cpu and pins(device)):
        return flat.index_select(0, index).to(device)
    # Into pinned memory, which torch reuses only after the copy from it has ended.
    gathered = torch.empty(len(index), flat.shape[-1], dtype=flat.dtype, pin_memory=True, device="cpu")
    torch.index_select(flat, 0, index, out=gathered)
    return gathered.to(device, non_blocking=True)


class StepBytes(NamedTuple):
    """Bytes of a decode step.

    Attributes:
        moved: Bytes read, wherever they lie.
        loaded: Those of them that lie in host memory, and are copied to the device.
        stored: Keys and values that are copied from the device to host memory.
    """

    moved: int = 0
    loaded: int = 0
    stored: int = 0


class Link:
    """Reads slots of a layer, and counts the bytes.

    In a compiled step nothing is counted, because a counter on the host would be a constant of the graph; the number is
    the same, since it does not depend on data.

    Attributes:
        moved: Bytes read between `start` and `stop`.
        loaded: Those of them that were copied from host memory.
        stored: Bytes that were copied to host memory.
    """

    def __init__(self, host: bool = False) -> None:
        """Count nothing before `start`; keys and values lie in host memory if `host`."""
        self.moved = 0
        self.loaded = 0
        self.stored = 0
        self._host = host
        self._counting = False

    @property
    def counted(self) -> StepBytes:
        """Bytes between `start` and `stop`."""
        return StepBytes(self.moved, self.loaded, self.stored)

    def start(self) -> None:
        """Count a step, from 0."""
        if not torch.compiler.is_compiling():
            self.moved = 0
            self.loaded = 0
            self.stored = 0
            self._counting = True

    def stop(self) -> None:
        """Count no more: what happens between steps belongs to none."""
        if not torch.compiler.is_compiling():
            self._counting = False

    def whole(self, parts: Any) -> None:
        """Count all of a tensor, or of each tensor in (nested) tuples."""
        if self._counts():
            self.moved += sum(t.nbytes for t in tensors(parts))

    def all_vectors(self, vectors: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
        """Read all keys and values, on `device`."""
        keys, values = vectors
        self.count_all_vectors(vectors)
        return (keys.to(device), values.to(device))

    def count_all_vectors(self, vectors: tuple[Tensor, Tensor]) -> None:
        """Count the reading of all keys and values."""
        for source in vectors:
            self.count_vectors(source, source.shape[2])

    def rows(self, source: Tensor, slots: Tensor, index: Tensor | None = None) -> Tensor:
        """Read vectors of slots, on the device of `slots`.

        Args:
            source: Keys or values, [B, H, S, D], contiguous.
            slots: [B, H, n] int64.
            index: `flat_slots` of the slots, if it is known.

        Returns:
            [B, H, n, D].
        """
        if self._host:
            return self.loaded_rows((source,), slots)[0]
        self.count_vectors(source, slots.shape[-1])
        batch, heads, size, dim = source.shape
        # An index of the flat view copies whole vectors: several times as fast as `gather`, which copies numbers.
        index = flat_slots(slots, size) if index is None else index
        flat = source.view(batch * heads * size, dim).index_select(0, index)
        return flat.view(batch, heads, slots.shape[-1], dim)

    def loaded_rows(self, sources: Sequence[Tensor], slots: Tensor) -> tuple[Tensor, ...]:
        """Read vectors of the same slots of keys and values in host memory, as `rows`."""
        for source in sources:
            self.count_vectors(source, slots.shape[-1])
        return load_slots(sources, slots)

    def count_rows(self, source: Tensor, count: int) -> None:
        """Count the reading of `count` vectors of each head of `source` [B, H, S, ...]."""
        if source.shape[2] and self._counts():
            self.moved += source.nbytes // source.shape[2] * count

    def count_vectors(self, source: Tensor, count: int) -> None:
        """Count the reading of `count` keys or values of each head of `source` [B, H, S, D]."""
        if source.shape[2] and self._counts():
            size = source.nbytes // source.shape[2] * count
            self.moved += size
            self.loaded += size if self._host else 0

    def count_stored(self, target: Tensor, count: int) -> None:
        """Count the writing of `count` keys or values of each head of `target` [B, H, S, D]."""
        if target.shape[2] and self._host and self._counts():
            self.stored += target.nbytes // target.shape[2] * count

    def count_channels(self, source: Tensor, count: int) -> None:
        """Count the reading of `count` channels of every vector of `source` [B, H, S, D]."""
        if source.shape[3] and self._counts():
            self.moved += source.nbytes // source.shape[3] * count

    def count_stages(self, codes: Iterable[Any], sizes: Iterable[int], count: int, group_size: int, page: int) -> None:
        """Count the decoding of `count` slots of each head from every stage that has slots, or of all that it has.

        Args:
            codes: Of each stage, the result of `Stage.alloc`, or a part of it.
            sizes: Slots of each stage.
            count: Slots of each head that are decoded.
            group_size: See `count_stage`.
            page: See `count_stage`.
        """
        for own, size in zip(codes, sizes, strict=True):
            if size:
                self.count_stage(own, size, min(count, size), group_size, page)

    def count_stage(self, codes: Any, size: int, count: int, group_size: int, page: int) -> None:
        """Count the decoding of `count` slots of each head from the codes of a stage.

        A tensor with a vector for each slot is read for these slots, and one with a vector for each group of slots for
        as many groups as there are in whole pages, or for the group of each slot. Other tensors are read whole.

        Args:
            codes: The result of `Stage.alloc`.
            size: Slots of the stage.
            count: Slots of each head that are decoded.
            group_size: Slots that share parameters.
            page: Slots of an entry of the reader.
        """
        groups = count if page == 1 else -(-count // group_size)
        for tensor in tensors(codes):
            if tensor.shape[2] == size:
                self.count_rows(tensor, count)
            elif group_size > 1 and tensor.shape[2] == size // group_size:
                self.count_rows(tensor, min(groups, tensor.shape[2]))
            else:
                self.whole(tensor)

    def _counts(self) -> bool:
        # Asked first: a compiler cannot trace the bytes of a tensor.
        return not torch.compiler.is_compiling() and self._counting
