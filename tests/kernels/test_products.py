"""Products of half precision are exact enough, and compiled code computes the same by other means."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpolicy.kernels.products import lengths, matmul, products, scaled_products, thin_products
from kvpolicy.kernels.row_sums import row_sums, sums_in_place


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_compiled_products(rows: int, dtype: torch.dtype) -> None:
    torch.compiler.reset()
    queries = torch.randn(2, 3, rows, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    keys = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(1)).to(dtype)

    def both(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        return products(queries, keys), matmul(queries, keys.mT)

    got = torch.compile(both, backend="eager", fullgraph=True)(queries, keys)
    for one, other in zip(got, both(queries, keys), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group", [1, 3])
def test_scaled_products(group: int, dtype: torch.dtype) -> None:
    """Also of keys that lie apart, that several queries share, or of which there are none."""
    queries = torch.randn(2, 3, group, 4, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    stored = torch.randn(2, 9, 3, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    for count in (9, 5, 0):
        keys = stored[:, :count].transpose(1, 2)
        for one, other in ((queries, keys[:, :, None]), (queries[:, :, 0], keys)):
            got = scaled_products(one, other, 0.3)
            assert got.dtype == torch.float32
            expected = 0.3 * (one.double() @ other.double().mT)
            near = 1e-5 if dtype == torch.float32 else 0.02
            torch.testing.assert_close(got.double(), expected, rtol=near, atol=near)


def test_one_row_is_no_sum_in_compiled_code() -> None:
    """A multiplication and a sum would walk through the matrix once for each vector of columns."""
    torch.compiler.reset()
    names: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch.compile(matmul, backend=backend)(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 4, 3))
    assert any("baddbmm" in name for name in names)


def test_products_of_fp16_may_exceed_its_range() -> None:
    queries = torch.tensor([[128.0, -128.0, 128.0, 128.0]]).half()
    keys = torch.tensor([[512.0, -512.0, 512.0, 512.0], [-512.0, 512.0, -512.0, 512.0]]).half()
    assert products(queries, keys).tolist() == [[262_144.0, -131_072.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_queries_are_not_rounded_to_the_dtype_of_an_index_on_a_cpu(dtype: torch.dtype) -> None:
    queries = torch.tensor([[1.0, 2.0**-13]])
    keys = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=dtype)
    assert thin_products(queries, keys).tolist() == [[1 + 2.0**-13, 1 - 2.0**-13]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_lengths_are_fp32_whatever_the_vectors_are(dtype: torch.dtype) -> None:
    """Squares beyond the range of fp16 too, and a length between two numbers of bf16."""
    assert lengths(torch.tensor([[255.0, 32.0], [0.0, 0.0]], dtype=dtype)).tolist() == [257.0, 0.0]
    assert lengths(torch.ones(1, dtype=dtype)).dtype == torch.float32


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
