"""The attention of each generated token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvpolicy.statistics.statistic import Context, Statistic


@dataclass(frozen=True)
class GeneratedAttention(Statistic[None]):
    """The attention of each generated token, which `Selector.step` is then given.

    Attributes:
        of_all_slots: Whether it must cover every slot, since tokens are ranked by the newest one alone: a reader that
            leaves slots unread is refused.
        of_all_heads: Whether tokens are ranked by its mean over all heads of a layer, which then keep the same tokens.
    """

    of_all_slots: bool = False
    of_all_heads: bool = False
    words: ClassVar[str] = "the attention weights of each generated token"

    def serving(self, other: Any) -> GeneratedAttention:
        """Of all slots, or heads, if one of both asks for them."""
        return GeneratedAttention(
            self.of_all_slots or other.of_all_slots,
            self.of_all_heads or other.of_all_heads,
        )

    def reduced(self, context: Context) -> None:
        """Nothing of a prompt."""
