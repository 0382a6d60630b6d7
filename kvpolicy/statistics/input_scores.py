"""Scores that new tokens get of the input of their layer, once, while it runs: in prompts by tile, and in steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.statistics.module_call import Forward
from kvpolicy.statistics.statistic import Coming, Context, Sizes, Statistic, Tile, Working
from kvpolicy.statistics.windows import TILE_ELEMENTS
from kvpolicy.text.errors import KVPolicyError

ALL_HEADS = slice(None)

Gate = Any
"""A NamedTuple of tensors by which one layer scores tokens; it belongs to the model, as a calibration does."""


class InputScorer(Protocol):
    """Scores each token once, by the input of its layer. No input is held."""

    def load_gate(self, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS) -> Gate:
        """The function that scores tokens of the layer, for the KV heads `heads` of the model, on a device."""
        ...

    def score_inputs(self, gate: Gate, inputs: Tensor) -> Tensor:
        """The score of each token by each KV head, [B, H, T] fp32, from inputs of the layer [B, T, hidden].

        [B, 1, T] if all heads share it. Traceable, and the score of a token depends on its own input alone.
        """
        ...


class NewScores(NamedTuple):
    """The scores of new tokens among all candidates.

    Attributes:
        scores: [B, H or 1, N] fp32; 0 for padding and for slots.
        is_new: Which candidates are new tokens, [B, H, N] bool.
    """

    scores: Tensor
    is_new: Tensor


@dataclass(frozen=True)
class InputScores(Statistic[NewScores]):
    """The scores of new tokens by the input of their layer; those of a generated token are `View.token.scores`.

    Attributes:
        scorer: Scores them.
        scores: [B, H or 1, P] fp32, 0 for padding; None before the first tile.
        columns: P.
    """

    scorer: InputScorer
    scores: Tensor | None = None
    columns: int = 0

    words: ClassVar[str] = "the input of its layer at each token, in prompts and while decoding"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The scores."""
        return () if self.scores is None else (self.scores,)

    def begun(self, coming: Coming) -> InputScores:
        """Nothing was scored."""
        return InputScores(self.scorer, None, coming.columns)

    def added(self, tile: Tile) -> InputScores:
        """Take the scores of a tile."""
        new = tile.scores
        assert new is not None, "a layer scores its tokens before it takes their statistics"
        if tile.valid is not None:  # inputs of padding may be inf or NaN
            new = new.masked_fill(~tile.valid[:, None], 0)
        if tile.is_whole:
            return replace(self, scores=new)
        scores = new.new_zeros(*new.shape[:2], self.columns) if self.scores is None else self.scores
        # In place: only this prompt, which is not complete yet, has the tensor.
        scores[:, :, tile.start : tile.start + new.shape[2]] = new
        return replace(self, scores=scores)

    def joined(self, later: Any, columns: int) -> InputScores:
        """The scores of both."""
        if self.scores is None or later.scores is None:
            return self if later.scores is None else later
        scores = torch.cat([self.scores, later.scores], 2)
        return InputScores(self.scorer, scores, self.columns + later.columns)

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> InputScores:
        """The same with `fn` of the scores."""
        return replace(self, scores=None if self.scores is None else fn(self.scores))

    def reduced(self, context: Context) -> NewScores:
        """The scores behind those of slots, which keep what they have."""
        assert self.scores is not None
        is_new = torch.zeros_like(context.positions, dtype=torch.bool)
        is_new[..., context.slots :] = True
        return NewScores(F.pad(self.scores, (context.slots, 0)), is_new)

    def reordered(self, result: NewScores, order: Tensor) -> NewScores:
        """In another order, which may differ by head."""
        return NewScores(result.scores.expand(order.shape).gather(-1, order), result.is_new.gather(-1, order))

    def working(self, sizes: Sizes) -> Working:
        """A tile of inputs as fp64, and the score of every token for each KV head."""
        return Working(chosen=4 * (2 * TILE_ELEMENTS + 3 * sizes.candidates))


def score_inputs(scorer: InputScorer, gate: Gate, forward: Forward | None) -> Tensor:
    """The scores of the new tokens of a forward, [B, H, P] fp32.

    Args:
        scorer: The selector, which scores inputs.
        gate: What the layer scores them by.
        forward: The arguments of the attention module.

    Raises:
        KVPolicyError: If the layer is run without its input.
    """
    if forward is None:
        raise KVPolicyError(
            f"The layer must be run with the input of its attention for the selector {scorer}, which scores tokens "
            "by it, got keys and values alone; try snapkv, or the model itself."
        )
    inputs = forward.hidden_states.detach()
    batch, columns, width = inputs.shape
    with torch.no_grad():
        if columns == 1:
            return scorer.score_inputs(gate, inputs)
        rows = max(TILE_ELEMENTS // max(batch * width, 1), 16)  # scores are fp32, and a copy of all inputs is long
        parts = [scorer.score_inputs(gate, inputs[:, at : at + rows]) for at in range(0, columns, rows)]
    return torch.cat(parts, 2) if len(parts) != 1 else parts[0]
