"""ProbeSalience: keep the tokens with the highest mean attention of a few probe queries."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvpolicy.protocols import SMALLEST_HEAD, DecodeMode, HeadShape, Scored, State, View
from kvpolicy.selectors.common import group_mean
from kvpolicy.statistics import Coming, Context, GeneratedAttention, Results, Statistic, WindowStatistic
from kvpolicy.statistics.statistic import by_head
from kvpolicy.statistics.windows import QueryWindow
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.strategy import between, strategy


class Probed(NamedTuple):
    """Attention of the probes to each candidate.

    Attributes:
        sums: [B, Hq, N] fp32, summed over the probes.
        counts: How many probes could attend to it, [B, Hq, N] fp32.
    """

    sums: Tensor
    counts: Tensor


@dataclass(frozen=True)
class ProbeQueries(WindowStatistic[Probed]):
    """Some queries of a prompt, and the sum of their attention to each candidate.

    Attributes:
        recent: Fraction of each row's queries that are the newest ones, in [0, 1].
        random: Fraction of them that is drawn at random from the others, in [0, 1].
        seed: Seed of the draw.
        window: The queries so far; None before a prompt.
    """

    recent: float
    random: float
    seed: int
    window: QueryWindow | None = None

    def described(self) -> str:
        """Their attention weights."""
        return f"the attention weights of probe queries ({self.recent + self.random:g} of all queries)"

    def columns(self, coming: Coming) -> Tensor:
        """Columns that are drawn for each row."""
        return probe_columns(coming.valid, coming.shape, self, coming.seen.device)

    def reduced(self, context: Context) -> Probed:
        """Sums of the probes' attention, and how many probes could see each token."""
        assert self.window is not None
        total = self.summed(context, lambda weights, part, tile: weights.sum(2))
        column = torch.arange(context.keys.shape[2], device=total.device)
        seen = ((self.window.at[..., None] >= column) & (self.window.at >= 0)[..., None]).sum(1)  # [B, P]
        every = (self.window.at >= 0).sum(1, keepdim=True).expand(-1, total.shape[2] - seen.shape[1])
        count = torch.cat([every, seen], -1).to(total)
        return Probed(total, count[:, None].expand(-1, total.shape[1], -1))

    def reordered(self, result: Probed, order: Tensor) -> Probed:
        """In another order."""
        return Probed(by_head(result.sums, order), by_head(result.counts, order))


class Salience(NamedTuple):
    """The attention of probes to the token of each slot, and the probes that could attend to it.

    Attributes:
        attn_sum: Attention summed over the probes, [B, H, S] fp32.
        probes: The number of probes that could attend to the token, [B, H, S] fp32.
    """

    attn_sum: Tensor
    probes: Tensor


@strategy
class ProbeSalience(Scored):
    """Rank tokens by the mean attention of the probe queries that can attend to them.

    Accumulated attention favors the first tokens, which more queries can attend to; a mean does not. It is estimated
    from a few probes: the newest queries of the prompt, and by default as many random ones. This is the ranking of
    ZipCache, and it works with any codec.

    Args:
        recent: Fraction of the prompt's queries that are probes because they are the newest, in [0, 1].
        random: Fraction of them that are random probes, in [0, 1].
        seed: Seed of the random probes.
        decode: Whether generated tokens compete for the budget (`evict`) or are kept in addition to it (`grow`).

    Raises:
        KVPolicyError: If a fraction is outside [0, 1], or if both are zero.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("probe:recent=0.1@0.3"))
        'probe:recent=0.1@0.3'

    Source:
        ZipCache (arXiv:2405.14256), normalized attention scores from probe tokens, and its authors' code. Both store
        tokens at two precisions by this ranking, which is `probe+zipcache`. Differences:

        - As a selector, the ranking evicts.
        - The sum of a token is divided by the number of probes that can attend to it, as in the paper. The code divides
          by the number of all queries that can, although it sums over the probes only, which favors the newest tokens.
        - The query heads of a KV head are averaged. The code sums them.
        - Every generated token is a probe. In the code, one in a hundred is.
        - The newest token is always kept.
        - Probes are drawn from `seed` and the length of the row, the same in all layers, so that a row has the same
          probes as on its own.
    """

    recent: float = between(0, 1, 0.05)
    random: float = between(0, 1, 0.05)
    seed: int = 0
    decode: DecodeMode = "evict"

    compares_heads: ClassVar[bool] = True
    nested_from: ClassVar[int | None] = 1

    def __post_init__(self) -> None:
        if self.recent + self.random == 0:
            raise KVPolicyError("ProbeSalience.recent or random must be positive, got 0.0 for both; try recent=0.05.")

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """Attention sums over the probes, and the attention of each decoded token."""
        return (ProbeQueries(self.recent, self.random, self.seed), GeneratedAttention())

    def alloc(
        self, batch: int, heads: int, slots: int, device: torch.device | str, head: HeadShape = SMALLEST_HEAD
    ) -> State:
        empty = torch.zeros(batch, heads, slots, dtype=torch.float32, device=device)
        return Salience(empty, empty.clone())

    def observe(self, state: Salience, seen: Results, view: View) -> State:
        """Add the attention of the probes of a prefill."""
        probed = seen[ProbeQueries]
        return Salience(
            attn_sum=state.attn_sum + group_mean(probed.sums, view),
            probes=state.probes + group_mean(probed.counts, view),
        )

    def step(self, state: Salience, row: Tensor, view: View) -> None:
        """Add the attention of a decoded token, which is a probe."""
        state.attn_sum.add_(view.ranks.group_mean(row))
        state.probes.add_(view.valid.to(state.probes.dtype))

    def priority(self, state: Salience, view: View) -> Tensor:
        """The newest token is always kept, other tokens by mean attention: [B, H, N]."""
        return view.keep_newest(self.attention(state))

    def attention(self, state: Salience) -> Tensor:
        """Mean attention of each token: [B, H, N]."""
        return state.attn_sum / state.probes.clamp_min(1)

    def statistic(self, seen: Results, view: View) -> Tensor | None:
        """Mean attention of the probes, per query head."""
        probed = seen[ProbeQueries]
        return probed.sums / probed.counts.clamp_min(1)


def draw_probes(length: int, probes: ProbeQueries) -> Tensor:
    """Indices of the probes among a row's `length` queries, ascending, int64."""
    recent = min(math.ceil(probes.recent * length), length)
    count = min(math.ceil(probes.random * length), length - recent)
    # From the row's own length, on the CPU: the draw depends neither on the batch nor on the device.
    generator = torch.Generator().manual_seed(probes.seed + length)
    drawn = torch.randperm(length - recent, generator=generator, device="cpu")[:count]
    return torch.cat([drawn, torch.arange(length - recent, length, device="cpu")]).sort().values


def probe_columns(valid: Tensor | None, shape: tuple[int, int], probes: ProbeQueries, device: torch.device) -> Tensor:
    """Columns of each row's probes, [B, W] int64, ascending, then -1 where a row has fewer.

    Args:
        valid: Which of P tokens are not padding, [B, P] bool; None if all are.
        shape: B and P.
        probes: How many, and which.
        device: Device of the result.
    """
    batch, new = shape
    rows = [torch.arange(new, device="cpu")] * batch if valid is None else [row.nonzero()[:, 0].cpu() for row in valid]
    chosen = [row[draw_probes(len(row), probes)] for row in rows]
    return torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=-1).to(device)
