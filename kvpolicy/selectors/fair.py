"""FairEviction: keep the same share of every part of the prompt."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.protocols import SMALLEST_HEAD, HeadShape, Selector, State, View, scoped
from kvpolicy.selectors.base import Wrapper, check_base
from kvpolicy.selectors.common import below_base
from kvpolicy.selectors.snapkv import SnapKV
from kvpolicy.statistics import Results
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.strategy import checked, least, strategy


@scoped(ranked="row")
class FairState(NamedTuple):
    """How much of its part ranks above each slot's token, and the state of the base.

    Attributes:
        share: Fraction of the tokens of its part, [B, H, S] fp32.
        ranked: Tokens that the row had seen when its parts were ranked, [B] int64.
        base: The state of the base.
    """

    share: Tensor
    ranked: Tensor
    base: State


@strategy
class FairEviction(Wrapper):
    """Keep the same share of every part of the prompt, and in each part the tokens that another selector ranks highest.

    A prompt with several instructions loses some of them sooner than others, if all tokens compete: those that the last
    queries do not ask for, such as the rules of a system prompt. So each part of the prompt keeps a share of the budget
    that is proportional to its length.

    Args:
        base: The selector that ranks the tokens of a part; any selector.
        at: Where parts begin, as ascending positions such as `120_300`, which are three parts; `auto`: `parts` equal
            ones.
        parts: With `auto`, into how many parts of equal length a prompt is divided.

    Raises:
        KVPolicyTypeError: If a value is of another type.
        KVPolicyError: If `at` is neither `auto` nor ascending positions from 1 on, or `parts` is below 1.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("fair:at=120_300/h2o@0.2"))
        'fair:at=120_300/h2o@0.2'

    Source:
        The fair eviction of The Pitfalls of KV Cache Compression (arXiv:2510.00231), and its authors' code, commit
        fc0f5df. Differences:

        - There may be any number of parts; the code has two, a defense and the other instructions of a system prompt.
        - Numbers of tokens are rounded to the nearest by shares; the code rounds that of the earlier part down.
        - What the base always keeps, such as a window, is kept, and counts in its part.
        - The base ranks by what it sees, also in earlier parts. For `snapkv`, `tova` and `h2o`, the code lets the last
          queries of the earlier part rank its tokens.
        - Generated tokens rank above the prompt. While decoding, each part gives up tokens by its length.
        - The paper's other remedy, a list of tokens that always stay, is left out.
        - The `decode` mode is that of the base.
    """

    base: Selector = checked(check_base, SnapKV)
    at: str = "auto"
    parts: int = least(1, 2)

    def __post_init__(self) -> None:
        if not isinstance(self.at, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise KVPolicyTypeError(
                f"FairEviction.at must be auto or positions such as 120_300, got {self.at!r}; try auto."
            )
        ascending = sorted(set(self._begins)) == [*self._begins] and 0 not in self._begins
        if self.at != "auto" and not (re.fullmatch(r"[0-9]{1,9}(_[0-9]{1,9})*", self.at) and ascending):
            raise KVPolicyError(
                "FairEviction.at must be auto or ascending positions from 1 on such as 120_300, got "
                f"{self.at!r}; try auto."
            )

    @property
    def _begins(self) -> tuple[int, ...]:
        return tuple(map(int, re.findall("[0-9]+", self.at)))

    @property
    def compares_heads(self) -> bool:
        """No: a share of a part says nothing about other heads."""
        return False

    def alloc(
        self, batch: int, heads: int, slots: int, device: torch.device | str, head: HeadShape = SMALLEST_HEAD
    ) -> State:
        """Nothing is ranked."""
        return FairState(
            share=torch.zeros(batch, heads, slots, dtype=torch.float32, device=device),
            ranked=torch.zeros(batch, dtype=torch.int64, device=device),
            base=self.base.alloc(batch, heads, slots, device, head),
        )

    def observe(self, state: FairState, seen: Results, view: View) -> State:
        """Update the base, and rank the candidates of each part."""
        base = self.base.observe(state.base, seen, view)
        bounds = self._bounds(view.length)
        part = torch.searchsorted(bounds[:, 1:-1].contiguous(), view.positions.flatten(1).long(), right=True)
        part = part.view(view.positions.shape)
        higher = _number_above(self.base.priority(base, view), part, view.valid)
        length = bounds.diff(dim=-1).gather(-1, part.flatten(1)).view(part.shape).clamp_min(1)
        # A half, so that the numbers of kept tokens are rounded and not cut off.
        share = ((higher.double() + 0.5) / length).float()
        return FairState(share, view.length.clone(), base)

    def priority(self, state: FairState, view: View) -> Tensor:
        """The newest token and what the base keeps, generated tokens by age, then others by share: [B, H, N]."""
        return below_base(-state.share, view, state.ranked, self.base.priority(state.base, view))

    def _bounds(self, length: Tensor) -> Tensor:
        """Where the parts of rows of `length` [B] begin, and where the last one ends, [B, parts + 1] int64."""
        if self._begins:
            begins = torch.tensor((0, *self._begins), device=length.device).expand(len(length), -1)
            return torch.cat([torch.minimum(begins, length[:, None]), length[:, None]], -1)
        number = torch.arange(self.parts + 1, device=length.device)
        return -(-number * length[:, None]).div(self.parts, rounding_mode="floor")


def _number_above(priority: Tensor, part: Tensor, valid: Tensor) -> Tensor:
    """How many tokens of the same part rank above each one, ties to the earlier, [B, H, N] int64; any if invalid.

    Args:
        priority: Of each token, by ascending position, [B, H, N] fp32.
        part: Number of its part, [B, H, N] int64.
        valid: Which of them are tokens, [B, H, N] bool.
    """
    best_first = priority.masked_fill(~valid, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    by_part = part.masked_fill(~valid, -1).gather(-1, best_first).argsort(dim=-1, stable=True)
    order = best_first.gather(-1, by_part)  # the parts one behind the other, each with its best token first
    parts = part.masked_fill(~valid, -1).gather(-1, order)
    place = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    begins = torch.searchsorted(parts.contiguous(), parts.contiguous())
    return torch.zeros_like(order).scatter(-1, order, place - begins)
