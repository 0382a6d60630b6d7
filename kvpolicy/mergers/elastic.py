"""Elastic: the mean of a kept token and of the evicted tokens around it, as in Elastic Cache."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.kernels.slot_writes import gather_slots
from kvpolicy.mergers.common import target_of, tiles
from kvpolicy.protocols import Candidates, Merge, Merged, Merger, MergerTraits, State, Tokens
from kvpolicy.text.strategy import strategy


@strategy
class Elastic(Merger):
    """Merge every evicted token into the kept token of nearest position, keys and values, and take their mean.

    All tokens that go to the same kept one at once have the same weight as this one. In decoding, an evicted token
    takes half of the slot that it goes to.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("h2o+elastic@0.2"))
        'h2o+elastic@0.2'

    Source:
        Elastic Cache (arXiv:2407.18121) and its authors' code, the merge. Differences:

        - only the merge; the paper ranks tokens by their attention in the prompt, as `h2o` does;
        - each KV head merges what it evicts (the code merges for all heads of a layer at once);
        - tokens that are evicted in decoding are merged too (the code drops the token at a fixed distance from the
          newest one);
        - two errors of indices in the code, which keep other tokens than the paper's, are not followed;
        - of two nearest positions, the earlier is taken;
        - tokens that are coded are never targets.

        As in the code, rotated keys are averaged, and there are no counts.
    """

    @property
    def traits(self) -> MergerTraits:
        """It merges in prompts and in decoding, and slots have no counts."""
        return MergerTraits(when="always", compares=True)

    def merge_prompt(self, state: State, candidates: Candidates) -> Merged:
        """Average the evicted tokens of a prompt with their targets."""
        keys = candidates.at_targets(candidates.keys)
        values = candidates.at_targets(candidates.values)
        number = torch.zeros_like(candidates.targets, dtype=torch.float32)[..., None]
        mixed_keys = torch.zeros_like(keys.float())
        mixed_values = torch.zeros_like(values.float())
        for tile in tiles(candidates, "position"):
            gone = ((tile.weights > 0) & (tile.nearest.cosine > -torch.inf)).float()[..., None]
            tile.add_to(number, gone)
            tile.add_to(mixed_keys, tile.keys * gone)
            tile.add_to(mixed_values, tile.values * gone)
        changed = (number > 0) & candidates.is_target[..., None]

        def mean(own: Tensor, mixed: Tensor) -> Tensor:
            return torch.where(changed, ((own.float() + mixed) / (1 + number)).to(own.dtype), own)

        return Merged(values=mean(values, mixed_values), keys=mean(keys, mixed_keys))

    def merge_token(self, state: State, victim: Tokens, slots: Tokens) -> Merge:
        """Average the victim of a decode step with its target."""
        slot, cosine = target_of(victim, slots, "position")
        keys, values = (
            (gather_slots(own, slot).float() + new.float()) / 2
            for own, new in ((slots.keys, victim.keys), (slots.values, victim.values))
        )
        return Merge(slot, victim.there & (cosine > -torch.inf), values, keys)
