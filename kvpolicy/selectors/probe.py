"""ProbeSalience: keep the tokens with the highest mean attention of a few probe queries."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kvpolicy.protocols import DecodeMode, Needs, Probes, Scored, Seen, State, View
from kvpolicy.selectors.common import group_mean, keep_always
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.strategy import between, strategy


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
    def needs(self) -> Needs:
        """Attention sums over the probes, and the attention of each decoded token."""
        return Needs(probes=Probes(self.recent, self.random, self.seed), decode_attn=True)

    def alloc(self, batch: int, heads: int, slots: int, device: torch.device | str) -> State:
        empty = torch.zeros(batch, heads, slots, dtype=torch.float32, device=device)
        return Salience(empty, empty.clone())

    def observe(self, state: Salience, seen: Seen, view: View) -> State:
        """Add the attention of the probes of a prefill."""
        assert seen.probe_sum is not None and seen.probe_count is not None
        return Salience(
            attn_sum=state.attn_sum + group_mean(seen.probe_sum, view),
            probes=state.probes + group_mean(seen.probe_count, view),
        )

    def step(self, state: Salience, row: Tensor, view: View) -> None:
        """Add the attention of a decoded token, which is a probe."""
        state.attn_sum.add_(view.ranks.group_mean(row))
        state.probes.add_(view.valid.to(state.probes.dtype))

    def priority(self, state: Salience, view: View) -> Tensor:
        """The newest token is always kept, other tokens by mean attention: [B, H, N]."""
        return keep_always(self.attention(state), view.newest(1))

    def attention(self, state: Salience) -> Tensor:
        """Mean attention of each token: [B, H, N]."""
        return state.attn_sum / state.probes.clamp_min(1)

    def statistic(self, seen: Seen, view: View) -> Tensor | None:
        """Mean attention of the probes, per query head."""
        assert seen.probe_sum is not None and seen.probe_count is not None
        return seen.probe_sum / seen.probe_count.clamp_min(1)
