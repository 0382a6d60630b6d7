"""Functions that run on the host and are never part of a compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def on_host(fn: F) -> F:
    """Exclude a function that reads sizes and decides from `torch.compile`; a call to it breaks the graph."""
    return cast("F", torch.compiler.disable(fn))
