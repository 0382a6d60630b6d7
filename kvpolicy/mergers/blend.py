"""Blend: add the values of evicted tokens to those of similar kept ones, by the size of both, as MergingPress does."""

from __future__ import annotations

import torch

from kvpolicy.kernels.products import lengths
from kvpolicy.mergers.common import tiles
from kvpolicy.protocols import Candidates, Merged, Merger, MergerTraits, State
from kvpolicy.text.strategy import between, strategy

_TINY = torch.finfo(torch.float32).tiny


@strategy
class Blend(Merger):
    """Blend the value of an evicted token into that of the kept token of the most similar key.

    The weight of an evicted value is the cosine of the two keys, times its share of the norms of the two values. The
    kept value becomes the weighted mean of itself, with weight 1, and of all values that go to it. Keys stay, slots
    have no counts, and tokens that are evicted in decoding are dropped.

    Args:
        least: The smallest cosine between the keys of the two, in [0, 1]; below it, the evicted token is dropped.

    Raises:
        KVPolicyError: If `least` is outside [0, 1].

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("knorm+blend@0.25"))
        'knorm+blend@0.25'

    Source:
        MergingPress of kvpress. Differences:

        - every evicted token above `least` is merged (the press can restrict merges to a share of them, which is 1 by
          default);
        - each chunk or turn merges what it evicts (the press compresses one prompt);
        - tokens that are coded are never targets.

        As in the press, keys are compared as attention sees them, and stay, and tokens evicted in decoding are dropped.
    """

    least: float = between(0, 1, 0.0)

    @property
    def traits(self) -> MergerTraits:
        """It acts at the end of a prompt only."""
        return MergerTraits(when="prompt")

    def merge_prompt(self, state: State, candidates: Candidates) -> Merged:
        """Blend the evicted values of a prompt into those of their targets."""
        values = candidates.at_targets(candidates.values)
        norms = lengths(values)
        total = torch.zeros_like(norms)[..., None]
        mixed = torch.zeros_like(values, dtype=torch.float32)
        for tile in tiles(candidates, "keys"):
            cosine = tile.nearest.cosine
            size = tile.values.norm(dim=-1)
            share = size / (size + norms.gather(-1, tile.nearest.target)).clamp_min(_TINY)
            # Without a target the cosine is -inf, and with a right angle the weight is 0: neither changes anything.
            merges = (tile.weights > 0) & (cosine >= self.least) & (cosine > 0)
            weight = (cosine.clamp_min(0) * share).masked_fill(~merges, 0)[..., None]
            tile.add_to(total, weight)
            tile.add_to(mixed, tile.values * weight)
        changed = (total > 0) & candidates.is_target[..., None]
        return Merged(torch.where(changed, ((values.float() + mixed) / (1 + total)).to(values.dtype), values))
