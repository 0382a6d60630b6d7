"""Attention to occupied slots, beside the formula in fp64."""

from __future__ import annotations

import torch

from kvpolicy.engine.partial_attention import attend_occupied
from kvpolicy.statistics.windows import ScoreTransform
from tests.engine.parts import generator
from tests.sampling import product

HEADS = 3
DIM = 4


@product("softcap,occupancy,counted", [None, 1.5], [None, [True] * 6 + [False] * 3], [False, True])
def test_attention_to_occupied_slots(softcap: float | None, occupancy: list[bool] | None, counted: bool) -> None:
    """With the normalizer, against fp64; by the fused function where nothing is masked, counted or capped."""
    q, keys, values = (torch.randn(1, HEADS, n, DIM, generator=generator(i)) for i, n in enumerate((5, 9, 9)))
    counts = torch.rand(1, HEADS, 9, generator=generator(3)) if counted else None
    occupied = None if occupancy is None else torch.tensor(occupancy).expand(1, HEADS, 9)
    found = attend_occupied(q, (keys, values), (), occupied, ScoreTransform(0.4, softcap), counts)
    score = q.double() @ keys.double().mT * 0.4
    if softcap is not None:
        score = torch.tanh(score / softcap) * softcap
    if counts is not None:
        score = score + counts.double()[:, :, None]
    if occupied is not None:
        score = score.masked_fill(~occupied[:, :, None], -torch.inf)
    torch.testing.assert_close(found.output.double(), score.softmax(-1) @ values.double(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.normalizer.double(), score.logsumexp(-1), atol=1e-6, rtol=1e-5)
