"""ZSMerge: a few slots of each head stand for all tokens that the head evicted, and are counted."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.kernels.products import thin_products
from kvpolicy.kernels.slot_writes import gather_slots
from kvpolicy.mergers.common import Nearest, tiles
from kvpolicy.protocols import Candidates, Merge, Merged, Merger, MergerTraits, State, Tokens
from kvpolicy.text.strategy import between, strategy

_BEFORE = -1
"""Earlier than any position."""
_FAR = torch.iinfo(torch.int32).max
"""Later than any position."""


class ZSMergeState(NamedTuple):
    """The residual slots of each head.

    Attributes:
        hosts: Positions of the tokens that own them, plus 1; 0 for none, [B, H, slots] int32.
    """

    hosts: Tensor


@strategy
class ZSMerge(Merger):
    """Merge evicted tokens into a few residual slots of each head, keys and values, and count them.

    Residual slots are those of the kept tokens of lowest priority, which become part of the means. The evicted tokens
    of a prompt are cut into as many groups of neighbors, one for each residual slot. In decoding, an evicted token goes
    to the residual slot of largest dot product of the two keys. If a residual slot itself is evicted, it goes to the
    token that is then of lowest priority, which becomes a residual slot in its place.

    Args:
        slots: The number of residual slots of a head, of its budget.
        alpha: The factor on the logarithm of the number of tokens that is added to the score of a slot, in [0.01, 1].

    Raises:
        KVPolicyError: If `slots` is outside [1, 32767], or `alpha` is outside [0.01, 1].

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("snapkv+zsmerge:slots=8@0.2"))
        'snapkv+zsmerge:slots=8@0.2'

    Source:
        ZSMerge (arXiv:2503.10714) and its authors' code, the residual slots. Differences:

        - only the merge; which tokens are evicted is up to the selector, which also ranks residual slots by its own
          statistics (the paper keeps the tokens of largest decayed attention and the newest, and never evicts a
          residual slot);
        - a residual slot is that of a kept token, whose position it has (the paper's hold nothing else);
        - of equal products, the earlier position is taken (the code can also compare distances);
        - `slots` has a default of this project (1 in the code; the paper gives residual slots a part of the budget);
        - with a codec, a residual slot that was encoded stays as it is, and another one takes its place.

        As in the code, rotated keys are averaged.
    """

    slots: int = between(1, 32767, 4)  # which each head knows the positions of
    # Counts are stored as what is added to scores, so that alpha must leave them recognizable.
    alpha: float = between(0.01, 1, 1.0)

    @property
    def traits(self) -> MergerTraits:
        """It merges in prompts and in decoding, slots have counts, and it asks for priorities."""
        return MergerTraits(when="always", counted=True, ranked=True, compares=True)

    def alloc(self, batch: int, heads: int, device: torch.device | str) -> State:
        return ZSMergeState(torch.zeros(batch, heads, self.slots, dtype=torch.int32, device=device))

    def merge_prompt(self, state: ZSMergeState, candidates: Candidates) -> Merged:
        """Cut the evicted tokens of a prompt into groups, and add each to its residual slot."""
        assert candidates.counts is not None and candidates.priority is not None and candidates.length is not None
        positions = candidates.at_targets(candidates.positions)
        # The newest token is the one that later tokens attend to first, and must stay itself.
        open_slots = candidates.is_target & (positions < (candidates.length - 1)[:, None, None])
        hosts = self._hosts(state, positions, candidates.at_targets(candidates.priority), open_slots)
        there = open_slots.any(-1, keepdim=True)
        counts = candidates.at_targets(candidates.counts)
        keys = candidates.at_targets(candidates.keys)
        values = candidates.at_targets(candidates.values)
        total = torch.zeros_like(counts)[..., None]
        mixed_keys = torch.zeros_like(keys.float())
        mixed_values = torch.zeros_like(values.float())
        own = self._number(counts)
        # The counts of `tiles` are those of a logarithm without a factor.
        plain = candidates._replace(counts=candidates.counts / self.alpha)
        for tile in tiles(plain, _groups(candidates, hosts, there)):
            gained = tile.weights.masked_fill(tile.nearest.cosine == -torch.inf, 0)[..., None]
            tile.add_to(total, gained)
            tile.add_to(mixed_keys, tile.keys * gained)
            tile.add_to(mixed_values, tile.values * gained)
        total = total.squeeze(-1)
        grown = (total > 0) & candidates.is_target
        both = own + total

        def mean(held: Tensor, mixed: Tensor) -> Tensor:
            new = (held.float() * own[..., None] + mixed) / both[..., None]
            return torch.where(grown[..., None], new.to(held.dtype), held)

        self._settle(state, positions, hosts, candidates.evicted.any(-1, keepdim=True) & there)
        return Merged(
            mean(values, mixed_values), mean(keys, mixed_keys), torch.where(grown, self.alpha * both.log(), counts)
        )

    def merge_token(self, state: ZSMergeState, victim: Tokens, slots: Tokens) -> Merge:
        """Add the victim of a decode step to a residual slot."""
        assert victim.counts is not None and slots.counts is not None and slots.priority is not None
        owns = (slots.positions[..., None] == state.hosts[:, :, None] - 1) & slots.there[..., None]
        present = owns.any(-1)
        alive = owns.any(2)
        others = slots.there & ~present
        missing = ~alive.all(-1, keepdim=True) & others.any(-1, keepdim=True)
        # One that is missing, as after an eviction, is found again: the token of lowest priority, of ties the latest.
        worth = slots.priority.masked_fill(~others, torch.inf)
        lowest = others & (worth == worth.amin(-1, keepdim=True))
        lowest = torch.where(lowest, slots.positions, _BEFORE).argmax(-1, keepdim=True)
        product = thin_products(victim.keys, slots.keys).squeeze(2).masked_fill(~present, -torch.inf)
        best = present & (product == product.amax(-1, keepdim=True))
        best = torch.where(best, slots.positions, _FAR).argmin(-1, keepdim=True)
        slot = torch.where(missing, lowest, best)
        there = victim.there & slots.there.any(-1, keepdim=True)
        own = self._number(slots.counts.gather(-1, slot))
        new = self._number(victim.counts)
        keys, values = (
            (gather_slots(held, slot).float() * own[..., None] + added.float() * new[..., None])
            / (own + new)[..., None]
            for held, added in ((slots.keys, victim.keys), (slots.values, victim.values))
        )
        entry = (~alive).to(torch.uint8).argmax(-1, keepdim=True)
        replaced = (torch.arange(self.slots, device=entry.device) == entry) & missing & there
        host = (slots.positions.gather(-1, slot) + 1).to(torch.int32)
        state.hosts.copy_(torch.where(replaced, host, state.hosts))
        return Merge(slot, there, values, keys, self.alpha * (own + new).log())

    def _number(self, counts: Tensor) -> Tensor:
        """How many tokens slots stand for, given what is added to their scores."""
        return (counts / self.alpha).exp()

    def _hosts(self, state: ZSMergeState, positions: Tensor, priority: Tensor, open_slots: Tensor) -> Tensor:
        """The residual slots, [B, H, T] bool: the present ones, and those of lowest priority for what is missing."""
        present = (positions[..., None] == state.hosts[:, :, None] - 1).any(-1) & open_slots
        worth = priority.masked_fill(~open_slots, torch.inf).masked_fill(present, -torch.inf)
        # Of ties the latest position first, which is unique within a head, as one stable sort after another.
        late = torch.where(open_slots, -positions, 1).argsort(dim=-1, stable=True)
        order = late.gather(-1, worth.gather(-1, late).argsort(dim=-1, stable=True))
        lowest = torch.zeros_like(open_slots).scatter(-1, order[..., : self.slots], True)
        return lowest & open_slots

    def _settle(self, state: ZSMergeState, positions: Tensor, hosts: Tensor, there: Tensor) -> None:
        """Store the positions of the residual slots [B, H, T] in the heads selected by `there` [B, H, 1]."""
        owned = torch.where(hosts, positions + 1, 0).to(torch.int32)
        missing = self.slots - owned.shape[-1]
        if missing > 0:
            owned = torch.nn.functional.pad(owned, (0, missing))
        owned = owned.sort(dim=-1, descending=True).values[..., : self.slots]
        state.hosts.copy_(torch.where(there, owned, state.hosts))


def _groups(candidates: Candidates, hosts: Tensor, there: Tensor) -> Nearest:
    """The residual slot of each token's group: of all evicted tokens by position, the n-th of as many equal parts.

    Args:
        candidates: The tokens of a prompt.
        hosts: Which targets are residual slots, [B, H, T] bool.
        there: Heads that have one, [B, H, 1] bool.
    """
    evicted = candidates.evicted
    order = candidates.positions.argsort(dim=-1, stable=True)
    rank = evicted.gather(-1, order).long().cumsum(-1).sub_(1).gather(-1, order.argsort(dim=-1))
    size = evicted.sum(-1, keepdim=True).clamp_min(1)
    count = hosts.sum(-1, keepdim=True)
    group = torch.div(rank.clamp_min(0) * count, size, rounding_mode="floor")
    # Targets are in order of position, and so are the first entries after a stable sort of the hosts to the front.
    first = (~hosts).to(torch.uint8).argsort(dim=-1, stable=True)
    target = first.gather(-1, group.clamp(0, hosts.shape[-1] - 1))
    return Nearest(target, torch.where(there, 0.0, -torch.inf).expand(rank.shape))
