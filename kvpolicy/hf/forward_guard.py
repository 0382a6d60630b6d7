"""The forward that runs on a cache: one at a time, through every layer, and to its end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import Tensor

from kvpolicy.text.errors import KVPolicyError, KVPolicyStateError


class ForwardGuard:
    """Whether a forward runs on a cache, which layers it has still to reach, and what is kept until it ends.

    Attributes:
        running: Whether one runs.
        residuals: Inputs of layers that are being measured, [B, P, hidden], by layer.
        massive: Tokens with the largest activations, [B, P] bool, by layer.
    """

    def __init__(self) -> None:
        """None runs."""
        self.running = False
        self.residuals: dict[int, Tensor] = {}
        self.massive: dict[int, Tensor] = {}
        self._pending: set[int] = set()

    def begin(self, layers: Iterable[int]) -> None:
        """Record that a forward begins, in which every layer of `layers` must attend.

        Raises:
            KVPolicyStateError: If another has not ended.
        """
        if self.running:
            raise KVPolicyStateError(
                "Every forward on a cache must end before the next one, got a cache on which one was interrupted, or "
                "still runs in another thread; try a new cache, or its reset()."
            )
        self.running = True
        self.residuals.clear()
        self.massive.clear()
        self._pending = set(layers)

    def end(self) -> None:
        """Record that the forward has ended.

        Raises:
            KVPolicyStateError: If a layer was left out: the output is not the policy's.
        """
        left_out = sorted(self._pending)
        self._pending.clear()
        if left_out:
            raise KVPolicyStateError(
                f"Every layer must attend to the cache's slots, got a forward without layer {left_out[0]}, which "
                "checkpoints gradients in training mode, or was replaced after attaching; try model.eval(), or attach "
                "last."
            )

    def check_update(self) -> None:
        """Refuse keys outside a forward of the cache's own model.

        Raises:
            KVPolicyError: If no such forward runs.
        """
        if not self.running and not torch.compiler.is_compiling():
            raise KVPolicyError(
                "The model must be the one whose policy the cache belongs to, got one without a policy; try to attach "
                "one to it, and to make its cache with kvpolicy.PolicyCache(model)."
            )

    def check_idle(self, what: str) -> None:
        """Refuse the call `what` while a forward runs.

        Raises:
            KVPolicyStateError: If one runs, or was interrupted.
        """
        if self.running:
            raise KVPolicyStateError(
                f"{what} must be called between two forwards, got a cache on which one runs or was interrupted; try a "
                "new cache, or call its reset()."
            )

    def note_attention(self, layer_idx: int) -> None:
        """Record that a layer attends.

        Raises:
            KVPolicyStateError: If it has already attended in this forward: its tokens would be stored twice.
        """
        if not self.running:  # a step that is compiled as a whole changes nothing on the host
            return
        if layer_idx not in self._pending and not torch.compiler.is_compiling():
            raise KVPolicyStateError(
                f"Every layer must attend once in a forward, got layer {layer_idx} twice, which would store every "
                "token twice; try a model whose layers attend once."
            )
        self._pending.discard(layer_idx)


def refuse_gradients(out: Tensor) -> None:
    """Let a backward pass through attention to slots fail: the slots hold no graph."""
    if out.requires_grad and not torch.compiler.is_compiling():
        # Only when gradients flow: a forward outside `no_grad` that is never differentiated is harmless.
        out.register_hook(_refuse)


def _refuse(gradient: Tensor) -> NoReturn:
    raise KVPolicyStateError(
        "Gradients cannot flow through a cache under a policy, whose slots hold no graph; try to run the whole text in "
        "one forward, or detach the policy."
    )
