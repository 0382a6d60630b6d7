"""How many tokens of a prompt a layer takes at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kvpolicy.spec.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.spec.validation import check_size

if TYPE_CHECKING:
    from kvpolicy.hf.attachment import Attachment

AUTO = "auto"
"""Chooses by the free memory of the device."""

TileSize = int | Literal["auto"] | None
"""The most tokens that a layer takes at a time, `auto`, or None for all."""


def check_tile(tile: object) -> TileSize:
    """Return a tile size.

    Raises:
        KVPolicyError: If it is a number below 1, or another text.
        KVPolicyTypeError: If it is of another type.

    Examples:
        >>> check_tile(4096), check_tile("auto"), check_tile(None)
        (4096, 'auto', None)
    """
    if tile is None or tile == AUTO:
        return tile  # pyright: ignore[reportReturnType]
    if isinstance(tile, str):
        raise KVPolicyError(f"tile must be a number of tokens, 'auto' or None, got {tile!r}; try tile=4096.")
    if isinstance(tile, bool):
        raise KVPolicyTypeError(f"tile must be an integer, 'auto' or None, got {tile!r}; try tile=4096.")
    return check_size("tile", tile, 1)


def tile_size(attachment: Attachment, tokens: Tensor) -> int | None:
    """The tile size of a forward of `tokens` [B, P(, hidden)]; None if layers take all at once."""
    tile = attachment.tile
    if tile == AUTO:
        free = free_bytes(tokens.device)
        return None
    return tile if isinstance(tile, int) and tile < tokens.shape[1] else None


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device, None if it does not say, as a CPU does not."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
