"""StreamingLLM: keep attention sinks and the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.protocols import DecodeMode, Needs, Seen, State, View
from kvpolicy.selectors._common import by_position, check_decode, keep_always
from kvpolicy.spec.arguments import named_options
from kvpolicy.spec.parameters import check_min
from kvpolicy.spec.validation import check_fields


@named_options
@dataclass(frozen=True, kw_only=True, slots=True)
class StreamingLLM:
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
        StreamingLLM (arXiv:2309.17453), Section 3.2. Difference: tokens keep their original rotary positions; the
        authors store unrotated keys and rotate them by their index in the cache at each step.
    """

    sinks: int = 4
    decode: DecodeMode = "evict"

    def __post_init__(self) -> None:
        """Check the hyperparameters."""
        check_fields(self)
        check_decode(self.decode)
        check_min(self, sinks=0)

    @property
    def needs(self) -> Needs:
        """No attention statistics."""
        return Needs()

    @property
    def min_tokens(self) -> int:
        """The sinks and the current token."""
        return self.sinks + 1

    def alloc(self, batch: int, heads: int, slots: int, device: torch.device | str) -> State:
        """No state."""
        return ()

    def observe(self, state: State, seen: Seen, view: View) -> State:
        """No state."""
        return state

    def step(self, state: State, row: Tensor, view: View) -> None:
        """No state."""

    def priority(self, state: State, view: View) -> Tensor:
        """Sinks are always kept, other tokens by position: [B, H, N]."""
        sink = view.valid & (view.positions < self.sinks)
        return keep_always(by_position(view.positions), sink)

    def statistic(self, seen: Seen, view: View) -> Tensor | None:
        """None: tokens are not scored."""
        return None
