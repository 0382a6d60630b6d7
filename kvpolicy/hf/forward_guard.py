"""The forward that runs on a cache: one at a time, through every layer, and to its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from kvpolicy.spec.errors import KVPolicyError, KVPolicyStateError

if TYPE_CHECKING:
    from kvpolicy.hf.layer import PolicyLayer


class Running:
    """Whether a forward runs on a cache, and what is held until it ends.

    Attributes:
        now: Whether one does.
        residuals: Inputs of layers that are being measured, [B, P, D].
        columns: Columns of all forwards in eager mode; counted here, where no device is waited for.
    """

    def __init__(self) -> None:
        """None runs."""
        self.now: bool = False
        self.residuals: dict[int, Tensor] = {}
        self.columns: int = 0

    def begin(self, layers: Sequence[PolicyLayer], columns: int) -> None:
        """Note that a forward of so many columns begins, in which every layer must attend.

        Raises:
            KVPolicyStateError: Where another has not ended.
        """
        if self.now:
            raise KVPolicyStateError(
                "A forward on this cache was broken off, or still runs in another thread, so that its layers do not "
                "agree: start a new cache, or call its reset()."
            )
        self.now = True
        self.columns += columns
        self.residuals.clear()
        for layer in layers:
            layer.waits = True
            if layer.is_initialized and layer.length.is_inference() and not torch.is_inference_mode_enabled():
                layer.revive()

    def check(self, layers: Sequence[PolicyLayer]) -> None:
        """Raise KVPolicyStateError where a layer was left out: its answer was not the policy's."""
        for layer in layers:
            waits, layer.waits = layer.waits, None
            if waits:
                raise KVPolicyStateError(
                    f"Layer {layer.layer_idx} did not attend to the cache's slots, as it does where it checkpoints "
                    "gradients in training mode, or was replaced after attaching: call model.eval(), or attach last."
                )

    def check_update(self) -> None:
        """Raise KVPolicyError where no forward of the cache's own model hands over keys."""
        if not self.now and not torch.compiler.is_compiling():
            raise KVPolicyError(
                "This cache belongs to a model with a policy, and the model that was called has none: attach one to "
                "it, and make its cache with kvpolicy.PolicyCache(model)."
            )


def check_first(layer: PolicyLayer) -> None:
    """Raise KVPolicyStateError where a layer attends again in one forward: its tokens would be taken in again."""
    if layer.waits is False and not torch.compiler.is_compiling():
        raise KVPolicyStateError(
            f"Layer {layer.layer_idx} attended twice in one forward, and every token would be taken in twice: use a "
            "model whose layers attend once."
        )


def note_attended(layer: PolicyLayer, out: Tensor, reads: bool) -> Tensor:
    """Note that a layer has attended, to its slots where `reads`: no gradient may come back from these.

    Args:
        layer: The layer.
        out: Its output, which is returned.
        reads: Whether it had slots to attend to.
    """
    if layer.waits is not None:  # it is in a compiled step, which shall write to nothing on the host
        layer.waits = False
    if reads and out.requires_grad and not torch.compiler.is_compiling():
        out.register_hook(_refuse)
    return out


def _refuse(gradient: Tensor) -> NoReturn:
    raise KVPolicyStateError(
        "Gradients cannot flow through a cache under a policy, whose slots hold no graph: run the whole text in one "
        "forward, or detach the policy."
    )
