"""What is known of the texts of a cache beforehand: how long their prompts are, and how much is generated then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.state import map_numbers
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.validation import at_least, expected, longest


class RowLengths(NamedTuple):
    """Lengths of the rows of a cache, on the host.

    Attributes:
        own: Tokens of each row so far, [B] int64.
        prompt: Tokens of its whole prompt, as far as it was announced, [B] int64.
        end: Tokens once the last is generated, [B] int64; None if unknown.
    """

    own: Tensor
    prompt: Tensor
    end: Tensor | None


class Announced:
    """The lengths that were announced to a cache.

    Numbers and lists, not tensors, so that `nbytes` counts every tensor that outlives a forward.

    Attributes:
        new: Tokens that will be generated; None if unknown.
        end: Tokens of each row once the last is generated, as of the first chunk of its prompt; None if unknown.
        awaits_chunk: Whether a prompt was announced of which more may follow.
    """

    def __init__(self, prompt: Tensor | Sequence[int] | int | None = None, new: int | None = None) -> None:
        """Announce prompts, [B] or one length for all rows, and `new` tokens behind them.

        Raises:
            KVPolicyError: If a number is out of range.
        """
        whole, self.new = expected(prompt, new)
        self._prompt: list[int] | int | None = None if whole is None else whole.tolist()
        self.awaits_chunk = whole is not None
        self.end: list[int] | None = None

    @property
    def prompt(self) -> Tensor | None:
        """Tokens of each row's whole prompt, [B] or [] int64; None if unknown."""
        return None if self._prompt is None else torch.tensor(self._prompt, device="cpu")

    def lengths(self, own: Tensor) -> RowLengths:
        """The lengths of rows that have `own` tokens so far, [B] int64."""
        own = own.cpu()
        prompt = at_least(own, self.prompt)
        if self.end is not None:  # once per announcement: a chunk or turn that follows does not move the end
            return RowLengths(own, prompt, torch.tensor(self.end, device="cpu"))
        return RowLengths(own, prompt, None if self.new is None else prompt + self.new)

    def again(self, prompt: Tensor | None, new: int) -> Announced:
        """A further announcement for the same texts: the longer prompt counts, and the end is another one."""
        return Announced(longest(self.prompt, prompt), new)

    def check_rows(self, rows: int) -> None:
        """Refuse a forward of another number of rows.

        Raises:
            KVPolicyError: If prompts of other rows were announced.
        """
        if isinstance(self._prompt, list) and len(self._prompt) != rows:
            raise KVPolicyError(
                f"prompt must be one length or one per row, got {len(self._prompt)} lengths for {rows} rows; try a "
                "new cache, or its expect()."
            )

    def follows(self, seen: Tensor, new: int, valid: Tensor | None) -> bool:
        """Whether more of a prompt follows the new tokens of a forward.

        Args:
            seen: Tokens that each row has seen before, [B] int64.
            new: Columns of the forward.
            valid: Which of them are not padding, [B, P] bool; None if all are.
        """
        prompt = self.prompt
        if prompt is None:
            return False
        length = (seen + (new if valid is None else valid.sum(-1))).cpu()
        if not prompt.dim():  # one number is the longest row's
            return int(length.max()) < int(prompt)
        return bool((at_least(length, prompt) != length).any())

    def shift(self, by: int) -> None:
        """Note that the text has become longer or shorter by some tokens."""
        self.end = None if self.end is None else [end + by for end in self.end]
        if self._prompt is not None:
            self._prompt = (torch.tensor(self._prompt, device="cpu") + by).clamp_min(0).tolist()

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Select or repeat rows."""
        if isinstance(self._prompt, list):
            self._prompt = map_numbers(fn, self._prompt)
        self.end = None if self.end is None else map_numbers(fn, self.end)

    def numbers(self) -> dict[str, Any]:
        """The lengths as JSON values."""
        return {"prompt": self._prompt, "new": self.new, "end": self.end}

    @classmethod
    def of_numbers(cls, numbers: Mapping[str, Any]) -> Announced:
        """The lengths of which `numbers` were taken."""
        announced = cls(numbers["prompt"], numbers["new"])
        announced.end = numbers["end"]
        return announced


def several_follow(prompt: Tensor | None, seen: Tensor) -> bool:
    """Whether a row has seen a part of a prompt of which several tokens follow.

    Args:
        prompt: Tokens of each row's whole prompt, [B] or [] int64; None if unknown.
        seen: Tokens that each row has seen, [B] int64.
    """
    if prompt is None:
        return False
    # Another number of rows is refused by the forward, or beams are about to repeat the rows.
    return prompt.shape in ((), seen.shape) and bool((prompt - seen.cpu() > 1).any())
