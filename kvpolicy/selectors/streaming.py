"""StreamingLLM: keep attention sinks and the newest tokens."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from kvpolicy.protocols import DecodeMode, Selector, State, View
from kvpolicy.selectors.common import by_position, keep_always
from kvpolicy.text.strategy import least, strategy


@strategy
class StreamingLLM(Selector):
    """Keep the first tokens as attention sinks, and the newest tokens.

    Softmax assigns excess attention to the first tokens. If they are evicted, a sliding window fails.

    Args:
        sinks: How many of the first tokens of a row are always kept. Padding is never a sink.
        decode: `evict` slides the window over generated tokens; `grow` keeps them in addition to the budget.

    Raises:
        KVPolicyError: If `sinks` is negative.

    Examples:
        >>> from kvpolicy import Policy
        >>> Policy.parse("streaming:sinks=2@64").selector
        StreamingLLM(sinks=2, decode='evict')

    Source:
        StreamingLLM (arXiv:2309.17453), Section 3.2, and its authors' code. Differences:

        - Tokens keep their original rotary positions. The authors store unrotated keys and rotate them by their index
          in the cache at each step.
        - The sinks are the first valid tokens of each row, never pad tokens.
        - The window slides by one token in each step. The authors' demo frees slots once per turn.
        - The budget covers sinks and window together. The code has two sizes, 4 and 512 by default, and 4 and 2,000 in
          its demo.
    """

    sinks: int = least(0, 4)
    decode: DecodeMode = "evict"

    nested_from: ClassVar[int | None] = 1

    @property
    def positions_only(self) -> bool:
        return True

    @property
    def min_tokens(self) -> int:
        return self.sinks + 1

    def priority(self, state: State, view: View) -> Tensor:
        """Sinks are always kept, other tokens by position: [B, H, N]."""
        sink = view.valid & (view.positions < self.sinks)
        return keep_always(by_position(view.positions), sink)
