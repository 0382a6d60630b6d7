"""Regress: rewrite the values of kept tokens so that the observed queries get the output of the full cache."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from kvpolicy.mergers.common import group_rows
from kvpolicy.protocols import Candidates, Merged, Merger, MergerTraits, State
from kvpolicy.statistics import RecentQueries, Replay, ReplayedRows, Statistic
from kvpolicy.text.strategy import between, least, strategy

_CHUNK = 2048
"""Tokens of the context that are replayed at a time, as `kvzip` does by default."""

_SINKS = 4
"""First tokens of the context in the scores of every chunk, as in `kvzip`; regression takes no scores."""


@strategy
class Regress(Merger):
    """Rewrite the values of kept tokens by ridge regression on the attention of the last queries of the prompt.

    Or on that of queries from a replay of the prompt. After eviction, each of these queries gets another output than
    before. The smallest change of the kept values that undoes most of the difference is a ridge regression on the
    queries' attention over the kept tokens. Keys stay, and nothing is stored in addition. Generated tokens are not
    regressed on.

    Args:
        window: The number of queries to regress on.
        queries: Which ones: the newest of each prompt or chunk (`window`), or queries from a replay of the context,
            spread evenly over it (`replay`). Later prompts are not replayed, and their evicted tokens are dropped.
        ridge: The penalty on changes, as a fraction of the mean eigenvalue of the queries' products; the larger, the
            less values change.
        sinks: The first tokens of a row, whose values stay.
        recent: The newest tokens, whose values stay.

    Raises:
        KVPolicyError: If `window` is below 1, `queries` is unknown, `sinks` or `recent` is negative, or `ridge` is
            outside [1e-9, 1e9].

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("snapkv+regress:ridge=0.1@0.2"))
        'snapkv+regress:ridge=0.1@0.2'

    Source:
        The value fit of Attention Matching (arXiv:2602.16284); no reference code of this form is known. Differences:

        - it starts from the kept values and changes them as little as possible (the paper solves from zero, which
          removes all that the queries do not show);
        - the queries are the prompt's own last ones by default, of each chunk or turn by itself, and those of a replay
          by option, whose attention to the replay itself is left out; the replay has no instruction;
        - no keys are chosen and no score bias is fitted;
        - sinks and recent tokens keep their values, because later queries use them in ways that the observed ones do
          not show.
    """

    window: int = least(1, 32)
    queries: Literal["window", "replay"] = "window"
    ridge: float = between(1e-9, 1e9, 0.01)
    sinks: int = least(0, 4)
    recent: int = least(0, 32)

    @property
    def traits(self) -> MergerTraits:
        """It acts at the end of a prompt only."""
        return MergerTraits(when="prompt")

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """The attention of the observed queries."""
        if self.queries == "replay":
            return (Replay(chunk=_CHUNK, sinks=_SINKS), ReplayedRows(self.window))
        return (RecentQueries(self.window),)

    def merge_prompt(self, state: State, candidates: Candidates) -> Merged:
        """Regress the outputs of the window on the values of the targets."""
        attention = candidates.attention
        sinks = candidates.sinks
        if self.queries == "replay":
            attention = candidates.replay_attention
            sinks = candidates.replay_sinks
        if attention is None:  # a later prompt is not replayed
            return Merged(candidates.at_targets(candidates.values))
        rows = group_rows(attention[:, :, -self.window :], candidates).double()
        # In double precision: the products of n queries have eigenvalues from the ridge to n.
        values = candidates.values.double().masked_fill((candidates.positions < 0)[..., None], 0)
        kept = rows.masked_fill(~candidates.kept[:, :, None], 0)
        # A learned sink has as much weight beside the kept tokens as before. Not what a row leaves of 1, whose rounding
        # is large beside a row that has little weight on kept tokens.
        rest = kept.sum(-1, keepdim=True)
        if sinks is not None:
            rest = rest + group_rows(sinks[:, :, -self.window :, None], candidates).double()
        present = rows.sum(-1, keepdim=True) > 0
        kept = torch.where(rest > 0, kept / rest.masked_fill(rest <= 0, 1), 0)
        missing = rows @ values - kept @ values
        free = kept.gather(-1, candidates.targets[:, :, None].expand(-1, -1, rows.shape[2], -1))
        free = free.masked_fill(~self._changeable(candidates)[:, :, None], 0)
        products = free @ free.mT
        trace = products.diagonal(dim1=-2, dim2=-1).sum(-1)
        penalty = self.ridge * trace / present.sum((-2, -1)).clamp_min(1)
        penalty = torch.where(trace > 0, penalty, 1)[..., None, None]
        eye = torch.eye(rows.shape[2], dtype=rows.dtype, device=rows.device)
        change = free.mT @ torch.linalg.solve(products + penalty * eye, missing)
        before = candidates.at_targets(candidates.values)
        changes = candidates.evicted.any(-1)[..., None, None] & (change != 0)
        return Merged(torch.where(changes, before.double() + change, before.double()).to(before.dtype))

    def _changeable(self, candidates: Candidates) -> Tensor:
        """Which targets may get another value, [B, H, T] bool."""
        assert candidates.length is not None
        positions = candidates.at_targets(candidates.positions)
        newest = positions >= (candidates.length - self.recent)[:, None, None]
        return candidates.is_target & (positions >= self.sinks) & ~newest
