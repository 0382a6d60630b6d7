"""Scores that new tokens get of the input of their layer, once, while it runs: in prompts by tile, and in steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine.attention import TILE_ELEMENTS
from kvpolicy.engine.statistic import Candidates, Coming, Tile
from kvpolicy.protocols import Forward, Gate, ScoresInputs, Selector
from kvpolicy.text.errors import KVPolicyError


@dataclass(frozen=True)
class BirthScores:
    """The scores of a prompt's tokens; they enter the selector's state, and no field of `Seen`.

    Attributes:
        scores: [B, H, P] fp32, 0 for padding; None before the first tile.
        columns: P.
    """

    scores: Tensor | None = None
    columns: int = 0

    reads_past = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The scores."""
        return () if self.scores is None else (self.scores,)

    def begun(self, coming: Coming) -> BirthScores:
        """Nothing was scored."""
        return BirthScores(None, coming.columns)

    def added(self, tile: Tile) -> BirthScores:
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

    def joined(self, later: BirthScores, columns: int) -> BirthScores:
        """The scores of both."""
        if self.scores is None or later.scores is None:
            return self if later.scores is None else later
        return BirthScores(torch.cat([self.scores, later.scores], 2), self.columns + later.columns)

    def beside(self, other: BirthScores, heads: int) -> BirthScores:
        """These scores: no keys were made of the input of another layer."""
        return self

    def reduced(self, candidates: Candidates) -> Mapping[str, Any]:
        """Nothing: see `rank_candidates`."""
        return {}

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> BirthScores:
        """The same with `fn` of the scores."""
        return replace(self, scores=None if self.scores is None else fn(self.scores))


def score_inputs(selector: Selector, gate: Gate, forward: Forward | None) -> Tensor:
    """The scores of the new tokens of a forward, [B, H, P] fp32.

    Args:
        selector: The selector, which scores inputs.
        gate: What the layer scores them by.
        forward: The arguments of the attention module.

    Raises:
        KVPolicyError: If the layer is run without its input.
    """
    assert isinstance(selector, ScoresInputs)  # see `policy.combination.check_abilities`
    if forward is None:
        raise KVPolicyError(
            f"The layer must be run with the input of its attention for the selector {selector}, which scores tokens "
            "by it, got keys and values alone; try snapkv, or the model itself."
        )
    inputs = forward.hidden_states.detach()
    batch, columns, width = inputs.shape
    with torch.no_grad():
        if columns == 1:
            return selector.score_inputs(gate, inputs)
        rows = max(TILE_ELEMENTS // max(batch * width, 1), 16)  # scores are fp32, and a copy of all inputs is long
        parts = [selector.score_inputs(gate, inputs[:, at : at + rows]) for at in range(0, columns, rows)]
    return torch.cat(parts, 2) if len(parts) != 1 else parts[0]
