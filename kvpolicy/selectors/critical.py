"""CriticalKV: let the size of what a value adds decide about a part of the budget."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.protocols import SMALLEST_HEAD, HeadShape, Selector, State, View, scoped
from kvpolicy.selectors.base import Wrapper, attention_of, check_attention_base
from kvpolicy.selectors.common import keep_always, mean_output_norm, shares
from kvpolicy.selectors.crush import top_mask
from kvpolicy.selectors.snapkv import SnapKV
from kvpolicy.statistics import OutputNorms, Results, Statistic, union
from kvpolicy.text.strategy import between, checked, finite, strategy


@scoped(typical="head")
class CriticalState(NamedTuple):
    """Norms of the values in each slot, and the state of the base.

    Attributes:
        norm: Norm of the value behind the output projection, [B, H, S] fp32; 0 for a generated token.
        first: Whether the base alone has chosen the token, [B, H, S] bool.
        typical: Mean norm of the prompt's tokens, [B, H] fp32.
        base: The state of the base.
    """

    norm: Tensor
    first: Tensor
    typical: Tensor
    base: State


@strategy
class CriticalKV(Wrapper):
    """Keep the best tokens of another selector, and then those of large attention times what their values add.

    A small attention weight matters if the value is large behind the output projection. The first part of the budget is
    for the tokens that the base ranks highest. The rest is for those of the highest product, in which attention has a
    small constant added, so that a large value counts although it has no attention yet.

    Args:
        base: The selector of the first part; one that holds the attention of each token.
        split: Fraction of the budget for the tokens of the base alone, in [0, 1].
        epsilon: Added to the fraction of its head's attention that a token has.

    Raises:
        KVPolicyError: If `split` is no fraction, `epsilon` is below 0, or the base holds no attention.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("critical/h2o@0.2"))
        'critical/h2o@0.2'

    Source:
        CriticalKV (arXiv:2502.03805), Algorithm 1, and kvpress (CriticalKVPress). Differences:

        - Attention is a fraction of what the tokens of the head have together, so that `epsilon` means the same for
          every base. kvpress takes the scores as they are. A fraction needs all slots of a head: head budgets need
          `decode=grow`, and codecs that demote by priority are refused.
        - The paper ranks a prompt only. While decoding, the tokens of the first part stay, others compete by their
          products, and a generated token counts as one of mean norm.
        - What the base always keeps is part of the first part, and is kept beyond it.
        - Each row has its own budget, and equal products keep the earlier token.
        - The `decode` mode is that of the base.
    """

    base: Selector = checked(check_attention_base, SnapKV)
    split: float = between(0, 1, 0.5)
    epsilon: float = finite(0, 1e-4)

    @property
    def whole_heads(self) -> bool:
        """Yes: weights are fractions of the attention of a head."""
        return True

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """The needs of the base, and the norms of values behind the output projection."""
        return union(self.base.statistics, (OutputNorms(),))

    def alloc(
        self, batch: int, heads: int, slots: int, device: torch.device | str, head: HeadShape = SMALLEST_HEAD
    ) -> State:
        """No norms, and the empty state of the base."""
        norm = torch.zeros(batch, heads, slots, dtype=torch.float32, device=device)
        return CriticalState(
            norm=norm,
            first=torch.zeros(norm.shape, dtype=torch.bool, device=device),
            typical=torch.zeros(batch, heads, dtype=torch.float32, device=device),
            base=self.base.alloc(batch, heads, slots, device, head),
        )

    def observe(self, state: CriticalState, seen: Results, view: View) -> State:
        """Update the base, and choose the tokens of the first part anew."""
        base = self.base.observe(state.base, seen, view)
        norm = mean_output_norm(seen, view).clamp_min(torch.finfo(torch.float32).tiny)  # 0 is that of a generated token
        priority = self.base.priority(base, view).masked_fill(~view.valid, -torch.inf)
        count = (view.budget.double() * self.split + 1e-9).floor().long()[:, None]
        total = view.valid.sum(-1)
        count = torch.where(total > view.budget[:, None], torch.minimum(count, total), 0)
        mean = norm.masked_fill(~view.valid, 0).sum(-1, dtype=torch.float64) / total.clamp_min(1)
        return CriticalState(norm, top_mask(priority, count) & view.valid, mean.float(), base)

    def priority(self, state: CriticalState, view: View) -> Tensor:
        """Tokens of the first part, and those that the base keeps, are kept, others by their product: [B, H, N]."""
        share = shares(attention_of(self.base, state.base), view.valid)
        norm = torch.where(state.norm > 0, state.norm, state.typical[..., None])
        protected = (self.base.priority(state.base, view) == torch.inf) | state.first
        return keep_always((share + self.epsilon) * norm, protected)
