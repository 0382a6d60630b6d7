"""Positions and states of the tokens that are left of a trimmed prompt, which awaits its budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from kvpolicy.engine.state import map_state, tensors
from kvpolicy.protocols import State, View


class TrimmedTokens(NamedTuple):
    """The tokens of each head that may still be kept, by ascending position; see `kvpolicy.engine.trimming`.

    Attributes:
        view: The tokens, [B, H, K]. A head that has fewer than others is filled with tokens that rank below them.
        state: The selector's state of each, and of each head and row, after it observed the prompt.
        columns: Tokens of the prompt.
    """

    view: View
    state: State
    columns: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that are held for it."""
        return (self.view.positions, *tensors(self.state))

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> TrimmedTokens:
        """The same with `fn` of every per-row tensor, which selects or repeats rows."""
        view = self.view
        view = view._replace(positions=fn(view.positions), length=fn(view.length), budget=fn(view.budget))
        return self._replace(view=view, state=map_state(fn, self.state))
