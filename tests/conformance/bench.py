"""One policy layer without a model, for inputs that no model would give."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy import Policy
from kvpolicy.engine.hidden_stats import massive_tokens
from kvpolicy.engine.invariants import check_invariants
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.replay import add_scores, chunks, received
from kvpolicy.engine.replayed_queries import ReplayedQueries, no_queries
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.statistics import Forward, InputScores, Replay, ReplayedRows
from kvpolicy.statistics.replay import NOT_REPLAYED
from kvpolicy.statistics.statistic import first_of
from kvpolicy.statistics.windows import ScoreTransform
from tests.conformance.access import coded_positions, kept_positions
from tests.conformance.calibration import HIDDEN
from tests.conformance.replay import Replayed, Turn, Twin, Verdict, reference_codec, replay

DIM = 8


class Bench:
    """A layer whose budgets a test decides.

    Attributes:
        turns: What was given and done, for the reference.
        budgets: Tokens that each row may keep; change it before a continuation.
        projection: The output projection [M, Hq * D], by default a random one from the first forward on.
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
        softcap: float | None = None,
        projection: Tensor | None = None,
    ) -> None:
        self.policy = Policy.parse(policy) if isinstance(policy, str) else policy
        policy = self.policy
        self.projection = projection
        parts = (policy.selector, policy.codec, policy.decode, policy.merger)
        self.layer = LayerStore(LayerSpec(layer_idx, *parts, rope=rope, projection=self._read_projection))
        self.budgets = budgets
        self.turns: list[Turn] = []
        self._new = new
        self._twin = twin
        self._softcap = softcap

    def _read_projection(self) -> Tensor:
        assert self.projection is not None, "it is drawn with the first forward"
        return self.projection

    def _budget(self) -> RowBudget:
        keep = torch.tensor(self.budgets)
        extra = torch.full_like(keep, self._new if self.policy.decode == "grow" else 0)
        return RowBudget(keep, extra, keep + extra)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None = None) -> Tensor:
        """Attend and take in q [B, Hq, n, D], k and v [B, H, n, D]."""
        if self.projection is None:
            chance = torch.Generator().manual_seed(self.layer.layer_idx)
            self.projection = torch.randn(HIDDEN, q.shape[1] * q.shape[-1], generator=chance)
        kernel = ScoreTransform(q.shape[-1] ** -0.5, self._softcap)
        single = self.layer.is_initialized and q.shape[2] == 1
        hidden = None
        replays = []
        given = self._inputs(q)
        if single:
            out = self.layer.append(q, k, v, valid, kernel, given)
            self.layer.count_step()
            self.layer.ensure_capacity()
        else:
            hidden, massive = self._look(q, valid)
            if not self.layer.is_initialized:
                self.layer.initialize(k, group=q.shape[1] // k.shape[1])
            out, pending = self.layer.attend_prompt(q, k, v, valid, kernel, given)
            replays, scores, queries = self._replay(pending, q.shape[1] // k.shape[1])
            pending = pending._replace(replay=scores, replayed=queries)
            self.layer.compress(pending, self._budget(), massive=massive)
        check_invariants(self.layer, keeps_newest=False)  # budgets here may be below those that keep it
        turn = Turn(q=q, k=k, v=v, valid=valid, kernel=kernel, out=out, hidden=hidden, replays=replays)
        turn.kept = kept_positions(self.layer)
        turn.keep = self.budgets
        turn.budget = self.layer.tensors.budget.tolist()
        turn.coded = coded_positions(self.layer)
        turn.inputs = None if given is None else given.hidden_states
        self.turns.append(turn)
        return out

    def check(self) -> Verdict:
        """Hold everything so far against the reference."""
        twin = self._twin or Twin(reference_codec(self.policy.codec))
        twin = twin._replace(projection=lambda layer: self.projection)
        return replay(self.policy, {self.layer.layer_idx: self.turns}, twin=twin)

    def _replay(
        self, pending: PendingPrompt, group: int
    ) -> tuple[list[Replayed], Tensor | None, ReplayedQueries | None]:
        """Random replays of rows that had no token before, the scores that they give, and queries for the merger."""
        asked = self.layer.spec.prompt_statistics
        context = pending.flags & (self.layer.tensors.length == 0)[:, None]
        plan = first_of(Replay, asked)
        rows = first_of(ReplayedRows, asked)
        queries = None
        if plan is None or not bool(context.any()):
            return [], None, None
        batch, heads, _, dim = pending.keys.shape
        replays = []
        scores = torch.full(pending.keys.shape[:3], NOT_REPLAYED)
        for chunk in chunks(context, plan):
            size = chunk.columns.shape[1]
            seed = 10 * context.shape[1] + chunk.number
            q, k, _ = draw(size, seed, batch=batch, heads=heads, group=group, dim=dim)
            add_scores(scores, chunk, received(q, k, pending.keys, pending.transform, chunk, chunk.chosen, None))
            replays.append(Replayed(chunk.number, q, k, chunk.chosen))
            if rows is not None:
                queries = queries or no_queries(q, context, rows.width)
                queries.add(q, 0, chunk, plan.chunk, size)
        return replays, scores, queries

    def _inputs(self, q: Tensor) -> Forward | None:
        """Random inputs of the layer [B, P, M], if the selector looks at them."""
        if first_of(InputScores, self.policy.selector.statistics) is None:
            return None
        chance = torch.Generator().manual_seed(len(self.turns) + 1)
        return Forward(nn.Identity(), torch.randn(q.shape[0], q.shape[2], HIDDEN, generator=chance), {})

    def _look(self, q: Tensor, valid: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Random hidden states [B, P, M] and their largest tokens [B, P], if the codec pins these."""
        traits = self.policy.codec.traits
        if traits.pins != "massive":
            return None, None
        hidden = torch.randn(q.shape[0], q.shape[2], 3, generator=torch.Generator().manual_seed(q.shape[2]))
        return hidden, massive_tokens(hidden, valid, traits.pinned)


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
