"""Sums of vectors where they lie are products with a copy of them."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.kernels.row_sums import row_sums, sums_in_place


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("count", [1, 5, 9])
def test_sums_are_products_with_the_chosen_vectors(rows: int, count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(2, 3, 9, 4, generator=generator)
    slots = torch.randint(0, 9, (2, 3, count), generator=generator)
    weights = torch.rand(2, 3, rows, count, generator=generator)
    copied = vectors.gather(2, slots[..., None].expand(-1, -1, -1, 4))
    assert torch.allclose(row_sums(weights, vectors, slots), weights @ copied, atol=1e-6)


def test_few_rows_of_fp32_are_summed_in_place() -> None:
    vectors = torch.zeros(1, 1, 2, 2)
    assert sums_in_place(4, vectors)
    assert not sums_in_place(5, vectors)
    assert not sums_in_place(1, vectors.bfloat16())
    assert not sums_in_place(1, vectors.to("meta"))
