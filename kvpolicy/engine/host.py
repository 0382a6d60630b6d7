"""Work that belongs to the host: never part of a compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def on_host(fn: F) -> F:
    """Keep `torch.compile` out of a function that reads sizes and decides; calling it breaks a graph."""
    return cast("F", torch.compiler.disable(fn))
