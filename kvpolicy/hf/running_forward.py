"""The forward that runs on a cache: what it is, and what its layers leave until it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from kvpolicy.engine.decode import SharedStep, Step
from kvpolicy.engine.shown_prompt import ShownPrompt
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.hf.states import IdleRows
from kvpolicy.planning.tokens import Tokens
from kvpolicy.text.errors import KVPolicyStateError


@dataclass(eq=False, kw_only=True)
class RunningForward:
    """A forward of a cache, made when it begins; between two forwards, one that does not run.

    The first fields are facts, which do not change while it runs. The others are what its layers leave.

    Attributes:
        runs: Whether it runs; one that was interrupted runs forever, so that no other can begin.
        is_step: Whether it is a decode step; no hook sees a compiled one, during which no forward runs.
        holds: Whether its tokens are held until the prompt is complete, or replayed.
        adds_whole: Whether its tokens are all kept, beyond the budget.
        rope_offset: Offset of the rotary positions from the rows' positions, [B]; None unless keys are ever unrotated.
        first: Rows without a token before it, [B] bool; None if there are none.
        unbegun: Rows in their first prompt, earlier chunks included, [B] bool; None unless layers are measured.
        valid: Which of its tokens are not padding, [B, P] bool; None if all are, or nothing asks.
        wants_cosines: Whether the residual stream of layers is measured.
        wants_massive: Whether a codec needs the largest activations of its tokens.
        compares_layers: Whether the budget is divided when all layers were measured.
        idle: Rows without a token, whose states must stay; None if there are none, or no states.

        shared: What the layers of a decode step share.
        missing: Layers that have not attended yet.
        residuals: Inputs of layers that are being measured, [B, P, hidden], by layer.
        massive: Tokens with the largest activations, [B, P] bool, by layer.
        attention: Numbers of layers that are measured by their attention, [B, ...] on the host, by index.
        waiting: Layers with a prompt that awaits its budget.
        shown: Prompts of layers whose keys later layers read, by index.
        steps: Steps of these layers, by index.
        tokens: The division of the budget; None before it was divided.
        added: How many tokens are kept beyond the budget, [B] int64; None before they are known, and if tokens compete.
    """

    runs: bool = False
    is_step: bool = False
    holds: bool = False
    adds_whole: bool = False
    rope_offset: Tensor | None = None
    first: Tensor | None = None
    unbegun: Tensor | None = None
    valid: Tensor | None = None
    wants_cosines: bool = False
    wants_massive: bool = False
    compares_layers: bool = False
    idle: IdleRows | None = None

    shared: SharedStep | None = None
    missing: set[int] = field(default_factory=set[int])
    residuals: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    massive: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    attention: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    waiting: list[PolicyLayer] = field(default_factory=list[PolicyLayer])
    shown: dict[int, ShownPrompt] = field(default_factory=dict[int, ShownPrompt])
    steps: dict[int, Step] = field(default_factory=dict[int, Step])
    tokens: Tokens | None = None
    added: Tensor | None = None

    def check_idle(self, what: str) -> None:
        """Refuse the call `what` while the forward runs.

        Raises:
            KVPolicyStateError: If it runs, or was interrupted.
        """
        if self.runs:
            raise KVPolicyStateError(
                f"{what} must be called between two forwards, got a cache on which one runs or was interrupted; try a "
                "new cache, or call its reset()."
            )


def newest_valid(mask: object, new: int) -> Tensor | None:
    """Which of the `new` newest columns of a mask are not padding, [B, new] bool; None if it is no mask of tokens.

    Any other mask is refused elsewhere.
    """
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] >= new:
        return mask[:, -new:].bool()
    return None


def refuse_gradients(out: Tensor) -> None:
    """Let a backward pass through attention to slots fail: the slots hold no graph."""
    # Only when gradients flow: a forward outside `no_grad` that is never differentiated is harmless.
    if out.requires_grad and not torch.compiler.is_compiling():
        out.register_hook(_refuse)


def _refuse(gradient: Tensor) -> NoReturn:
    raise KVPolicyStateError(
        "Gradients cannot flow through a cache under a policy, whose slots hold no graph; try to run the whole text in "
        "one forward, or detach the policy."
    )
