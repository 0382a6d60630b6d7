"""How many tokens of a prompt a layer takes at a time."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvpolicy.hf.model_spec import ModelShape
from kvpolicy.policy import Policy
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.validation import check_size

AUTO = "auto"
"""Chooses by the free memory of the device."""

SIZES = (16384, 8192, 4096, 2048, 1024, 512)
"""Tile sizes that are tried where a prompt is too long for one piece; the last one is taken if none fits."""

PART = 0.5
"""The part of the free memory that a forward may take; the cache needs the rest."""

TileSize = int | Literal["auto"] | None
"""The most tokens that a layer takes at a time, `auto`, or None for all."""


def check_tile(tile: object) -> TileSize:
    """Return a tile size.

    Args:
        tile: An integer of at least 1, `auto`, or None.

    Raises:
        KVPolicyError: If it is a number below 1, or another text.
        KVPolicyTypeError: If it is of another type.

    Examples:
        >>> check_tile(4096), check_tile("auto"), check_tile(None)
        (4096, 'auto', None)
    """
    if tile is None:
        return None
    if isinstance(tile, str):
        if tile != AUTO:
            raise KVPolicyError(f"tile must be a number of tokens, 'auto' or None, got {tile!r}; try tile=4096.")
        return AUTO
    if isinstance(tile, bool) or not hasattr(tile, "__index__"):
        raise KVPolicyTypeError(f"tile must be an integer, 'auto' or None, got {tile!r}; try tile=4096.")
    return check_size("tile", tile, 1)


def tile_size(tile: TileSize, tokens: Tensor, policy: Policy, model: ModelShape) -> int | None:
    """The tile size of a forward; None if layers take all tokens at once.

    Args:
        tile: The one that was asked for.
        tokens: The tokens of the forward, [B, P] or [B, P, hidden].
        policy: The policy.
        model: The cache of the model.
    """
    batch, columns = tokens.shape[:2]
    if tile == AUTO:
        tile = None if columns <= SIZES[-1] else _fitting(policy, model, (batch, columns), free_bytes(tokens.device))
    return tile if isinstance(tile, int) and tile < columns else None


def _fitting(policy: Policy, model: ModelShape, shape: tuple[int, int], free: int | None) -> int | None:
    """The largest tile with a forward that fits into a part of the free memory; None if the whole prompt does."""
    if free is None:
        return None
    return next((size for size in (None, *SIZES) if _needed(policy, model, shape, size) <= PART * free), SIZES[-1])


def _needed(policy: Policy, model: ModelShape, shape: tuple[int, int], tile: int | None) -> int:
    """Bytes of a forward of tokens [B, P], and of the keys and values of one layer."""
    batch, columns = shape
    prefill = model.prompt_prefill(policy, columns, tile)
    return prefill.activation_bytes(batch) + batch * columns * model.shape.token_nbytes


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device; None if it does not say, as a CPU does not."""
    if device.type != "cuda":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached
