"""One slot of fp16 or bf16 that stands for more tokens than these can count one by one: 2,048, and 256."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvpolicy import D2O, Compensate, CountedMerge, KeepKV, KVMerger, ZSMerge
from kvpolicy.protocols import Candidates, Tokens

COUNT = 3000
MERGERS = [CountedMerge(least=-1), Compensate(), D2O(), ZSMerge(), KVMerger(), KeepKV(window=1)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("merger", MERGERS)
def test_a_prompt_of_which_two_tokens_stay(merger: Any, dtype: torch.dtype) -> None:
    """Each of the evicted tokens counts in the mean as much as any other; the newest token stays itself."""
    keys = torch.tensor([1.0, 0.5]).to(dtype).repeat(1, 1, COUNT + 2, 1)
    keys[:, :, -1] = -keys[:, :, -1]
    values = (torch.arange(COUNT + 2) % 4 * 0.25 + 1).to(dtype)[None, None, :, None].repeat(1, 1, 1, 2)
    positions = torch.arange(COUNT + 2, dtype=torch.int32)[None, None]
    kept = (positions == 0) | (positions == COUNT + 1)
    targets = torch.tensor([[[0, COUNT + 1]]])
    given = Candidates(keys, values, positions, kept, targets, torch.ones_like(targets, dtype=torch.bool))
    given = given._replace(
        counts=torch.zeros(1, 1, COUNT + 2), length=torch.tensor([COUNT + 2]), priority=positions.float()
    )
    given = given._replace(attention=torch.full((1, 1, 1, COUNT + 2), 0.1))
    merged = merger.merge_prompt(merger.alloc(1, 1, "cpu"), given)
    want = values[0, 0, :-1].double().mean(0)
    torch.testing.assert_close(merged.values[0, 0, 0].double(), want, rtol=torch.finfo(dtype).eps, atol=0)
    assert torch.equal(merged.values[0, 0, 1], values[0, 0, -1])
    if merged.counts is not None:
        torch.testing.assert_close(merged.counts[0, 0, 0].item(), math.log(COUNT + 1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("merger", [CountedMerge(least=-1), Compensate(), ZSMerge(), KeepKV()])
def test_a_victim_that_stands_for_many(merger: Any) -> None:
    """3,000 tokens are merged into a slot of 5,000: the mean is not that of what fp16 holds of the sums."""

    def one(value: float, place: int, count: int) -> Tokens:
        vector = torch.full((1, 1, 1, 2), value, dtype=torch.float16)
        there = torch.ones(1, 1, 1, dtype=torch.bool)
        log_count = torch.tensor([[[float(count)]]]).log()
        return Tokens(vector, vector, torch.tensor([[[place]]]), log_count, there, torch.zeros(1, 1, 1))

    merge = merger.merge_token(merger.alloc(1, 1, "cpu"), one(1.0, 9, COUNT), one(2.0, 3, 5000))
    assert merge.values.flatten().tolist() == pytest.approx([13 / 8] * 2, rel=1e-5)
    assert merge.counts.item() == pytest.approx(math.log(8000), abs=1e-5)
