"""StreamingLLM: keep attention sinks and the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.protocols import DecodeMode, Needs, Seen, State, View
from kvpolicy.selectors._common import by_position, check_decode, keep_always
from kvpolicy.spec.errors import KVPolicyError
from kvpolicy.spec.validation import check_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamingLLM:
    """Keep the first tokens as attention sinks, and the newest tokens.

    Softmax attention dumps what it does not need on the first tokens; without them a window collapses.

    Args:
        sinks: How many of a row's first tokens are kept for ever. Padding is never a sink.
        decode: `evict` slides the window over generated tokens; `grow` gives them room of their own.

    Raises:
        KVPolicyError: If `sinks` is negative.

    Examples:
        >>> from kvpolicy import Policy
        >>> Policy.parse("streaming:sinks=2@64").selector
        StreamingLLM(sinks=2, decode='evict')

    Source:
        StreamingLLM (arXiv:2309.17453), Section 3.2. Difference: tokens keep their original rotary positions; the
        authors store keys before rotation and rotate them at their index in the cache at each step.
    """

    sinks: int = 4
    decode: DecodeMode = "evict"

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        check_fields(self)
        check_decode(self.decode)
        if self.sinks < 0:
            raise KVPolicyError(f"sinks={self.sinks} is negative: use 0 or more.")

    @property
    def needs(self) -> Needs:
        """Nothing of attention."""
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
        """Sinks always, then the later the higher: [B, H, N]."""
        sink = view.valid & (view.positions < self.sinks)
        return keep_always(by_position(view.positions), sink)

    def statistic(self, seen: Seen, view: View) -> Tensor | None:
        """None: nothing is scored."""
        return None
