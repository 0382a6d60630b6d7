"""An estimate of unread slots takes part in attention as a slot does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpolicy.engine.columns import ExactColumns, attend_columns
from kvpolicy.engine.in_place_attention import attend_in_place
from kvpolicy.protocols import Estimated
from kvpolicy.statistics.windows import ScoreTransform

HEADS = 2
GROUP = 3
DIM = 4


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("in_place", [False, True])
def test_an_estimate_weighs_as_much_as_a_slot(in_place: bool, softcap: float | None, sinks: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, HEADS * GROUP, 1, DIM, generator=generator)
    k, v = (torch.randn(1, HEADS, 9, DIM, generator=generator) for _ in range(2))
    transform = ScoreTransform(0.7, softcap, torch.linspace(-1, 1, HEADS * GROUP) if sinks else None)
    occupied = torch.rand(1, HEADS, 9, generator=generator) < 0.8
    occupied[..., 0] = True
    want, weights = attend_columns(q, ExactColumns(k, v), (), ~occupied, transform, True)
    assert weights is not None
    asked: list[Tensor] = []

    def rest(normalizer: Tensor) -> Estimated:
        """The last three slots, exactly."""
        asked.append(normalizer)
        scores = transform.scores(q.squeeze(2).unflatten(1, (HEADS, GROUP)), k[:, :, 6:])
        return Estimated(scores.masked_fill(~occupied[:, :, None, 6:], -torch.inf), v[:, :, 6:])

    if in_place:
        slots = torch.arange(6).expand(1, HEADS, -1)
        out, own = attend_in_place(q, k[:, :, :6], v, slots, occupied[..., :6], transform, rest=rest)
    else:
        first = ExactColumns(k[:, :, :6], v[:, :, :6])
        out, found = attend_columns(q, first, (), ~occupied[..., :6], transform, False, rest=rest)
        assert found is not None
        own = found
    assert torch.allclose(out, want, atol=1e-6)
    assert torch.allclose(own, weights[..., :6], atol=1e-6)
    scores = transform.scores(q.squeeze(2).unflatten(1, (HEADS, GROUP)), k[:, :, :6])
    normalizer = scores.masked_fill(~occupied[:, :, None, :6], -torch.inf).logsumexp(-1)
    assert torch.allclose(asked[0], normalizer, atol=1e-6)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_head_without_a_token_has_no_output(in_place: bool) -> None:
    q = torch.randn(1, GROUP, 1, DIM)
    k, v = torch.randn(2, 1, 1, 5, DIM)
    occupied = torch.zeros(1, 1, 5, dtype=torch.bool)

    def rest(normalizer: Tensor) -> Estimated:
        return Estimated(torch.full((1, 1, GROUP, 2), -torch.inf), torch.ones(1, 1, 2, DIM))

    transform = ScoreTransform(1.0)
    if in_place:
        out, _ = attend_in_place(q, k, v, torch.arange(5)[None, None], occupied, transform, rest=rest)
    else:
        out, _ = attend_columns(q, ExactColumns(k, v), (), ~occupied, transform, False, rest=rest)
    assert torch.equal(out, torch.zeros_like(out))
