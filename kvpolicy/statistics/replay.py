"""Statistics of a replay: the attention of the context to itself when it is repeated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from kvpolicy.statistics.statistic import Context, Statistic

NOT_REPLAYED = -1.0
"""The score of a token that was not replayed, below every score."""


@dataclass(frozen=True)
class Replay(Statistic["Tensor | None"]):
    """How a context is run through the model once more after its prefill, so that its tokens can be scored.

    A replayed text is `first` and a chunk of the context, or `later`, the last `overlap` tokens of the chunk before,
    `reply`, and a chunk. It stands at positions after the context, attends to it, and leaves nothing behind. Every
    layer holds the whole prompt until the last has run.

    The result is the largest attention of a replayed query of the KV head, [B, H, N], -1 where a token was not
    replayed: tokens of later prompts, and those kept before. None if nothing was replayed.

    Attributes:
        chunk: Tokens of the context that are replayed at a time.
        sinks: First tokens of the context that are in the softmax of every chunk's scores.
        first: Token ids before the first chunk.
        later: Token ids before every other chunk.
        reply: Token ids between these and the chunk.
        overlap: How many of the last tokens of the chunk before are repeated; none without `later`.
        norms: Whether attention weights are multiplied by the norm of what the token adds to the residual stream, and
            divided by the norm of the query's input.
    """

    chunk: int
    sinks: int = 0
    first: tuple[int, ...] = ()
    later: tuple[int, ...] = ()
    reply: tuple[int, ...] = ()
    overlap: int = 0
    norms: bool = False

    along: ClassVar = "heads"

    def reduced(self, context: Context) -> Tensor | None:
        """The scores behind those of slots, which have none."""
        return None if context.replay is None else F.pad(context.replay, (context.slots, 0), value=NOT_REPLAYED)


@dataclass(frozen=True)
class ReplayedRows(Statistic[None]):
    """Some queries of the replay, spread evenly over the context of each row, for `Candidates.replay_attention`.

    Attributes:
        width: How many.
    """

    width: int

    def serving(self, other: Any) -> ReplayedRows:
        """As many as the wider one."""
        return self if self.width >= other.width else other

    def reduced(self, context: Context) -> None:
        """Nothing that a selector sees."""
