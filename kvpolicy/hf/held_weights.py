"""Weights that accelerate offloads, held on their device while a layer runs several times."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn


@contextmanager
def hold_weights(block: nn.Module) -> Generator[None]:
    """Load the offloaded weights of a layer once, and release them at the end.

    Hooks of accelerate stand on each module with weights, and would move them for every call.

    Args:
        block: The layer.
    """
    with ExitStack() as stack:
        for module in block.modules():
            hook: Any = getattr(module, "_hf_hook", None)
            # The layer's own hook runs already, around all tiles.
            if module is not block and any(getattr(one, "offload", False) for one in getattr(hook, "hooks", [hook])):
                _hold(module, hook, stack)
        yield


def _hold(module: Any, hook: Any, stack: ExitStack) -> None:
    """Run the hook of a module now and at the end, and not in between."""
    forward = module.__dict__.get("forward")
    hook.pre_forward(module)
    stack.callback(hook.post_forward, module, ())
    module.forward = module._old_forward
    stack.callback(setattr, module, "forward", forward)
