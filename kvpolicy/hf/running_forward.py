"""The forward that runs on a cache: what is known of it until it ends, in one object that each forward replaces."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from kvpolicy.engine.shown_prompt import ShownPrompt
from kvpolicy.engine.step import Step
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.planning.tokens import Tokens


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
