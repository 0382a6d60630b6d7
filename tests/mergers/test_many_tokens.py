"""One slot of fp16 or bf16 that stands for more tokens than these can count one by one: 2,048, and 256."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvpolicy import D2O, Compensate, CountedMerge, KeepKV, KVMerger, ZSMerge
from tests.mergers.cases import candidates, held, merged

COUNT = 3000
MERGERS = [CountedMerge(least=-1), Compensate(), D2O(), ZSMerge(), KVMerger(), KeepKV(window=1)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("merger", MERGERS)
def test_a_prompt_of_which_two_tokens_stay(merger: Any, dtype: torch.dtype) -> None:
    """Each of the evicted tokens counts in the mean as much as any other; the newest token stays itself."""
    keys = torch.tensor([1.0, 0.5]).to(dtype).repeat(COUNT + 2, 1)
    keys[-1] = -keys[-1]
    values = (torch.arange(COUNT + 2) % 4 * 0.25 + 1).to(dtype)[:, None].repeat(1, 2)
    given = candidates(keys, values, [0, COUNT + 1], priority=[*map(float, range(COUNT + 2))])
    result = merged(merger, given)
    want = values[:-1].double().mean(0)
    torch.testing.assert_close(result.values[0, 0, 0].double(), want, rtol=torch.finfo(dtype).eps, atol=0)
    assert torch.equal(result.values[0, 0, 1], values[-1])
    if result.counts is not None:
        torch.testing.assert_close(result.counts[0, 0, 0].item(), math.log(COUNT + 1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("merger", [CountedMerge(least=-1), Compensate(), ZSMerge(), KeepKV()])
def test_a_victim_that_stands_for_many(merger: Any) -> None:
    """3,000 tokens are merged into a slot of 5,000: the mean is not that of what fp16 holds of the sums."""

    slot, victim = (
        held(torch.full((1, 2), value, dtype=torch.float16), [place], numbers=[count])
        for value, place, count in ((2.0, 3, 5000.0), (1.0, 9, float(COUNT)))
    )
    slot = slot._replace(priority=torch.zeros(1, 1, 1))
    merge = merger.merge_token(merger.alloc(1, 1, "cpu"), victim, slot)
    assert merge.values.flatten().tolist() == pytest.approx([13 / 8] * 2, rel=1e-5)
    assert merge.counts.item() == pytest.approx(math.log(8000), abs=1e-5)
