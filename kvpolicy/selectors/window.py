"""SlidingWindow: keep the newest tokens."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from kvpolicy.protocols import DecodeMode, Selector, State, View
from kvpolicy.selectors.common import by_position
from kvpolicy.text.strategy import strategy


@strategy
class SlidingWindow(Selector):
    """Keep the newest tokens.

    The size of the window is the budget. It needs no attention statistics, so a prefill has no overhead.

    Args:
        decode: `evict` slides the window over generated tokens; `grow` keeps them in addition to the budget.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy(selector=SlidingWindow(), budget=128))
        'window@128'

    Source:
        The baseline of SqueezeAttention (arXiv:2404.04793), Section 4. Differences: the window includes the current
        token (as in its Mistral code, but not in its Llama code), and prefill attention is never windowed (its Mistral
        code windows it).
    """

    decode: DecodeMode = "evict"

    nested_from: ClassVar[int | None] = 1

    @property
    def positions_only(self) -> bool:
        return True

    def priority(self, state: State, view: View) -> Tensor:
        """Higher priority for later tokens: [B, H, N]."""
        return by_position(view.positions)
