"""Keyformer: accumulated attention whose scores are perturbed by Gumbel noise."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvpolicy.kernels.draws import exponentials, mixed
from kvpolicy.protocols import SMALLEST_HEAD, DecodeMode, HeadShape, Ranks, Selector, State, View, scoped
from kvpolicy.selectors.common import group_mean, keep_always, recent_tokens
from kvpolicy.statistics import AttentionRows, GeneratedAttention, ReducedRows, Results, Statistic
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.strategy import between, least, strategy

_TINY = torch.finfo(torch.float32).tiny


@scoped(generated="row")
class Perturbed(NamedTuple):
    """The perturbed attention that each slot has received.

    Attributes:
        score: Summed over the queries, [B, H, S] fp32.
        generated: Tokens that were generated since the last prompt, [B] fp32.
    """

    score: Tensor
    generated: Tensor


@strategy
class Keyformer(Selector):
    """Keep the newest tokens, and those that have received the most attention under random noise.

    Gumbel noise is added to the scores of each query before the softmax, which is then divided by a temperature. A
    token that was ignored so far gets a chance to be kept, the more so the longer the generation.

    Args:
        recent: Fraction of the budget for the window of newest tokens, in [0, 1], and always the newest token; the
            rest is for key tokens.
        tau_init: The temperature in a prompt, and at the first generated token.
        tau_end: The temperature that it rises to, at least `tau_init`.
        steps: Over how many generated tokens it rises.
        seed: Seed of the noise.
        decode: `evict` continues to accumulate and evict during generation; `grow` keeps generated tokens in addition
            to the budget.

    Raises:
        KVPolicyError: If `recent` is outside [0, 1], `tau_init` is not above 0 or exceeds `tau_end`, `steps` is below 1
            or `seed` is negative.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("keyformer:recent=0.5@0.2"))
        'keyformer:recent=0.5@0.2'

    Source:
        Keyformer (arXiv:2403.09054), Section 3, and its authors' code. Differences:

        - The noise of a score is a function of the seed, the layer, the query head and the positions of the query and
          the token, so that a row of a batch, a chunk and a rank draw as if alone, and a run can be repeated. The code
          draws anew in each call.
        - The temperature rises from 1 to 2 in 100 generated tokens, as in the code but one token later, and stays
          there. The paper's rises over the length of the generation, which is not known here; the code's goes on.
        - The key tokens are chosen again with each token. The code combines its masks, which freezes the choice after
          the prompt: later tokens stay only while they are in the window.
        - The query heads of a KV head are averaged. The paper has none.
        - The rows of a batch are separate. The code sums over them.
        - The logarithm of a weight takes the place of a score, from which it differs by a constant of the query. With
          learned attention sinks, the noisy softmax is over tokens alone.
        - `recent` is a fraction of the budget, as in the paper's experiments, where it is 0.2 to 0.3.
    """

    recent: float = between(0, 1, 0.3)
    tau_init: float = between(0.01, 100, 1.0)
    tau_end: float = between(0.01, 100, 2.0)
    steps: int = least(1, 100)
    seed: int = least(0, 0)
    decode: DecodeMode = "evict"

    compares_heads: ClassVar[bool] = True
    nested_from: ClassVar[int | None] = 1

    def __post_init__(self) -> None:
        if self.tau_init > self.tau_end:
            raise KVPolicyError(
                f"Keyformer.tau_end must be at least tau_init, got {self.tau_end} and {self.tau_init}; "
                f"try tau_end={2 * self.tau_init}."
            )

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """The attention of every query, perturbed, and that of each decoded token."""
        return (ReducedRows(self), GeneratedAttention())

    def alloc(
        self, batch: int, heads: int, slots: int, device: torch.device | str, head: HeadShape = SMALLEST_HEAD
    ) -> State:
        """Scores of zero, and nothing generated."""
        return Perturbed(
            torch.zeros(batch, heads, slots, dtype=torch.float32, device=device),
            torch.zeros(batch, dtype=torch.float32, device=device),
        )

    def reduce(self, rows: AttentionRows) -> Tensor:
        """The perturbed attention of some queries of a prompt, summed: [B, Hq, N]."""
        batch, heads, _, _ = rows.weights.shape
        keys = self._heads(heads, rows.layer_idx, rows.ranks, rows.queries.device)
        keys = mixed(keys[:, None], rows.queries[:, None].clamp_min(0))  # [B, Hq, W]
        group = heads // rows.positions.shape[1]
        grouped = rows.weights.unflatten(1, (-1, group))
        noise = exponentials(
            keys.unflatten(1, (-1, group))[..., None], rows.positions[:, :, None, None].clamp_min(0).long()
        )
        return perturbed(grouped, noise, self.tau_init).sum(3).reshape(batch, heads, -1)

    def observe(self, state: Perturbed, seen: Results, view: View) -> State:
        """Add the attention of a prefill."""
        return Perturbed(state.score + group_mean(seen[ReducedRows], view), torch.zeros_like(state.generated))

    def step(self, state: Perturbed, row: Tensor, view: View) -> None:
        """Add the attention of a decoded token."""
        _, heads, group, _ = row.shape
        keys = self._heads(heads * group, view.layer_idx, view.ranks, row.device)
        keys = mixed(keys, (view.length - 1)[:, None]).unflatten(1, (heads, group))
        noise = exponentials(keys[..., None], view.positions[:, :, None].clamp_min(0).long())
        share = (state.generated / self.steps).clamp_max(1)
        tau = self.tau_init + (self.tau_end - self.tau_init) * share
        state.score.add_(view.ranks.group_mean(perturbed(row, noise, tau[:, None, None, None])))
        state.generated.add_(1)

    def priority(self, state: Perturbed, view: View) -> Tensor:
        """The window is always kept, other tokens by what they have accumulated: [B, H, N]."""
        return keep_always(state.score, recent_tokens(view, self.recent))

    def attention(self, state: Perturbed) -> Tensor:
        return state.score

    def statistic(self, seen: Results, view: View) -> Tensor | None:
        """Perturbed attention summed over the queries of this forward, per query head."""
        return seen[ReducedRows]

    def _heads(self, own: int, layer_idx: int, ranks: Ranks, device: torch.device) -> Tensor:
        """A key of each of this rank's `own` query heads, [own] int64."""
        every = torch.arange(ranks.query_heads(own), device=device)
        return ranks.mine(mixed(mixed(self.seed, torch.full_like(every, layer_idx)), every))


def perturbed(weights: Tensor, noise: Tensor, tau: Tensor | float) -> Tensor:
    """Attention as if Gumbel noise had been added to its scores, which are then divided by a temperature.

    Args:
        weights: Attention weights [..., N] fp32.
        noise: Exponential draws [..., N]; minus the logarithm of a draw is the noise of a score.
        tau: The temperature, a number or [..., 1].

    Returns:
        [..., N], which sums to 1; 0 where there is no weight at all.
    """
    # softmax((s + g) / tau) is proportional to (exp(s) * exp(g)) ** (1 / tau), and exp(g) is 1 over the draw.
    found = weights / noise
    if isinstance(tau, Tensor) or tau != 1:
        # Relative to the largest, or a low temperature would underflow.
        found = (found / found.amax(-1, keepdim=True).clamp_min(_TINY)).pow(1 / tau)
    return found / found.sum(-1, keepdim=True).clamp_min(_TINY)
