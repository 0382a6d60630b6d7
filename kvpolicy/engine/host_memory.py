"""Keys and values of a layer in host memory, and the copies between it and the device of the layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
