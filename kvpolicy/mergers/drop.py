"""Drop: what is evicted is gone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvpolicy.protocols import Candidates, Merge, Merged, MergerTraits, Needs, State, Tokens
from kvpolicy.spec.arguments import named_options


@named_options
@dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """Drop every token that is not kept, and leave the others as they are.

    Examples:
        >>> from kvpolicy import Policy
        >>> Policy.parse("h2o@0.2").merger
        Drop()
        >>> str(Policy.parse("h2o+drop@0.2"))
        'h2o@0.2'
    """

    @property
    def traits(self) -> MergerTraits:
        """Nothing is merged."""
        return MergerTraits()

    @property
    def needs(self) -> Needs:
        """Nothing."""
        return Needs()

    def alloc(self, batch: int, heads: int, device: torch.device | str) -> State:
        """No state."""
        return ()

    def merge_prompt(self, state: State, candidates: Candidates) -> Merged:
        """The targets as they are."""
        return Merged(candidates.at_targets(candidates.values))

    def merge_token(self, state: State, victim: Tokens, slots: Tokens) -> Merge:
        """No slot is written."""
        slot = torch.zeros_like(victim.positions, dtype=torch.int64)
        return Merge(slot, torch.zeros_like(victim.there), slots.values[:, :, :1])
