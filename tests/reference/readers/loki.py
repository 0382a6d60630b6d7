"""Tokens with a large product in a few coordinates of a calibrated basis."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from safetensors import safe_open

from . import Vector, product

DEFAULTS: dict[str, Any] = {"read": 256, "channels": "auto"}
SMALL = "loki:read=6:channels=3:dense=0:calibration=FOLDER/lowrank"


def page(config: dict[str, Any], slots: int) -> int:
    """Single slots."""
    return 1


@functools.cache
def directions(folder: str, layer: int) -> list[list[float]]:
    """The directions of falling variance that all heads of a layer share; each one is orthogonal to those before it."""
    with safe_open(f"{folder}/tensors.safetensors", "pt") as file:  # pyright: ignore[reportUnknownVariableType]
        columns: list[list[float]] = file.get_tensor(f"keys.post.basis.{layer}")[0].double().T.tolist()  # pyright: ignore
    found: list[list[float]] = []
    for column in columns:
        for other in found:
            along = product(column, other)
            column = [a - along * b for a, b in zip(column, other, strict=True)]
        length = product(column, column) ** 0.5
        found.append([a / length for a in column])
    return found


def estimate(config: dict[str, Any], keys: Sequence[Vector], query: Vector, channels: Sequence[int]) -> float:
    """The product of the first coordinates."""
    count = max(len(query) // 4, 1) if config["channels"] == "auto" else config["channels"]
    basis = directions(config["calibration"], 0)[:count]
    return sum(product(keys[0], direction) * product(query, direction) for direction in basis)
