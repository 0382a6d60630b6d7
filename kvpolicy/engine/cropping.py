"""Taking back the newest tokens of a layer from which nothing was evicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.attention import ScoreTransform
from kvpolicy.engine.growing import LayerGrowth
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.state import map_slots, slot_tensors
from kvpolicy.protocols import Codec, Layout, Merger, Reader, Selector
from kvpolicy.readers.all import ReadAll


class Sizes(NamedTuple):
    """The sizes of a layer before a prompt, or before slots were added.

    Attributes:
        columns: Columns seen then.
        exact: Slots.
        capacity: Tokens that the slots were made for.
        expected_len: Tokens that each row had slots for.
        budget: The most tokens of each row.
    """

    columns: int
    exact: int
    capacity: int
    expected_len: list[int]
    budget: list[int]

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> Sizes:
        """Select or repeat rows."""
        expected_len, budget = (fn(torch.tensor(rows)).tolist() for rows in (self.expected_len, self.budget))
        return self._replace(expected_len=expected_len, budget=budget)


def crop_obstacle(selector: Selector, codec: Codec, merger: Merger, reader: Reader, *, paged: bool) -> str:
    """Which part of a policy keeps a token from being taken back without a log; empty if none does."""
    needs = selector.needs
    if paged:
        return "budgets by head"
    if codec.stages:
        return f"the codec {codec!r}"
    if merger.traits.when != "never":
        return f"the merger {merger!r}"
    if not isinstance(reader, ReadAll):
        return f"the reader {reader!r}"
    if needs.decode_attn or needs.vectors or needs.rerank_every or needs.replay is not None:
        return f"the selector {selector!r}, whose statistics every token changes"
    return ""


class LayerCropping(LayerGrowth):
    """The slots of a layer that can be cropped to an earlier length. `LayerStore` operates on them.

    Nothing was evicted from it, so that slot n of each head holds its row's token n.
    """

    is_paged = False
    """Whether each head has a budget."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make an empty store; see `LayerSlots`."""
        super().__init__(*args, **kwargs)
        self.sizes: list[Sizes] = []

    def note_sizes(self, new: int = 0) -> None:
        """Note the sizes of the layer before they change for a prompt of `new` columns that were counted already."""
        if self.can_crop:
            sizes = (self.layout.exact, self.capacity, list(self.expected_len), self.budget.tolist())
            self.sizes.append(Sizes(int(self.columns) - new, *sizes))

    def forget_sizes(self, columns: int) -> None:
        """Forget the sizes before so many columns, to which nothing is cropped any more."""
        self.sizes = [sizes for sizes in self.sizes if sizes.columns >= columns]

    @property
    def can_crop(self) -> bool:
        """Whether the parts of the policy allow to take tokens back while nothing is evicted."""
        return not crop_obstacle(self.selector, self.codec, self.merger, self.reader, paged=self.is_paged)

    @property
    def keeps_all(self) -> bool:
        """Whether every head holds every token of its row, in order."""
        slot = torch.arange(self.positions.shape[-1], device=self.positions.device)
        length = self.length[:, None, None]
        return bool((self.positions == torch.where(slot < length, slot, -1)).all() & (length <= len(slot)).all())

    def crop(self, columns: int, length: Tensor) -> None:
        """Leave the layer as it was after so many columns, which end no later than a prompt begins.

        Args:
            columns: Columns to keep.
            length: Tokens of each row that these hold, [B] int64.
        """
        sizes = None
        # The last one popped belongs to the earliest change that is taken back, and so has the sizes to return to.
        while self.sizes and self.sizes[-1].columns >= columns:
            sizes = self.sizes.pop()
        if sizes is not None:
            self._resize(sizes)
        self.columns.fill_(columns)
        self.length.copy_(length)
        slot = torch.arange(self.layout.exact, device=self.positions.device)
        beyond = (slot >= self.length[:, None])[:, None]
        self.positions.masked_fill_(beyond, -1)
        for tensor in slot_tensors(self.state):
            tensor.masked_fill_(beyond, 0)
        for vectors in (self.keys, self.values):
            vectors.masked_fill_(beyond[..., None], 0)
        self._free_steps = self._count_free_steps()
        self.fix_addresses()

    def newest(self, length: Tensor, count: int, valid: Tensor | None) -> PendingPrompt:
        """The tokens behind the first `length` [B] of each row, as a prompt of `count` columns that was attended to.

        Args:
            length: Tokens of each row before it.
            count: Its columns.
            valid: Which of these are not padding, [B, count] bool; None if all are.
        """
        place = torch.arange(1, count + 1, device=length.device) if valid is None else valid.long().cumsum(-1)
        slots = (length[:, None] + place - 1).clamp_min(0)  # an arbitrary slot for padding
        rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
        keys, values = (t.transpose(1, 2)[rows, slots].transpose(1, 2).contiguous() for t in (self.keys, self.values))
        return PendingPrompt(keys, values, valid, ScoreTransform(self.scale))

    def _resize(self, sizes: Sizes) -> None:
        """Truncate the layer to an earlier size."""
        self.layout = Layout(sizes.exact)
        self.capacity = sizes.capacity
        self.expected_len = list(sizes.expected_len)
        self.keys = self.keys[:, :, : sizes.exact].clone()
        self.values = self.values[:, :, : sizes.exact].clone()
        self.positions = self.positions[..., : sizes.exact].clone()
        self.state = map_slots(lambda t: t[..., : sizes.exact].clone(), self.state)
        self._set_budget(self.budget.new_tensor(sizes.budget))

    def _extend(self, more: list[int]) -> int:
        """Let each row hold so many tokens more; in a growing cache they raise the budget too."""
        self.note_sizes()
        return super()._extend(more)

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every per-row tensor by `fn` of it, which selects or repeats rows."""
        super().map_rows(fn)
        self.sizes = [sizes.map_rows(fn) for sizes in self.sizes]
