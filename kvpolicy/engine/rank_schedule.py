"""When the slots of a layer are ranked together again; see `kvpolicy.protocols.Reranks`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine.state import map_numbers


class RankSchedule:
    """Counts steps on the host, and asks for the lengths of rows only when a row may be due.

    A row is due by the number of its tokens, so that it is ranked at the same steps as in a batch of one. The owner
    counts a step by taking one from `steps`; a row may be due where less than one is left.

    Attributes:
        every: Generated tokens between two rankings, 0 for none.
        ranked_len: Tokens that each row had seen when it was last ranked.
        steps: Steps until a row may be due, infinite for never.
    """

    def __init__(self, every: int) -> None:
        """Rank after `every` generated tokens, 0 for never."""
        self.every = every
        self.ranked_len: list[int] = []
        self.steps: float = math.inf

    def start(self, batch: int) -> None:
        """Begin with `batch` empty rows."""
        self.ranked_len = [0] * batch

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Select or repeat rows."""
        self.ranked_len = map_numbers(fn, self.ranked_len)

    def replace(self, row: int, ranked_len: int, length: Tensor, budget: Tensor) -> None:
        """Let another text be in a row, which was last ranked at `ranked_len` tokens."""
        self.ranked_len[row] = ranked_len
        self.note(torch.zeros_like(length, dtype=torch.bool), length, budget)

    @property
    def is_started(self) -> bool:
        """Whether the steps until the next ranking are counted; True if there is none."""
        return not self.every or self.steps < math.inf

    def numbers(self) -> list[Any]:
        """The lengths of the rows when they were ranked, and the steps left, None for never."""
        return [self.ranked_len, None if self.steps == math.inf else self.steps]

    def set_numbers(self, numbers: Sequence[Any]) -> None:
        """Restore the result of `numbers`.

        Raises:
            ValueError: If they count steps, and the layer is never ranked again.
        """
        self.ranked_len, steps = numbers
        if steps is not None and not self.every:
            raise ValueError(f"A layer that is never ranked again must have no steps until then, got {steps}.")
        self.steps = math.inf if steps is None else steps

    def move(self, by: int) -> None:
        """Count every row as `by` tokens longer."""
        # A row that was ranked before most of the tokens that are gone, or never, counts as ranked at its beginning.
        self.ranked_len = [max(length + by, 0) for length in self.ranked_len]

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
        self.steps = min(self._left(length, budget), default=math.inf)

    def _left(self, length: Tensor, budget: Tensor) -> list[int]:
        """Tokens that each row may still get before it is due."""
        triples = zip(length.tolist(), self.ranked_len, budget.tolist(), strict=True)
        # Tokens that were not ranked never fill more than half a budget. A row that begins in a step of others has its
        # first token ranked as alone, where that is a prompt.
        return [max(last, 1) + max(min(self.every, most // 2), 1) - new for new, last, most in triples]
