"""D2O: merge what is evicted into the most similar kept token, if it is similar enough by a moving threshold."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.kernels.slot_writes import gather_slots
from kvpolicy.mergers.common import target_of, tiles
from kvpolicy.protocols import Candidates, Merge, Merged, Merger, MergerTraits, Tokens
from kvpolicy.text.strategy import between, strategy


class D2OState(NamedTuple):
    """The threshold of each head.

    Attributes:
        threshold: The moving mean of the largest cosine of evicted tokens, [B, H] fp32.
        started: 1 once a token was evicted, else 0, [B, H] fp32.
    """

    threshold: Tensor
    started: Tensor


@strategy
class D2O(Merger):
    """Merge evicted tokens into the most similar kept one, keys and values, above a threshold that moves.

    The threshold of a head is the mean of the evicted tokens' largest cosines, and a moving mean of it later on. Tokens
    at or above it are added to their target with the cosine as weight, and the sum is divided by the number of tokens.

    Args:
        decay: The weight of the old threshold in the moving mean, in [0, 1].

    Raises:
        KVPolicyError: If `decay` is outside [0, 1].

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("h2o+d2o"))
        'h2o+d2o@0.2'

    Source:
        D2O (arXiv:2406.13035), Section 3.3, and its authors' code. Differences:

        - only the merge; the paper's scores are those of `h2o`, and its budgets by layer those of `d2olayers`;
        - prompts are merged at their end and not in the first decode step;
        - the threshold and the decision are those of each KV head (the code averages the i-th similarity over heads,
          although the i-th token differs by head, and decides for all heads at once);
        - with grouped-query attention KV heads are not repeated;
        - batch rows are separate;
        - tokens that are coded are never targets.

        As in the code, rotated keys are averaged, weights are cosines and not normalized, and the first tokens may be
        targets.
    """

    decay: float = between(0, 1, 0.5)

    @property
    def traits(self) -> MergerTraits:
        """It merges in prompts and in decoding, and slots have no counts."""
        return MergerTraits(when="always", compares=True)

    def alloc(self, batch: int, heads: int, device: torch.device | str) -> D2OState:
        """No threshold yet."""
        return D2OState(
            torch.zeros(batch, heads, device=device, dtype=torch.float32),
            torch.zeros(batch, heads, device=device, dtype=torch.float32),
        )

    def merge_prompt(self, state: D2OState, candidates: Candidates) -> Merged:
        """Move the threshold to the evicted tokens of a prompt, then merge those above it."""
        # Twice over the tiles, since the threshold depends on all tokens.
        total = torch.zeros_like(state.threshold)
        count = torch.zeros_like(state.threshold)
        largest = torch.full_like(state.threshold, -1)
        for tile in tiles(candidates, "keys"):
            counted = (tile.weights > 0) & (tile.nearest.cosine > -torch.inf)
            total += tile.nearest.cosine.masked_fill(~counted, 0).sum(-1)
            count += counted.sum(-1)
            largest = largest.maximum(tile.nearest.cosine.masked_fill(~counted, -1).amax(-1))
        # The mean of equal cosines may be rounded up, and then none of them would be at or above it.
        average = (total / count.clamp_min(1)).minimum(largest)
        self._move(state, average, count > 0)
        keys = candidates.at_targets(candidates.keys)
        values = candidates.at_targets(candidates.values)
        number = torch.zeros_like(candidates.targets, dtype=torch.float32)[..., None]
        mixed_keys = torch.zeros_like(keys.float())
        mixed_values = torch.zeros_like(values.float())
        for tile in tiles(candidates, "keys"):
            cosine = tile.nearest.cosine
            chosen = (tile.weights > 0) & (cosine >= state.threshold[..., None]) & (cosine > -torch.inf)
            tile.add_to(number, chosen[..., None].float())
            weight = cosine.masked_fill(~chosen, 0)[..., None]
            tile.add_to(mixed_keys, tile.keys * weight)
            tile.add_to(mixed_values, tile.values * weight)
        changed = (number > 0) & candidates.is_target[..., None]

        def mean(own: Tensor, mixed: Tensor) -> Tensor:
            return torch.where(changed, ((own.float() + mixed) / (1 + number)).to(own.dtype), own)

        return Merged(values=mean(values, mixed_values), keys=mean(keys, mixed_keys))

    def merge_token(self, state: D2OState, victim: Tokens, slots: Tokens) -> Merge:
        """Move the threshold to the victim of a decode step, then merge it if it is above."""
        slot, cosine = target_of(victim, slots, "keys")
        has_target = victim.there & (cosine > -torch.inf)
        self._move(state, cosine.squeeze(-1), has_target.squeeze(-1))
        weight = cosine.masked_fill(~has_target, 0)[..., None]
        keys, values = (
            (gather_slots(own, slot).float() + weight * new.float()) / 2
            for own, new in ((slots.keys, victim.keys), (slots.values, victim.values))
        )
        return Merge(slot, has_target & (cosine >= state.threshold[..., None]), values, keys)

    def _move(self, state: D2OState, cosine: Tensor, moves: Tensor) -> None:
        """Move the threshold [B, H] to a mean cosine, in the heads where it `moves` [B, H]."""
        later = self.decay * state.threshold + (1 - self.decay) * cosine
        now = torch.where(state.started > 0, later, cosine)
        state.threshold.copy_(torch.where(moves, now, state.threshold))
        state.started.copy_(torch.where(moves, 1.0, state.started))
