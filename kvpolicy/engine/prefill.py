"""A prompt that was attended to: what is kept of it until the layer's budget is known."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.attention import QueryWindow, ScoreTransform
from kvpolicy.protocols import Forward, MeanRotation, QueryMoments


class PendingPrompt(NamedTuple):
    """A prefill or chunk that was attended to and awaits its budget. It holds no autograd graph.

    Attributes:
        keys: [B, H, P, D].
        values: [B, H, P, D].
        valid: Which tokens are not padding, [B, P] bool; None if all are.
        transform: From products to attention weights.
        attn_sum: Attention summed over the queries, [B, Hq, S + P], if the selector needs it.
        window: The newest queries, if the selector needs them.
        probes: The probe queries, if the selector needs them.
        below_mean: The newest queries to count those that attend to a token less than the mean, if needed.
        moments: Moments of the queries without their rotation, if the selector needs them.
        mean_rotation: The layer's rotary embedding at the mean of some positions, likewise.
        query_absmax: Largest absolute query of each channel, [B, H, D] fp32, if the codec needs it.
        forward: The arguments of the attention module, if the selector needs them.
        wants_vectors: Whether the selector needs keys and values.
    """

    keys: Tensor
    values: Tensor
    valid: Tensor | None
    transform: ScoreTransform
    attn_sum: Tensor | None = None
    window: QueryWindow | None = None
    probes: QueryWindow | None = None
    below_mean: QueryWindow | None = None
    moments: QueryMoments | None = None
    mean_rotation: MeanRotation | None = None
    query_absmax: Tensor | None = None
    forward: Forward | None = None
    wants_vectors: bool = False

    def lengths(self, seen: Tensor) -> Tensor:
        """Tokens that each row has seen with this prompt, [B] int64, after `seen` [B] tokens."""
        return seen + (self.keys.shape[2] if self.valid is None else self.valid.sum(-1))

    def positions(self, seen: Tensor) -> Tensor:
        """Position of each token in its row after `seen` [B] tokens, [B, P] int32, -1 for padding."""
        if self.valid is None:
            return (seen[:, None] + torch.arange(self.keys.shape[2], device=seen.device)).to(torch.int32)
        count = seen[:, None] + self.valid.long().cumsum(-1) - 1
        return count.where(self.valid, -1).to(torch.int32)

    @property
    def idle(self) -> Tensor | None:
        """Rows that have nothing but padding, [B] bool; None without padding."""
        return None if self.valid is None else ~self.valid.any(-1)

    @property
    def reads_past(self) -> bool:
        """Whether the statistics of this prompt need the keys of the slots before it."""
        return (
            self.window is not None
            or self.probes is not None
            or self.below_mean is not None
            or self.forward is not None
            or self.wants_vectors
        )

    def owned(self) -> PendingPrompt:
        """The same with memory of its own, so that keys and values do not keep a larger tensor alive."""
        keys, values = (t if t.untyped_storage().nbytes() == t.nbytes else t.clone() for t in self[:2])
        return self._replace(keys=keys, values=values)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        parts = [self.keys, self.values, self.valid, self.attn_sum, *(self.window or ()), *(self.probes or ())]
        parts += [*(self.below_mean or ()), *(self.moments or ()), self.query_absmax]
        if self.forward is not None:
            parts += [self.forward.hidden_states, self.forward.queries]
        return sum(t.nbytes for t in parts if t is not None)
