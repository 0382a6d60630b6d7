"""How many decode steps a layer has slots for, and slots for more."""

from __future__ import annotations

import torch

from kvpolicy.engine import capacity
from kvpolicy.engine.partial_reads import LayerReading
from kvpolicy.engine.sizes import Sizes
from kvpolicy.engine.state import map_slots
from kvpolicy.protocols import Layout


class LayerGrowth(LayerReading):
    """The slots of a layer that may need more of them. `LayerStore` operates on them."""

    @property
    def can_run_out(self) -> bool:
        """Whether a step may find no free slot, because it must wait for a demotion or for more slots."""
        return self.grows or self._may_exceed_plan or sum(self.layout.coded) > 0

    def reserve(self, new: int) -> int:
        """Make room for `new` more tokens at once, in a growing cache; returns how many the longest row was given."""
        counts = zip(self._row_counts(), self.expected_len, strict=True)
        more = [max(0, held + new - expected) for held, expected in counts]
        return self._extend(more) if any(more) else 0

    def _extend(self, more: list[int]) -> int:
        """Add so many slots to each row; in a growing cache, a row may hold as many tokens as it has slots."""
        self.note_sizes()
        old = self.capacity
        self.expected_len = [length + tokens for length, tokens in zip(self.expected_len, more, strict=True)]
        if max(self.expected_len) > self.capacity:
            self.capacity = max(self.expected_len)
            self._lengthen()
        slots = self.budget.new_tensor(self.expected_len)
        self._set_budget(torch.maximum(self.budget, slots) if self.grows else self.budget)
        self.fix_addresses()
        return self.capacity - old

    def _count_free_steps(self) -> float:
        if not self.can_run_out:
            return capacity.UNLIMITED
        occupied = (self.positions >= 0).sum(-1)
        room = None
        if self.limits is not None:
            # A row that never demotes has a threshold beyond any count, and ends where its slots end.
            size = self._open_slots().sum(-1).expand_as(occupied)
            room = torch.minimum(size, self.limits.flush_threshold) - self._buffered()
        return capacity.free_steps(occupied, self.budget, self.expected_len, grows=self.grows, buffer_room=room)

    def recount(self) -> None:
        """Count the free steps again, after slots were emptied or filled otherwise than by steps."""
        self.free_steps = self._count_free_steps()

    def truncate(self, sizes: Sizes) -> None:
        """Truncate the layer to an earlier size."""
        self.layout = Layout(sizes.exact)
        self.capacity = sizes.capacity
        self.expected_len = list(sizes.expected_len)
        self.keys = self.keys[:, :, : sizes.exact].clone()
        self.values = self.values[:, :, : sizes.exact].clone()
        self.positions = self.positions[..., : sizes.exact].clone()
        self.state = map_slots(lambda t: t[..., : sizes.exact].clone(), self.state)
        self._set_budget(self.budget.new_tensor(sizes.budget))

    def has_room(self) -> bool:
        """Whether the steps that are counted as free fit indeed."""
        return self.free_steps <= self._count_free_steps()

    def note_move(self, by: int) -> None:
        """Note that the newest tokens were given positions larger by `by`, and that others may be gone."""
        self.length.add_(by)
        self.columns.add_(by)
        self.schedule.move(by)
        self._rebuild_index()
        self.recount()
