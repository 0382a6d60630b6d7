"""Products with vectors of fp16 by compiled loops."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.kernels.fused_elements import is_read_whole, mix_half, score_half


@pytest.mark.parametrize("width", [2, 6, 7])
def test_products(width: int) -> None:
    vectors = torch.randn(2, 3, 40, width, generator=torch.Generator().manual_seed(width)).half()
    queries = torch.randn(2, 3, 4, width)
    weights = torch.rand(2, 3, 4, 40)
    torch.testing.assert_close(score_half(vectors, queries), queries @ vectors.float().mT)
    torch.testing.assert_close(mix_half(vectors, weights), weights @ vectors.float())


def test_every_number_is_converted_exactly() -> None:
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    vectors = numbers[numbers.isfinite()].reshape(1, 1, -1, 64)
    assert torch.equal(score_half(vectors, torch.eye(64)[None, None])[0, 0].mT, vectors[0, 0].float())


def test_a_cpu_converts_some_vectors_at_a_time() -> None:
    """However many there are."""
    assert not is_read_whole(torch.empty(1, 1, 100_000, 2, dtype=torch.float16))
