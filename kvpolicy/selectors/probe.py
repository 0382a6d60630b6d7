"""Keep what a few queries, some recent and some random, look at on average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.protocols import DecodeMode, Needs, Probes, Seen, State, View
from kvpolicy.selectors._common import check_decode, group_mean, keep_always
from kvpolicy.spec.errors import KVPolicyError
from kvpolicy.spec.validation import check_fields


class Salience(NamedTuple):
    """Attention that each slot's token got from probes, and how many probes could see it, each [B, H, S] fp32."""

    total: Tensor
    probes: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeSalience:
    """Rank tokens by the mean attention of probe queries that can see them.

    Accumulated attention favours the first tokens, which more queries see; a mean does not. A few probes estimate it:
    the newest queries of the prompt and as many random ones. It is the ranking that ZipCache asks of attention, and
    works with any codec.

    Args:
        recent: Share of the prompt's queries that are probes because they are the newest.
        random: Share that are probes by chance.
        seed: Of the chance.
        decode: Whether generated tokens compete for the budget (`evict`) or get room beside it (`grow`).

    Raises:
        KVPolicyError: If a share is outside [0, 1], or both are zero.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("probe:recent=0.1@0.3"))
        'probe:recent=0.1@0.3'

    Source:
        ZipCache (arXiv:2405.14256), normalised attention scores from probe tokens; its code was read. Differences: a
        token's sum is divided by the number of probes that see it (the code divides by the number of all queries that
        do, though it sums over the probes alone); query heads of a KV head are averaged; every generated token is a
        probe (the code takes a share of them); the newest token is always kept; probes are drawn from `seed` and the
        row's length, so that a row draws what it would draw alone.
    """

    recent: float = 0.05
    random: float = 0.05
    seed: int = 0
    decode: DecodeMode = "evict"

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        check_fields(self)
        check_decode(self.decode)
        if not (0 <= self.recent <= 1 and 0 <= self.random <= 1 and self.recent + self.random > 0):
            raise KVPolicyError(
                f"recent={self.recent} and random={self.random} are no shares of which one is above zero: use 0.05."
            )

    @property
    def needs(self) -> Needs:
        """Sums over the probes, and each decoded row."""
        return Needs(probes=Probes(self.recent, self.random, self.seed), decode_attn=True)

    @property
    def min_tokens(self) -> int:
        """One token, the current one."""
        return 1

    def alloc(self, batch: int, heads: int, slots: int, device: torch.device | str) -> State:
        """Nothing seen yet."""
        empty = torch.zeros(batch, heads, slots, dtype=torch.float32, device=device)
        return Salience(empty, empty.clone())

    def observe(self, state: Salience, seen: Seen, view: View) -> State:
        """Add the attention of a prefill's probes."""
        assert seen.probe_sum is not None and seen.probe_count is not None
        return Salience(
            state.total + group_mean(seen.probe_sum, view), state.probes + group_mean(seen.probe_count, view)
        )

    def step(self, state: Salience, row: Tensor, view: View) -> None:
        """Add the attention of one decoded token, which is a probe."""
        state.total.add_(view.ranks.group_mean(row))
        state.probes.add_(view.valid.to(state.probes.dtype))

    def priority(self, state: Salience, view: View) -> Tensor:
        """The newest token always, then by mean attention: [B, H, N]."""
        return keep_always(state.total / state.probes.clamp_min(1), view.newest(1))

    def statistic(self, seen: Seen, view: View) -> Tensor | None:
        """Mean attention of the probes per query head."""
        assert seen.probe_sum is not None and seen.probe_count is not None
        return seen.probe_sum / seen.probe_count.clamp_min(1)
