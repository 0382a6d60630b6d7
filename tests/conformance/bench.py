"""One policy layer without a model, for inputs that no model would give."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy import Policy
from kvpolicy.attention import Kernel
from kvpolicy.layer import PolicyLayer
from tests.conformance.replay import Turn, Verdict, kept_positions, replay

DIM = 8


class Bench:
    """A layer whose budgets a test decides.

    Attributes:
        turns: What was given and done, for the reference.
        budgets: Tokens that each row may keep; change it before a continuation.
    """

    def __init__(self, policy: Policy | str, budgets: list[int], *, new: int = 0, layer_idx: int = 0) -> None:
        self.policy = Policy.parse(policy) if isinstance(policy, str) else policy
        self.layer = PolicyLayer(self.policy, layer_idx, self._settle)
        self.budgets, self.turns, self._new = budgets, list[Turn](), new

    def _settle(self, layer: PolicyLayer) -> None:
        keep = torch.tensor(self.budgets)
        room = self._new if self.policy.selector.decode == "grow" else 0
        layer.settle(keep, torch.full_like(keep, room), max(self.budgets) + room)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None = None) -> Tensor:
        """Attend and take in q [B, Hq, n, D], k and v [B, H, n, D]."""
        kernel = Kernel(q.shape[-1] ** -0.5)
        single = self.layer.is_initialized and q.shape[2] == 1
        out = self.layer.forward(q, k, v, valid, kernel)
        if single:
            self.layer.tick()
        turn = Turn(q=q, k=k, v=v, valid=valid, kernel=kernel, out=out)
        turn.kept, turn.keep, turn.budget = kept_positions(self.layer), self.budgets, self.layer.budget.tolist()
        self.turns.append(turn)
        return out

    def check(self) -> Verdict:
        """Hold everything so far against the reference."""
        return replay(self.policy, {self.layer.layer_idx: self.turns})


def draw(
    n: int, seed: int, *, batch: int = 1, heads: int = 2, group: int = 2, dim: int = DIM, sharp: float = 2.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k and v."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, h, n, dim, generator=generator) for h in (heads * group, heads, heads))
    return q * sharp, k, v


def padding(columns: int, *lengths: int, right: bool = False) -> Tensor:
    """Which columns hold a token, [B, columns] bool, where rows are padded on the left (or right)."""
    column = torch.arange(columns)
    size = torch.tensor(lengths)[:, None]
    return column < size if right else column >= columns - size
