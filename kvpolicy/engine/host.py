"""How the engine's functions run: on the host and never in a compiled graph, and outside autocast."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def on_host(fn: F) -> F:
    """Exclude a function that reads sizes and decides from `torch.compile`; a call to it breaks the graph."""
    return cast("F", torch.compiler.disable(fn))


def outside_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Compute in the dtypes of the tensors: autocast would encode keys and rank tokens in half precision."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def inference_as(is_inference: bool) -> AbstractContextManager[Any]:
    """Compute in inference mode or outside of it, as the tensors were made that are changed or replaced."""
    if torch.is_inference_mode_enabled() == is_inference:
        return nullcontext()
    return torch.inference_mode(is_inference)
