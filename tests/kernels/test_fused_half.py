"""Products with vectors of fp16 that are read as pairs."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.kernels.fused_half import HALVES, as_pairs, mix_half, score_half
from kvpolicy.kernels.words import in_order_of_channels, in_order_of_places


def every_number() -> torch.Tensor:
    """All finite numbers of fp16, [1, 1, 992, 64]."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    return numbers[numbers.isfinite()].reshape(1, 1, -1, 64)


def test_every_number_is_converted_exactly() -> None:
    vectors = every_number()
    pairs = as_pairs(vectors)
    assert pairs.dtype == torch.float32 and pairs.shape == (1, 1, 992, 32)
    queries = torch.eye(64)[None, None]
    found = score_half(pairs, in_order_of_places(queries, pairs, HALVES))[0, 0].mT
    assert torch.equal(found, vectors[0, 0].float())


@pytest.mark.parametrize("width", [2, 6, 7])
def test_products(width: int) -> None:
    vectors = torch.randn(2, 3, 40, width, generator=torch.Generator().manual_seed(width)).half()
    pairs = as_pairs(vectors)
    assert (pairs.dtype == torch.float32) == (width % 2 == 0)
    queries, weights = torch.randn(2, 3, 4, width), torch.rand(2, 3, 4, 40)
    torch.testing.assert_close(
        score_half(pairs, in_order_of_places(queries, pairs, HALVES)), queries @ vectors.float().mT
    )
    mixed = in_order_of_channels(mix_half(pairs, weights), pairs, HALVES)
    torch.testing.assert_close(mixed, weights @ vectors.float())


def test_vectors_that_do_not_begin_at_pairs_stay_as_they_are() -> None:
    vectors = torch.zeros(1, 1, 4, 7, dtype=torch.float16)[..., :6]
    assert as_pairs(vectors) is vectors
