"""The forward that runs on a cache: what is known of it, and that it is the only one, reaches every layer and ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from kvpolicy.engine.decode import Step
from kvpolicy.engine.shown_prompt import ShownPrompt
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.planning.tokens import Tokens
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


@dataclass(eq=False)
class RunningForward:
    """Facts of the running forward of a cache; between two forwards, those of none.

    Attributes:
        one_token: Whether it is a decode step.
        holds: Whether its tokens are held until the prompt is complete, or replayed.
        adds_whole: Whether its tokens are all kept, beyond the budget.
        added: How many these are, [B] int64; None before they are known, and if tokens compete.
        rope_offset: Offset of the rotary positions from the rows' positions, [B]; None unless keys are ever unrotated.
        first: Rows without a token before it, [B] bool; None if there are none.
        unbegun: Rows in their first prompt, earlier chunks included, [B] bool; None unless layers are measured.
        valid: Which of its tokens are not padding, [B, P] bool; None if all are, or nothing asks.
        tokens: The division of the budget; None before the first layer has attended.
        waiting: Layers with a prompt that awaits its budget.
        shown: Prompts of layers whose keys later layers read, by index.
        steps: Steps of these layers, by index.
        attention: Numbers of layers that are measured by their attention, [B, ...] on the host, by index.
    """

    one_token: bool = False
    holds: bool = False
    adds_whole: bool = False
    added: Tensor | None = None
    rope_offset: Tensor | None = None
    first: Tensor | None = None
    unbegun: Tensor | None = None
    valid: Tensor | None = None
    tokens: Tokens | None = None
    waiting: list[PolicyLayer] = field(default_factory=list)
    shown: dict[int, ShownPrompt] = field(default_factory=dict)
    steps: dict[int, Step] = field(default_factory=dict)
    attention: dict[int, Tensor] = field(default_factory=dict)
