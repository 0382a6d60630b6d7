"""Keys and values of a layer in host memory, and the copies between it and the device of the layer."""

from __future__ import annotations

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
    held = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
    return held.copy_(t)


def load_slots(source: Tensor, slots: Tensor) -> Tensor:
    """Copy vectors of slots to the device of `slots`.

    Args:
        source: [B, H, S, D] in host memory, or still on the device, contiguous.
        slots: [B, H, n] int64.

    Returns:
        [B, H, n, D].
    """
    batch, heads, size, dim = source.shape
    flat = source.view(batch * heads * size, dim)
    index = flat_slots(slots.to(source.device), size)
    if not (source.is_cpu and pins(slots.device)):
        return flat.index_select(0, index).view(*slots.shape, dim).to(slots.device)
    # Gathered on the host into pinned memory, which torch reuses only after the copy from it has ended.
    gathered = torch.empty(len(index), dim, dtype=source.dtype, pin_memory=True)
    torch.index_select(flat, 0, index, out=gathered)
    return gathered.to(slots.device, non_blocking=True).view(*slots.shape, dim)
