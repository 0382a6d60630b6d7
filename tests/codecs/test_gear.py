"""GEAR against its equations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpolicy.codecs.gear import GEAR, basis, orthonormal
from kvpolicy.codecs.outliers import extremes, fill
from tests.codecs import stages
from tests.codecs.stages import B, H, at, copy, draw, empty, flags, read

C = 24
D = 20
N = 8
ALL = flags([True] * C)


def made(bits: Any = 2, **fields: Any) -> GEAR:
    return GEAR(bits=bits, **{"group_size": N, **fields})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("count", [3, 7, 60])
def test_what_stands_in_for_outliers_widens_no_range(count: int) -> None:
    """The mean of equal elements is each of them, however their sum is rounded."""
    x = torch.randn(100, 1, generator=torch.Generator().manual_seed(0)).expand(-1, count + 1).clone()
    x[:, 2] = 1e4
    assert torch.equal(fill(x, x < 1e4, -1), x[:, :1].expand_as(x))


def test_nearly_dependent_rows_become_orthogonal() -> None:
    """A single pass leaves the rounding error of a row, 1e-7, beside what remains of it, 1e-4."""
    row, *others = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).unbind()
    found = torch.stack(orthonormal([row, *(row + 1e-4 * other for other in others)]))
    torch.testing.assert_close(found @ found.T, torch.eye(4), atol=1e-6, rtol=0)


def test_a_low_rank_error_is_found() -> None:
    generator = torch.Generator().manual_seed(1)
    parts = torch.randn(B, H, 3, 16, 2, generator=generator) @ torch.randn(B, H, 3, 2, 12, generator=generator)
    rows = basis(parts, 2)
    torch.testing.assert_close(rows @ rows.mT, torch.eye(2).expand(B, H, 3, 2, 2), atol=1e-5, rtol=0)
    torch.testing.assert_close(parts @ rows.mT @ rows, parts, atol=1e-4, rtol=1e-4)
    third = basis(parts, 3)[..., 2, :]
    assert ((third.norm(dim=-1) - 1).abs().minimum(third.norm(dim=-1)) < 1e-5).all(), "of length one, or nothing"
    assert not basis(torch.zeros_like(parts), 2).any()
    same = torch.ones(5)
    assert not orthonormal([same, same * 1e20])[1].any()


def test_outliers_are_distinct_and_the_earlier_of_equal_ones() -> None:
    assert extremes(torch.tensor([5.0, 5, 1, 1, 1, 5]), 2, -1).tolist() == [0, 1, 2, 3]
    few = extremes(torch.tensor([5.0, 4, 3, 2]), 2, -1, torch.tensor([False, True, False, False]))
    assert sorted(few.tolist()) == [0, 1, 2, 3] and few[0] == 1
    third = torch.full((7,), 0.1)
    assert torch.equal(fill(third, torch.arange(7) > 0, -1), third), "rounding of a mean widens no range"
    assert not fill(third, third > 1, -1).any()


def test_an_error_beyond_the_range_of_the_coefficients() -> None:
    """Of the largest key in a block that was fitted to small ones, along a row of its basis."""
    codec = made(2, sparse=0.0)
    store, _, values = stages.fill(codec, C, D)
    occupied = ALL.clone()
    occupied[:, :, 10] = False
    huge = 65504 * store.codes.key_right[:, :, 1, 0].float().sign()[:, :, None]
    codec.write(store, huge, values[:, :, :1], at([10]), flags([True]), occupied)
    assert bool((store.codes.key_left[:, :, 10].abs() == 65504).any())
    assert all(bool(part.isfinite().all()) for part in read(codec, store, C))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_it_compiles_to_kernels() -> None:
    codec = made(4)
    eager = empty(made(4), C, D)
    compiled = copy(eager)
    keys, values = draw(C, D)
    given = (keys, values, at(range(C)), ALL, ~ALL)
    codec.write(eager, *given)
    torch.compile(codec.write, fullgraph=True)(compiled, *given)
    for name in ("keys", "key_scale", "key_zero", "key_places", "key_outliers", "values", "value_places"):
        assert torch.equal(getattr(eager.codes, name), getattr(compiled.codes, name)), name
    got = torch.compile(lambda store: read(codec, store, C), fullgraph=True)(compiled)
    for one, other in zip(got, read(codec, eager, C), strict=True):  # sums of errors are rounded in another order
        torch.testing.assert_close(one, other, atol=2e-3, rtol=1e-3)
