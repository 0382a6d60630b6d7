"""Outputs inside a layer that transformers records on request, such as the logits of routers, joined over tiles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.utils import output_capturing


class Recorded:
    """Outputs that the running forward records while a layer takes its tiles."""

    def __init__(self) -> None:
        """Note what was recorded of earlier layers."""
        collector: Any = getattr(output_capturing, "_active_collector", None)
        found: dict[str, Any] = (None if collector is None else collector.get()) or {}
        self._lists = {key: parts for key, parts in found.items() if isinstance(parts, list)}
        self._starts: list[dict[str, int]] = []

    def begin_tile(self) -> None:
        """Note what was recorded before the next tile."""
        self._starts.append({key: len(parts) for key, parts in self._lists.items()})

    def join(self, rows: int) -> None:
        """Replace the records of all tiles by one of the whole prompt.

        Args:
            rows: Rows of the batch.
        """
        for key, parts in self._lists.items():
            starts = [start[key] for start in self._starts]
            tiles = [parts[start:stop] for start, stop in zip(starts, [*starts[1:], None], strict=True)]
            parts[starts[0] :] = [_joined(same, rows) for same in zip(*tiles, strict=True)]


def _joined(tiles: tuple[Any, ...], rows: int) -> Any:
    """The record of a module for all tokens, from those of tiles: [B, T, ...], or [B * T, ...] as routers have it."""
    if not all(isinstance(tile, Tensor) and tile.dim() for tile in tiles):
        return tiles[-1]
    if all(tile.shape[0] == rows for tile in tiles) and tiles[0].dim() > 2:
        return torch.cat(tiles, 1)
    return torch.cat([tile.unflatten(0, (rows, -1)) for tile in tiles], 1).flatten(0, 1)
