"""CountedMerge: a slot becomes the weighted mean of the tokens that it stands for, and counts as all of them."""

from __future__ import annotations

from typing import Literal

import torch

from kvpolicy.kernels.slot_writes import gather_slots
from kvpolicy.mergers.common import target_of, tiles
from kvpolicy.protocols import Candidates, Merge, Merged, Merger, MergerTraits, State, Tokens
from kvpolicy.text.strategy import between, strategy


@strategy
class CountedMerge(Merger):
    """Merge an evicted token into the kept token of the most similar key, and count both.

    The kept token keeps its key. Its value becomes the mean of the values of all tokens that it stands for, and the
    logarithm of their number is added to its score, so that a slot of c tokens has c times the weight of its key. The
    result does not depend on the order of evictions, as long as the targets stay. A token that has taken in others
    and is evicted in turn takes its count along.

    Args:
        by: Which kept token takes in an evicted one: that of largest cosine between the keys as attention sees them
            (`keys`), or the one of nearest position (`position`). Of ties, the earlier position.
        least: The smallest cosine between the keys of the two, in [-1, 1]; below it, the evicted token is dropped.

    Raises:
        KVPolicyError: If `by` is unknown, or `least` is outside [-1, 1].

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("snapkv+merge:least=0.8@0.2"))
        'snapkv+merge:least=0.8@0.2'

    Source:
        The counted law of ZSMerge (arXiv:2503.10714) and KeepKV (arXiv:2504.09936), with the rule of the most similar
        key. Differences:

        - keys are not averaged, because a mean of keys that are rotated to different positions is shorter than either
          (at a distance of three tokens, to 0.07 of its length in the fastest channel);
        - the count is a plain number of tokens, not weighted by attention (as in KeepKV, which is right for one query
          only);
        - the logarithm is added in full (ZSMerge scales it);
        - there are no slots for merged tokens alone;
        - tokens below `least` are dropped, because merging all of them destroys answers;
        - the selector's statistics do not change at a merge;
        - tokens that are coded are never targets.
    """

    by: Literal["keys", "position"] = "keys"
    least: float = between(-1, 1, 0.9)

    @property
    def traits(self) -> MergerTraits:
        """It merges in prompts and in decoding, and slots have counts."""
        return MergerTraits(when="always", counted=True, compares=True)

    def merge_prompt(self, state: State, candidates: Candidates) -> Merged:
        """Add the evicted tokens of a prompt to their targets."""
        assert candidates.counts is not None
        values = candidates.at_targets(candidates.values)
        counts = candidates.at_targets(candidates.counts)
        total = torch.zeros_like(counts)[..., None]
        mixed = torch.zeros_like(values, dtype=torch.float32)
        for tile in tiles(candidates, self.by):
            gained = tile.weights.masked_fill(tile.nearest.cosine < self.least, 0)
            tile.add_to(total, gained[..., None])
            tile.add_to(mixed, tile.values * gained[..., None])
        total = total.squeeze(-1)
        grown = (total > 0) & candidates.is_target
        own = counts.exp()
        both = own + total
        mean = (values.float() * own[..., None] + mixed) / both[..., None]
        return Merged(
            values=torch.where(grown[..., None], mean.to(values.dtype), values),
            counts=torch.where(grown, both.log(), counts),
        )

    def merge_token(self, state: State, victim: Tokens, slots: Tokens) -> Merge:
        """Add the victim of a decode step to its target."""
        assert victim.counts is not None
        assert slots.counts is not None
        slot, cosine = target_of(victim, slots, self.by)
        new = victim.counts.exp()
        own = slots.counts.gather(-1, slot).exp()
        both = own + new
        mixed = gather_slots(slots.values, slot).float() * own[..., None] + victim.values.float() * new[..., None]
        mean = mixed / both[..., None]
        return Merge(
            slot=slot, write_mask=(cosine >= self.least) & (cosine > -torch.inf), values=mean, counts=both.log()
        )
