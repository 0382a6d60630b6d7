"""Summaries of the values of a layer, by which a reader estimates what a step does not read."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from kvpolicy.protocols import Changed, Estimated, Read, SlotAccess
from kvpolicy.readers.common import TokenReader


class SummaryReader(TokenReader, Protocol):
    """A reader whose index also has summaries of values: one for every block of neighboring entries.

    Like entries, they are computed again when one of their slots is overwritten, and also when one is emptied, since
    they are of other slots too. By them, what is not read takes part in attention.
    """

    __slots__ = ()

    @property
    def block(self) -> int:
        """How many neighboring entries share a summary of their values; 0 if nothing is estimated."""
        ...

    def summarize(self, index: Any, blocks: Tensor, values: Tensor, occupied: Tensor) -> None:
        """Compute the summaries of blocks [B, H, n], in place, as `refresh`, from the values of their m slots each."""
        ...

    def estimate_rest(self, index: Any, scores: Tensor, read: Tensor, normalizer: Tensor) -> Estimated:
        """Slots that stand for the entries that are not read.

        Args:
            index: The index.
            scores: The result of `score`, scaled and capped, plus the logarithm of the tokens that each entry holds,
                [B, H, G, X] fp32; -inf for an entry without a token.
            read: Which entries are read, [B, H, X] bool.
            normalizer: Logarithm of the sum of the exponentials of the scores of all slots that are read of entries, as
                attention computes them, [B, H, G] fp32.
        """
        ...

    def update(self, index: Any, slots: SlotAccess, changed: Changed) -> None:
        TokenReader.update(self, index, slots, changed)
        if self.block:
            self.update_summaries(index, slots, changed)

    def update_summaries(self, index: Any, slots: SlotAccess, changed: Changed) -> None:
        """Compute the summaries of what changed from the values that its slots hold."""
        entries = changed.entries if changed.emptied is None else slots.entries_of(changed.emptied)
        for blocks in slots.tiles(entries, self.block):
            every = blocks[..., None] * self.block + torch.arange(self.block, device=blocks.device)
            within = every < slots.entries  # the last block may have fewer
            at, occupied = slots.of_entries(every.clamp_max(slots.entries - 1))
            values = slots.values(at).unflatten(2, (blocks.shape[2], -1))
            self.summarize(index, blocks, values, (occupied & within[..., None]).flatten(3))

    def choose(self, index: Any, slots: SlotAccess, queries: Tensor) -> Read:
        if not self.block:
            return TokenReader.choose(self, index, slots, queries)
        slots.whole(index)
        scores = slots.scores(self.score(index, queries, slots.products))
        every = scores + slots.log_tokens()[:, :, None]
        read = slots.best(scores)
        return read._replace(rest=partial(self._rest, index, every, read))

    def _rest(self, index: Any, scores: Tensor, read: Read, normalizer: Tensor) -> Estimated:
        """Slots that stand for the entries that are not `read`; see `estimate_rest`."""
        assert read.entries is not None and read.read is not None
        is_read = torch.zeros_like(scores[:, :, 0], dtype=torch.bool).scatter(-1, read.entries, read.read)
        return self.estimate_rest(index, scores, is_read, normalizer)

    def count_step(self, index: Any, slots: SlotAccess) -> None:
        slots.whole(index)
        slots.written(block=self.block)
