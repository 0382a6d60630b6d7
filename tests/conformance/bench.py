"""One policy layer without a model, for inputs that no model would give."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpolicy import Policy
from kvpolicy.engine.attention import ScoreTransform
from kvpolicy.engine.row_limits import massive_tokens
from kvpolicy.hf.layer import PolicyLayer
from tests.conformance.replay import Turn, Twin, Verdict, coded_positions, kept_positions, replay

DIM = 8


class Bench:
    """A layer whose budgets a test decides.

    Attributes:
        turns: What was given and done, for the reference.
        budgets: Tokens that each row may keep; change it before a continuation.
    """

    def __init__(
        self,
        policy: Policy | str,
        budgets: list[int],
        *,
        new: int = 0,
        layer_idx: int = 0,
        rope: Any = None,
        twin: Twin | None = None,
    ) -> None:
        self.policy = Policy.parse(policy) if isinstance(policy, str) else policy
        self.layer = PolicyLayer(self.policy, layer_idx, self._settle, rope)
        self.budgets, self.turns, self._new, self._twin = budgets, list[Turn](), new, twin

    def _settle(self, layer: PolicyLayer) -> None:
        keep = torch.tensor(self.budgets)
        room = self._new if self.policy.decode == "grow" else 0
        layer.settle(keep, torch.full_like(keep, room), keep + room)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None = None) -> Tensor:
        """Attend and take in q [B, Hq, n, D], k and v [B, H, n, D]."""
        kernel = ScoreTransform(q.shape[-1] ** -0.5)
        single = self.layer.is_initialized and q.shape[2] == 1
        hidden = None if single else self._look(q, valid)
        out = self.layer.forward(q, k, v, valid, kernel)
        if single:
            self.layer.tick()
        turn = Turn(q=q, k=k, v=v, valid=valid, kernel=kernel, out=out, hidden=hidden)
        turn.kept, turn.keep, turn.budget = kept_positions(self.layer), self.budgets, self.layer.budget.tolist()
        turn.coded = coded_positions(self.layer)
        self.turns.append(turn)
        return out

    def check(self) -> Verdict:
        """Hold everything so far against the reference."""
        return replay(self.policy, {self.layer.layer_idx: self.turns}, twin=self._twin)

    def _look(self, q: Tensor, valid: Tensor | None) -> Tensor | None:
        """Hidden states [B, P, M], random, of which the layer is told the largest, where its codec wants to know."""
        traits = self.policy.codec.traits
        if traits.pins != "massive":
            return None
        hidden = torch.randn(q.shape[0], q.shape[2], 3, generator=torch.Generator().manual_seed(q.shape[2]))
        self.layer.massive = massive_tokens(hidden, valid, traits.pinned)
        return hidden


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
