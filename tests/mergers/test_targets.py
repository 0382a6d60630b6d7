"""The slot that a victim would be merged into: cosines in every dtype, and limits that hold with equality."""

from __future__ import annotations

import pytest
import torch

from kvpolicy import CountedMerge
from kvpolicy.kernels.products import products
from kvpolicy.mergers import common
from kvpolicy.mergers.common import target_of
from tests.mergers.cases import candidates, held, merged


@pytest.mark.parametrize("by", ["keys", "position"])
@pytest.mark.parametrize("length", [1e-3, 1.0, 60.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_length_of_keys_means_nothing(dtype: torch.dtype, length: float, by: str) -> None:
    """Also where a product of two keys, or the sum of their squares, is beyond the range of fp16."""
    generator = torch.Generator().manual_seed(0)
    keys = (torch.randn(9, 64, generator=generator) * length).to(dtype)
    slots = held(keys[:8], [3, 9, 4, 7, 1, 0, 12, 11])
    victim = held(keys[8:], [8])
    want = torch.cosine_similarity(keys[8:].double(), keys[:8].double(), dim=-1)
    slot, cosine = target_of(victim, slots, by)
    assert slot.item() == (int(want.argmax()) if by == "keys" else 3), "of positions 7 and 9, the earlier"
    torch.testing.assert_close(cosine.double().flatten(), want[slot.flatten()], atol=1e-5, rtol=0)


def test_the_length_of_keys_means_nothing_where_products_are_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the product of two of these keys is beyond the range."""
    monkeypatch.setattr(common, "thin_products", lambda queries, keys: products(queries.to(keys.dtype), keys))
    keys = torch.tensor([[3000.0, -2900.0], [3000.0, 3000.0], [3100.0, 3000.0]]).half()
    slot, cosine = target_of(held(keys[2:], [8]), held(keys[:2], [3, 9]), "keys")
    assert slot.item() == 1 and 0.99 < cosine.item() < 1.01


@pytest.mark.parametrize("least", [0.0, 1e-6])
def test_the_smallest_cosine_itself_is_similar_enough(least: float) -> None:
    """Keys at a right angle, at a threshold of 0 and just above."""
    merger = CountedMerge(least=least)
    keys = torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    merge = merger.merge_token((), held(keys[1:], [1]), held(keys[:1], [0]))
    assert merge.write_mask.item() is (least == 0)
    result = merged(merger, candidates(keys, keys, [0]))
    assert result.counts is not None and bool(result.counts.any()) is (least == 0)
