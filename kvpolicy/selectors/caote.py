"""CAOTE: evict the token without which the attention output would change least."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.protocols import SMALLEST_HEAD, HeadShape, Reranks, Selector, State, View, rerank_every, scoped
from kvpolicy.selectors.base import Wrapper, attention_of, check_attention_base
from kvpolicy.selectors.common import keep_always, shares
from kvpolicy.selectors.snapkv import SnapKV
from kvpolicy.statistics import Results, Statistic, Vectors, union
from kvpolicy.text.strategy import checked, least, strategy

LEAST_REST = 1e-6
"""The least attention that the other tokens are taken to have, where one has almost all of it."""


@scoped(output="head")
class CaoteState(NamedTuple):
    """How far the value of each slot is from the attention output, and the state of the base.

    Attributes:
        distance: [B, H, S] fp32.
        output: The output that the distances are from, [B, H, D] fp32.
        base: The state of the base.
    """

    distance: Tensor
    output: Tensor
    base: State


@strategy
class CAOTE(Wrapper):
    """Rank the tokens of another selector by how much the attention output would change without them.

    Without a token of weight p and value v, an output o changes by exactly p / (1 - p) |v - o|. The weights are the
    attention that the base holds, as fractions of that of the head. So a token of large attention may go if its value
    is what the others add up to.

    Args:
        base: The selector that is refined; one that holds the attention of each token.
        fast: Whether the output is taken to be the mean of all values.
        every: After how many generated tokens the output and the distances are computed again; at most half the budget.

    Raises:
        KVPolicyError: If `every` is below 1, or the base holds no attention.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("caote:fast=true/h2o@0.2"))
        'caote:fast=true/h2o@0.2'

    Source:
        CAOTE (arXiv:2504.14051), of which the abstract was read: the closed form is exact and agrees with it. FastCAOTE
        is `fast=true`. Differences:

        - The paper computes output and distances in every step. Here they are computed after a prompt and every `every`
          steps, and a generated token has its distance from the output of that time. Weights are those of the base in
          every step.
        - What the base always keeps is kept.
        - 1 - p is at least 1e-6.
        - The `decode` mode is that of the base.
        - Budgets by head, `kvcompose` and `global` are refused, since outputs of heads compare only after the output
          projection, and codecs that demote by priority, since a fraction of attention needs all slots of a head.
    """

    base: Selector = checked(check_attention_base, SnapKV)
    fast: bool = False
    every: int = least(1, 128)

    @property
    def compares_heads(self) -> bool:
        """No: budgets by head leave no room for what it computes of each head while decoding."""
        return False

    @property
    def whole_heads(self) -> bool:
        """Yes: weights are fractions of the attention of a head."""
        return True

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """The needs of the base, and the values of the tokens, after a prompt, now and then, and when generated."""
        return union(self.base.statistics, (Vectors(generated=True),))

    @property
    def rerank_every(self) -> int:
        """As often as it asks for, or the base if that is more often."""
        return min(self.every, rerank_every(self.base) or self.every)

    def alloc(
        self, batch: int, heads: int, slots: int, device: torch.device | str, head: HeadShape = SMALLEST_HEAD
    ) -> State:
        """No distances, and the empty state of the base."""
        return CaoteState(
            distance=torch.zeros(batch, heads, slots, dtype=torch.float32, device=device),
            output=torch.zeros(batch, heads, head.value_size, dtype=torch.float32, device=device),
            base=self.base.alloc(batch, heads, slots, device, head),
        )

    def observe(self, state: CaoteState, seen: Results, view: View) -> State:
        """Update the base, and compute the output of its weights and the distances from it."""
        return self._measured(self.base.observe(state.base, seen, view), seen, view)

    def rerank(self, state: CaoteState, seen: Results, view: View) -> State:
        """Compute the output and the distances again."""
        base = state.base
        if rerank_every(self.base):
            assert isinstance(self.base, Reranks)
            base = self.base.rerank(base, seen, view)
        return self._measured(base, seen, view)

    def _measured(self, base: State, seen: Results, view: View) -> CaoteState:
        """The distances of all values from the output."""
        values = seen[Vectors].values.float().masked_fill(~view.valid[..., None], 0)  # invalid ones may be inf
        weights = view.valid.float() if self.fast else attention_of(self.base, base)
        output = shares(weights, view.valid)[:, :, None] @ values  # [B, H, 1, D]
        distance = torch.linalg.vector_norm(values - output, dim=-1).masked_fill(~view.valid, 0)
        return CaoteState(distance, output.squeeze(2), base)

    def step(self, state: CaoteState, row: Tensor, view: View) -> None:
        """Update the base, and compute the distance of the new token."""
        assert view.token is not None
        self.base.step(state.base, row, view)
        distance = torch.linalg.vector_norm(view.token.value.squeeze(2).float() - state.output, dim=-1, keepdim=True)
        state.distance.copy_(torch.where(view.newest(1), distance, state.distance))

    def priority(self, state: CaoteState, view: View) -> Tensor:
        """Tokens that the base always keeps are kept, others by the change without them: [B, H, N]."""
        share = shares(attention_of(self.base, state.base), view.valid)
        loss = share / (1 - share).clamp_min(LEAST_REST) * state.distance
        return keep_always(loss, self.base.priority(state.base, view) == torch.inf)
