"""Attention from one token per row to some slots, whose values are summed where they are."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.engine.columns import Rest, with_rest
from kvpolicy.kernels.row_sums import row_sums
from kvpolicy.protocols import ALONE, StepMemo
from kvpolicy.statistics.windows import ScoreTransform


def attend_in_place(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    occupied: Tensor,
    transform: ScoreTransform,
    counts: Tensor | None = None,
    rest: Rest | None = None,
    *,
    index: Tensor | None = None,
    memo: StepMemo = ALONE,
    none_alone: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attend from one token per row to some slots, whose values are not copied; see `sums_in_place`.

    Args:
        q: [B, Hq, 1, D].
        keys: Keys of these slots, [B, H, n, D].
        values: Values of all slots, [B, H, S, D] fp32.
        slots: [B, H, n] int64.
        occupied: Which of these slots are attended to, [B, H, n] bool.
        transform: From products to attention weights.
        counts: Logarithm of the number of tokens that each of these slots stands for, [B, H, n] fp32, or None.
        rest: Estimates what is not read.
        index: `flat_slots` of the slots, if it is known.
        memo: What the layers of the step compute alike.
        none_alone: Whether each head is known to attend to a slot.

    Returns:
        The output [B, Hq, 1, D], and the attention weights [B, H, G, n] fp32; 0 in a head without a slot.
    """
    score = transform.scores(q.squeeze(2).unflatten(1, (values.shape[1], -1)), keys)
    if counts is not None:
        score += counts[:, :, None]
    hidden = ~occupied[:, :, None]
    score = score.masked_fill(hidden, -torch.inf)
    estimated: Tensor | None = None
    if rest is None:
        weights = transform.weights(score)
    else:
        weights, estimated = with_rest(score, score, transform, rest)
    if not none_alone:  # masked again, since the softmax of nothing is NaN
        weights = weights.masked_fill(hidden, 0)
    mixed = row_sums(weights, values, slots, index, memo.once)
    if estimated is not None:
        mixed = mixed + estimated
    return mixed.flatten(1, 2).unsqueeze(2), weights
