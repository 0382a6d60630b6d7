"""KeepKV: merge similar tokens by the attention that each of them has, and count them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpolicy.kernels.slot_writes import gather_slots
from kvpolicy.mergers.common import group_rows, target_of, tiles
from kvpolicy.protocols import Candidates, Merge, Merged, Merger, MergerTraits, State, Tokens
from kvpolicy.statistics import RecentQueries, Statistic
from kvpolicy.text.strategy import between, least, strategy

_LEAST_WEIGHT = 1e-12
"""Added to each weight, so that tokens without any attention have equal weights."""


@strategy
class KeepKV(Merger):
    """Merge an evicted token into the kept token of the most similar key, weighted by attention, and count both.

    The key and the value of the kept token become the means of those of all tokens that go to it, weighted by the
    attention that each of them has had from the last queries of the prompt. The logarithm of the number of tokens is
    added to the score of the slot. In decoding, weights are the numbers of tokens.

    Args:
        window: The number of queries that weigh, the newest of each prompt or chunk.
        least: The smallest cosine between the keys of the two, in [-1, 1]; below it, the evicted token is dropped.

    Raises:
        KVPolicyError: If `window` is below 1, or `least` is outside [-1, 1].

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("snapkv+keepkv:least=0.9@0.2"))
        'snapkv+keepkv:least=0.9@0.2'

    Source:
        KeepKV (arXiv:2504.09936) and its authors' code, the merge and its score bias; the defaults of `window` and
        `least` are not verified. Differences:

        - only the merge; which tokens are evicted is up to the selector;
        - weights are means of attention, of which every query has as much (the code takes exponentials of scores
          without a maximum, which overflow), of each KV head, over its query heads;
        - in decoding weights are counts (the code has the attention of the newest steps for every slot, which nothing
          stores here);
        - the merged key is not lengthened (the paper does, which is right for one query only; its code does not);
        - the logarithm is added for every slot, also for the newest;
        - tokens that are coded are never targets.

        As in the code, rotated keys are averaged, and the attention of a token is averaged over the queries that see
        it.
    """

    window: int = least(1, 32)
    least: float = between(-1, 1, 0.8)

    @property
    def traits(self) -> MergerTraits:
        """It merges in prompts and in decoding, and slots have counts."""
        return MergerTraits(when="always", counted=True, compares=True)

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """The attention of the last queries."""
        return (RecentQueries(self.window),)

    def merge_prompt(self, state: State, candidates: Candidates) -> Merged:
        """Merge the evicted tokens of a prompt into their targets."""
        assert candidates.counts is not None
        keys = candidates.at_targets(candidates.keys)
        values = candidates.at_targets(candidates.values)
        counts = candidates.at_targets(candidates.counts)
        total = torch.zeros_like(counts)[..., None]
        added = torch.zeros_like(total)
        mixed_keys = torch.zeros_like(keys.float())
        mixed_values = torch.zeros_like(values.float())
        weights = self._weights(candidates)
        own = candidates.at_targets(weights)[..., None]
        # Tiles pass weights on as counts of tokens, and the counts themselves once more.
        counted = tiles(candidates, "keys")
        weighted = tiles(candidates._replace(counts=weights.log()), "keys")
        for tile, same in zip(weighted, counted, strict=True):
            merges = ((same.weights > 0) & (same.nearest.cosine >= self.least))[..., None]
            tile.add_to(total, same.weights[..., None].masked_fill(~merges, 0))
            weight = tile.weights[..., None].masked_fill(~merges, 0)
            tile.add_to(added, weight)
            tile.add_to(mixed_keys, tile.keys * weight)
            tile.add_to(mixed_values, tile.values * weight)
        grown = (total > 0) & candidates.is_target[..., None]

        def mean(held: Tensor, mixed: Tensor) -> Tensor:
            return torch.where(grown, ((held.float() * own + mixed) / (own + added)).to(held.dtype), held)

        both = (counts.exp() + total.squeeze(-1)).log()
        return Merged(mean(values, mixed_values), mean(keys, mixed_keys), torch.where(grown.squeeze(-1), both, counts))

    def merge_token(self, state: State, victim: Tokens, slots: Tokens) -> Merge:
        """Merge the victim of a decode step into its target, by their counts."""
        assert victim.counts is not None and slots.counts is not None
        slot, cosine = target_of(victim, slots, "keys")
        own = slots.counts.gather(-1, slot).exp()
        new = victim.counts.exp()
        keys, values = (
            (gather_slots(held, slot).float() * own[..., None] + added.float() * new[..., None])
            / (own + new)[..., None]
            for held, added in ((slots.keys, victim.keys), (slots.values, victim.values))
        )
        return Merge(slot, (cosine >= self.least) & (cosine > -torch.inf), values, keys, (own + new).log())

    def _weights(self, candidates: Candidates) -> Tensor:
        """The mean attention of each token from those of the last queries that see it, [B, H, N] fp32."""
        attention = candidates.attention
        assert attention is not None and candidates.length is not None, "the engine passes what is asked for"
        rows = group_rows(attention[:, :, -self.window :], candidates)
        # Rows of zeros stand for the queries that there are not.
        present = (rows.sum(-1) > 0).sum(-1, keepdim=True)
        heads = rows.shape[2] // min(self.window, attention.shape[2])
        later = (candidates.length[:, None, None] - candidates.positions).clamp_min(1) * heads
        return rows.sum(2) / torch.minimum(later, present.clamp_min(1)) + _LEAST_WEIGHT
