"""A prompt: attended to in full, and what is remembered of it until a layer's budget is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.attention import ScoreTransform, Tail, attend, largest_queries, newest_queries
from kvpolicy.engine.probing import probe_queries
from kvpolicy.protocols import Forward

if TYPE_CHECKING:
    from kvpolicy.hf.layer import PolicyLayer


class Prompt(NamedTuple):
    """A prefill or chunk that was attended to, but not yet brought under the budget.

    Attributes:
        keys: [B, H, P, D].
        values: [B, H, P, D].
        valid: Which tokens are no padding, [B, P] bool; None where all are.
        total: Attention summed over the queries, [B, Hq, S + P], where the selector needs it.
        tail: The newest queries, where the selector needs them.
        probes: The probes, where the selector needs them.
        transform: What is done to the scores.
        forward: What the attention module was called with, where the selector needs it.
    """

    keys: Tensor
    values: Tensor
    valid: Tensor | None
    total: Tensor | None
    tail: Tail | None
    transform: ScoreTransform
    probes: Tail | None = None
    forward: Forward | None = None

    def lengths(self, seen: Tensor) -> Tensor:
        """Tokens that each row has seen with this prompt, [B] int64, from those `seen` before."""
        return seen + (self.keys.shape[2] if self.valid is None else self.valid.sum(-1))

    def positions(self, seen: Tensor) -> Tensor:
        """Position of each token in its row, [B, P] int32, -1 for padding."""
        if self.valid is None:
            return (seen[:, None] + torch.arange(self.keys.shape[2], device=seen.device)).to(torch.int32)
        count = seen[:, None] + self.valid.long().cumsum(-1) - 1
        return count.where(self.valid, -1).to(torch.int32)

    @property
    def idle(self) -> Tensor | None:
        """Rows that get nothing but padding, [B] bool; None where there are none."""
        return None if self.valid is None else ~self.valid.any(-1)

    def owned(self) -> Prompt:
        """The same, owning its memory, so that nothing larger stays alive behind a view."""
        keys, values = (t if t.untyped_storage().nbytes() == t.nbytes else t.clone() for t in self[:2])
        return self._replace(keys=keys, values=values)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        parts = (self.keys, self.values, self.valid, self.total, *(self.tail or ()), *(self.probes or ()))
        if self.forward is not None:
            parts = (*parts, self.forward.hidden_states, self.forward.queries)
        return sum(t.nbytes for t in parts if t is not None)


def attend_prompt(
    layer: PolicyLayer, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, transform: ScoreTransform
) -> tuple[Tensor, Prompt]:
    """Attend from a prompt or chunk to a layer's slots and to itself, and note what the policy must see of it.

    Args:
        layer: Whose policy; the largest queries are noted in its rows.
        q: [B, Hq, P, D].
        k: [B, H, P, D].
        v: [B, H, P, D].
        valid: Which of the P tokens are no padding, [B, P] bool; None where all are.
        transform: What is done to the scores.

    Returns:
        The output [B, Hq, P, D], and the prompt, which holds no autograd graph.
    """
    needs = layer.policy.selector.needs
    out, total = attend(q, k, v, transform, layer.past(), valid, needs.attn_sum)
    q = q.detach()
    if layer.rows is not None and layer.policy.codec.traits.query_absmax:
        largest = layer.ranks.largest(largest_queries(q, k.shape[1], valid))
        layer.rows.query_absmax.copy_(torch.maximum(layer.rows.query_absmax, largest))
    tail = newest_queries(q, valid, needs.window_queries) if needs.window_queries else None
    probes = probe_queries(q, valid, needs.probes) if needs.probes else None
    forward, layer.called = layer.called, None
    if forward is not None:
        forward = forward._replace(queries=q, valid=valid, **transform._asdict())
    return out, Prompt(k.detach(), v.detach(), valid, total, tail, transform, probes, forward)
