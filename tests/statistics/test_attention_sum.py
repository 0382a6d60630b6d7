"""Sums of attention over the chunks of a prompt."""

from __future__ import annotations

import torch

from kvpolicy.statistics.attention_sum import AttentionSum
from kvpolicy.statistics.windows import ScoreTransform
from tests.engine.parts import candidates_of


def test_sums_of_chunks_are_added_column_by_column() -> None:
    first = torch.rand(2, 4, 3)
    second = torch.rand(2, 4, 7)
    joined = AttentionSum(first).joined(AttentionSum(second), 3)
    assert joined.total is not None
    assert torch.equal(joined.total[..., 3:], second[..., 3:])
    assert torch.equal(joined.total[..., :3], second[..., :3] + first)
    candidates = candidates_of(torch.zeros(2, 2, 7, 4), None, ScoreTransform(1.0))
    assert joined.reduced(candidates) is joined.total
    assert not joined.reads_past and [*joined.tensors] == [joined.total]


def test_nothing_is_known_before_attention() -> None:
    assert AttentionSum().joined(AttentionSum(), 3) == AttentionSum()
    assert not [*AttentionSum().tensors] and AttentionSum().map_rows(torch.clone) == AttentionSum()
