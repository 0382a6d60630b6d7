"""Attention to parts of the keys, joined, against attention to all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpolicy.engine import partial_attention
from kvpolicy.engine.partial_attention import attend_causal, attend_occupied, attend_part, has_parts
from kvpolicy.statistics.windows import ScoreTransform
from tests.engine.parts import generator
from tests.sampling import product

HEADS = 2
DIM = 8
TRANSFORM = ScoreTransform(0.4)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


@product("new,group,size", [1, 2, 33], [1, 3], [1.0, 100.0])
def test_joined_parts_are_the_whole(new: int, group: int, size: float) -> None:
    """Keys before the queries in two parts, and those of the queries themselves; also where one part has all weight."""
    q = drawn(0, 2, HEADS, group, new, DIM) * size
    keys = drawn(1, 2, HEADS, 20 + new, DIM)
    values = drawn(2, 2, HEADS, 20 + new, DIM)
    found = attend_causal(q, keys[:, :, 20:], values[:, :, 20:], TRANSFORM.scale)
    for columns in (slice(13), slice(13, 20)):
        found = found.joined(attend_part(q, keys[:, :, columns], values[:, :, columns], TRANSFORM.scale))
    score = q.double() @ keys.double()[:, :, None].mT * TRANSFORM.scale
    score.masked_fill_(torch.ones(new, 20 + new, dtype=torch.bool).triu(21), -torch.inf)
    want = score.softmax(-1) @ values.double()[:, :, None]
    torch.testing.assert_close(found.output.double(), want, atol=1e-6 * size + 1e-6, rtol=1e-5)
    torch.testing.assert_close(found.normalizer.double(), score.logsumexp(-1), atol=1e-5, rtol=1e-6)


def test_a_part_of_no_keys() -> None:
    """The fused function ends the process if it gets none."""
    q = drawn(0, 1, HEADS, 1, 3, DIM)
    none = drawn(1, 1, HEADS, 0, DIM)
    assert attend_part(q, none, none, 1.0) is None


def test_what_has_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    t = drawn(0, 1, HEADS, 3, DIM)
    assert has_parts(t, t, t, TRANSFORM)
    assert not has_parts(t.bfloat16(), t.bfloat16(), t.bfloat16(), TRANSFORM)
    assert not has_parts(t, t, t.half(), TRANSFORM)
    assert not has_parts(t, t, t[..., :4], TRANSFORM)
    assert not has_parts(t, t, t, ScoreTransform(1.0, softcap=3.0))
    assert not has_parts(t, t, t, ScoreTransform(1.0, sinks=torch.zeros(HEADS)))
    meta = t.to("meta")
    assert not has_parts(meta, meta, meta, TRANSFORM)
    monkeypatch.setattr(partial_attention, "_FUSED", None)
    assert not has_parts(t, t, t, TRANSFORM)


@product("softcap,occupancy,counted", [None, 1.5], [None, [True] * 6 + [False] * 3], [False, True])
def test_attention_to_occupied_slots(softcap: float | None, occupancy: list[bool] | None, counted: bool) -> None:
    """With the normalizer, against fp64; by the fused function where nothing is masked, counted or capped."""
    q = drawn(0, 1, HEADS, 5, DIM)
    keys = drawn(1, 1, HEADS, 9, DIM)
    values = drawn(2, 1, HEADS, 9, DIM)
    counts = drawn(3, 1, HEADS, 9).abs() if counted else None
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
