"""The arguments of an attention module, for selectors that compute their own scores, and for calibrations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from kvpolicy.statistics.statistic import Context, Statistic


class Forward(NamedTuple):
    """The arguments of an attention module's forward.

    Attributes:
        module: The attention module.
        hidden_states: Its input, [B, P, hidden].
        kwargs: Its other arguments, as the model's code passed them.
        rotary: The model's rotary embedding, or None.
        queries: The queries as attention takes them, [B, Hq, P, D].
        valid: Which of the P tokens are not padding, [B, P] bool; None if all are.
        scale: The factor that products of queries and keys are multiplied by.
        softcap: The cap that is then applied to them, or None.
        sinks: Learned scores that take part in the softmax, [Hq], or None.
    """

    module: nn.Module
    hidden_states: Tensor
    kwargs: dict[str, Any]
    rotary: nn.Module | None = None
    queries: Tensor | None = None
    valid: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class ModuleCall(Statistic[Forward]):
    """The arguments of the attention module in this forward."""

    reads_past: ClassVar[bool] = True
    reads_vectors: ClassVar[bool] = True
    words: ClassVar[str] = "the arguments of the attention modules"

    def reduced(self, context: Context) -> Forward:
        """The arguments."""
        return context.call
