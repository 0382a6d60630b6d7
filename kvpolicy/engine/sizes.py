"""Sizes of a layer before its prompts, to which a crop returns, and when its slots are ranked together again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.protocols import rerank_every
from kvpolicy.readers.all import ReadAll
from kvpolicy.statistics import Replay, UnrotatedKeys


def map_numbers(fn: Callable[[Tensor], Tensor], numbers: list[int]) -> list[int]:
    """Select or repeat numbers of rows that are held on the host, one for each row, as `fn` does with tensors."""
    return fn(torch.tensor(numbers, device="cpu")).tolist()


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
        expected_len, budget = (map_numbers(fn, rows) for rows in (self.expected_len, self.budget))
        return self._replace(expected_len=expected_len, budget=budget)


class SizeHistory:
    """The sizes of a layer before each change, the latest last.

    Args:
        is_kept: Whether the parts of the policy allow to take tokens back; otherwise nothing is noted.
    """

    def __init__(self, is_kept: bool) -> None:
        """Make an empty history."""
        self.is_kept = is_kept
        self.entries: list[Sizes] = []

    def forget(self, columns: int) -> None:
        """Forget the sizes before so many columns, to which nothing is cropped any more."""
        self.entries = [sizes for sizes in self.entries if sizes.columns >= columns]

    def back_to(self, columns: int) -> Sizes | None:
        """Take back all changes since so many columns; the sizes before them, or None if there were none."""
        sizes = None
        # The last one popped belongs to the earliest change that is taken back, and so has the sizes to return to.
        while self.entries and self.entries[-1].columns >= columns:
            sizes = self.entries.pop()
        return sizes

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Select or repeat rows."""
        self.entries = [sizes.map_rows(fn) for sizes in self.entries]


def crop_obstacle(spec: LayerSpec) -> str:
    """Which part of a policy keeps a token from being taken back without a log; empty if none does."""
    if spec.heads is not None:
        return "budgets by head"
    if spec.stages:
        return f"the codec {spec.codec}"
    if spec.merger_traits.when != "never":
        return f"the merger {spec.merger}"
    if not isinstance(spec.reader, ReadAll):
        return f"the reader {spec.reader}"
    asked = {type(each) for each in spec.statistics}
    looks = spec.step_attention or spec.step_vectors or not asked.isdisjoint({UnrotatedKeys, Replay})
    if looks or rerank_every(spec.selector):
        return f"the selector {spec.selector}, whose statistics every token changes"
    return ""


class RankSchedule:
    """Counts steps on the host, and asks for the lengths of rows only when a row may be due.

    A row is due by the number of its tokens, so that it is ranked at the same steps as in a batch of one.
    """

    def __init__(self, every: int) -> None:
        """Rank after `every` generated tokens, 0 for never."""
        self.every = every
        self.ranked_len: list[int] = []  # tokens that each row had seen when it was last ranked
        self._steps: float = math.inf

    def start(self, batch: int) -> None:
        """Begin with `batch` empty rows."""
        self.ranked_len = [0] * batch

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Select or repeat rows."""
        self.ranked_len = map_numbers(fn, self.ranked_len)

    @property
    def is_started(self) -> bool:
        """Whether the steps until the next ranking are counted; True if there is none."""
        return not self.every or self._steps < math.inf

    def numbers(self) -> list[Any]:
        """The lengths of the rows when they were ranked, and the steps left, None for never."""
        return [self.ranked_len, None if self._steps == math.inf else self._steps]

    def set_numbers(self, numbers: Sequence[Any]) -> None:
        """Restore the result of `numbers`.

        Raises:
            ValueError: If they count steps, and the layer is never ranked again.
        """
        self.ranked_len, steps = numbers
        if steps is not None and not self.every:
            raise ValueError(f"A layer that is never ranked again must have no steps until then, got {steps}.")
        self._steps = math.inf if steps is None else steps

    def move(self, by: int) -> None:
        """Count every row as `by` tokens longer."""
        self.ranked_len = [length + by for length in self.ranked_len]

    def count_step(self) -> bool:
        """Count one step; whether a row may be due."""
        self._steps -= 1
        return self._steps < 1

    def due(self, length: Tensor, budget: Tensor) -> Tensor:
        """Which rows of `length` and `budget` [B] are to be ranked, [B] bool."""
        return torch.tensor([left < 1 for left in self._left(length, budget)], device=length.device)

    def note(self, rows: Tensor | None, length: Tensor, budget: Tensor) -> None:
        """Note that `rows` [B] bool (None for all) were ranked, and count the steps until the next time."""
        if not self.every:
            return
        lengths = length.tolist()
        ranked = [True] * len(lengths) if rows is None else rows.tolist()
        triples = zip(ranked, lengths, self.ranked_len, strict=True)
        self.ranked_len = [new if now else last for now, new, last in triples]
        self._steps = min(self._left(length, budget), default=math.inf)

    def _left(self, length: Tensor, budget: Tensor) -> list[int]:
        """Tokens that each row may still get before it is due."""
        triples = zip(length.tolist(), self.ranked_len, budget.tolist(), strict=True)
        # Tokens that were not ranked never fill more than half a budget. A row that begins in a step of others has its
        # first token ranked as alone, where that is a prompt.
        return [max(last, 1) + max(min(self.every, most // 2), 1) - new for new, last, most in triples]
