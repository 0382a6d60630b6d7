"""Sizes of a layer before its prompts, to which a crop returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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
