"""Compensate: one slot of each head stands for everything that the head evicted."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.kernels.slot_writes import gather_slots
from kvpolicy.protocols import Candidates, Merge, Merged, Merger, MergerTraits, State, Tokens
from kvpolicy.text.strategy import strategy

_BEFORE = -1
"""Earlier than any position."""


class CompensateState(NamedTuple):
    """The compensation slot of each head.

    Attributes:
        host: Position of the token that owns the slot, plus 1; 0 without a slot, [B, H] int32.
    """

    host: Tensor


@strategy
class Compensate(Merger):
    """Keep the mean key and the mean value of all evicted tokens in one slot of each head, and count them.

    The slot is that of the kept token of lowest priority, which becomes part of the mean. The logarithm of the number
    of tokens is added to its score. In decoding, an evicted token is added to the mean; if the slot itself is evicted,
    it moves to the token that is then of lowest priority.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("snapkv+compensate@0.2"))
        'snapkv+compensate@0.2'

    Source:
        RazorAttention (arXiv:2407.15891), the compensation token. Differences:

        - every head that evicts has one (the paper's retrieval heads keep all tokens, and need none, as with the head
          allocator `duo`), over any selector;
        - the slot is one of the budget and not one more: the token that gives it joins the mean;
        - the paper compensates once, after the prompt, and here tokens that are evicted later are added;
        - the slot has the position and the rank of its first token, so that a selector that looks at attention sees the
          large weight of the slot;
        - with a codec, a compensation slot that was encoded stays as it is, and the next eviction starts another one.

        As in the paper, rotated keys are averaged.
    """

    @property
    def traits(self) -> MergerTraits:
        """It merges in prompts and in decoding, slots have counts, it asks for priorities, and compares no keys."""
        return MergerTraits(when="always", counted=True, ranked=True)

    def alloc(self, batch: int, heads: int, device: torch.device | str) -> State:
        return CompensateState(torch.zeros(batch, heads, dtype=torch.int32, device=device))

    def merge_prompt(self, state: CompensateState, candidates: Candidates) -> Merged:
        """Add the evicted tokens of a prompt to the compensation slot."""
        assert candidates.counts is not None and candidates.priority is not None and candidates.length is not None
        positions = candidates.at_targets(candidates.positions)
        # The newest token is the one that later tokens attend to first, and must stay itself.
        open_slots = candidates.is_target & (positions < (candidates.length - 1)[:, None, None])
        host = _host(state, positions, candidates.at_targets(candidates.priority), open_slots)
        evicted = candidates.evicted
        mass = candidates.counts.exp().masked_fill(~evicted, 0)
        there = evicted.any(-1, keepdim=True) & open_slots.any(-1, keepdim=True)
        chosen = (torch.arange(positions.shape[-1], device=host.device) == host) & there
        counts = candidates.at_targets(candidates.counts)
        both = counts.exp() + mass.sum(-1, keepdim=True)

        def mean(every: Tensor) -> Tensor:
            own = candidates.at_targets(every)
            # Tokens that are not evicted, such as padding, may hold inf or NaN: 0 times NaN is NaN.
            gone = mass[:, :, None] @ every.float().masked_fill(~evicted[..., None], 0)
            mixed = (gone + own.float() * counts.exp()[..., None]) / both[..., None]
            return torch.where(chosen[..., None], mixed.to(own.dtype), own)

        self._settle(state, positions.gather(-1, host), there)
        return Merged(mean(candidates.values), mean(candidates.keys), torch.where(chosen, both.log(), counts))

    def merge_token(self, state: CompensateState, victim: Tokens, slots: Tokens) -> Merge:
        """Add the victim of a decode step to the compensation slot."""
        assert victim.counts is not None and slots.counts is not None and slots.priority is not None
        slot = _host(state, slots.positions, slots.priority, slots.there)
        there = victim.there & slots.there.any(-1, keepdim=True)
        own = slots.counts.gather(-1, slot).exp()
        new = victim.counts.exp()
        keys, values = (
            (gather_slots(held, slot).float() * own[..., None] + added.float() * new[..., None])
            / (own + new)[..., None]
            for held, added in ((slots.keys, victim.keys), (slots.values, victim.values))
        )
        self._settle(state, slots.positions.gather(-1, slot), there)
        return Merge(slot, there, values, keys, (own + new).log())

    def _settle(self, state: CompensateState, position: Tensor, there: Tensor) -> None:
        """Store the position [B, H, 1] of the compensation slot in the heads selected by `there` [B, H, 1]."""
        host = (position + 1).to(torch.int32).squeeze(-1)
        state.host.copy_(torch.where(there.squeeze(-1), host, state.host))


def _host(state: CompensateState, positions: Tensor, priority: Tensor, open_slots: Tensor) -> Tensor:
    """The slot that takes tokens in, [B, H, 1]: the present one, or that of lowest priority, of ties the latest."""
    present = (positions == state.host[..., None] - 1) & open_slots
    worth = priority.masked_fill(~open_slots, torch.inf)
    lowest = (worth == worth.amin(-1, keepdim=True)) & open_slots
    eligible = torch.where(present.any(-1, keepdim=True), present, lowest)
    return torch.where(eligible, positions, _BEFORE).argmax(-1, keepdim=True)
