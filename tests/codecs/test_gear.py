"""GEAR against its equations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy.codecs import gear as gear_module
from kvpolicy.codecs.gear import GEAR, basis, orthonormal
from kvpolicy.codecs.kivi import KIVI
from kvpolicy.codecs.outliers import extremes, fill
from kvpolicy.protocols import ModelInfo, StageStore
from tests.codecs import stages
from tests.codecs.stages import B, H, at, copy, draw, empty, error, flags, read

C = 24
D = 20
N = 8
ALL = flags([True] * C)


def made(bits: Any = 2, **fields: Any) -> GEAR:
    return GEAR(bits=bits, **{"group_size": N, **fields})  # pyright: ignore[reportArgumentType]


def quantized(x: Tensor, bits: int) -> Tensor:
    """A group of numbers, quantized and back."""
    zero = x.min().half().float()
    scale = ((x.max() - x.min()) / (2**bits - 1)).half().float()
    return zero.expand_as(x) if scale == 0 else ((x - zero) / scale).round().clamp(0, 2**bits - 1) * scale + zero


def apart(x: Tensor, each: int) -> tuple[Tensor, Tensor]:
    """Where a vector's outliers are, and the vector with the mean of the others in their place."""
    order = x.argsort()
    out = torch.zeros_like(x, dtype=torch.bool)
    out[order[:each]] = out[order[len(x) - each :]] = True
    return out, torch.where(out, x[~out].mean(), x)


def formula(x: Tensor, bits: int, rank: int, each: int, width: int | None) -> Tensor:
    """A block [n, D] by the equations: by channel, or by token in groups of `width` channels."""
    lines = x.T if width is None else x
    out, rest = (torch.stack(some) for some in zip(*(apart(line, each) for line in lines), strict=True))
    step = lines.shape[1] if width is None else width
    coded = torch.stack([torch.cat([quantized(part, bits) for part in line.split(step)]) for line in rest])
    missing = (rest - coded).masked_fill(out, 0)
    u, s, v = torch.linalg.svd(missing, full_matrices=False)
    read_ = torch.where(out, lines.half().float(), coded + (u[:, :rank] * s[:rank]) @ v[:rank])
    return read_.T if width is None else read_


def fill_(codec: GEAR, *, dim: int = D, slots: int = C) -> tuple[StageStore, Tensor, Tensor]:
    return stages.fill(codec, slots, dim)


def test_with_only_the_backbone_it_is_kivi() -> None:
    codec = made(4, rank=0, sparse=0.0)
    kivi = KIVI(bits=4, group_size=N)
    for got, want in zip(read(codec, fill_(codec)[0], C), read(kivi, stages.fill(kivi, C, D)[0], C), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(("loops", "gap"), [(gear_module.ITERATIONS, 0.2), (60, 0.01)])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_the_low_rank_is_nearly_the_best(rank: int, loops: int, gap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gear_module, "ITERATIONS", loops)
    codec = made(2, rank=rank, sparse=0.02)
    store, keys, values = fill_(codec)
    for got, x, width in zip(read(codec, store, C), (keys, values), (None, 5), strict=True):
        missed = best = none = 0.0
        for b in range(B):
            for h in range(H):
                some = x[b, h, :N]
                missed += float((got[b, h, :N] - some).square().sum())
                best += float((formula(some, 2, rank, 1, width) - some).square().sum())
                none += float((formula(some, 2, 0, 1, width) - some).square().sum())
        assert best * 0.999 <= missed < best + gap * (none - best)


def test_each_part_lowers_the_error() -> None:
    parts = ({"rank": 0, "sparse": 0.0}, {"sparse": 0.0}, {"rank": 2}, {"rank": 8})
    for side in (0, 1):
        errors: list[float] = []
        for fields in parts:
            codec = GEAR(group_size=64, **fields)  # pyright: ignore[reportArgumentType]
            store, *x = fill_(codec, dim=64, slots=128)
            errors.append(error(read(codec, store, 128)[side], x[side]))
        assert errors == sorted(errors, reverse=True)


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


def test_outliers_are_exact() -> None:
    codec = made(2, sparse=0.02)
    store = empty(codec, C, D)
    keys, values = draw(C, D)
    keys[:, :, 3, 7] = 1e4
    keys[:, :, 5, 7] = -1e4
    values[:, :, 4, 2] = 300.0
    values[:, :, 4, 3] = -300.0
    codec.write(store, keys, values, at(range(C)), ALL, ~ALL)
    got_keys, got_values = read(codec, store, C)
    assert got_keys[0, 0, [3, 5], 7].tolist() == [1e4, -1e4] and got_values[0, 0, 4, [2, 3]].tolist() == [300, -300]
    assert (got_keys - keys).abs().max() < 100 and (got_values - values).abs().max() < 3


def test_a_block_with_an_occupied_slot_keeps_its_scales() -> None:
    codec = made(4, sparse=0.3)
    store, _, _ = fill_(codec)
    before = copy(store)
    keys, values = draw(1, D, seed=1)
    keys *= 3
    occupied = ALL.clone()
    occupied[:, :, 8:15] = False  # slot 15 stays occupied
    codec.write(store, keys, values, at([10]), flags([True]), occupied)
    codes = store.codes
    old = before.codes
    for name in ("key_scale", "key_zero", "key_places", "key_right", "value_right"):
        assert torch.equal(getattr(codes, name), getattr(old, name)), name
    scale = old.key_scale[:, :, 1].float()
    zero = old.key_zero[:, :, 1].float()
    mine = old.key_places[:, :, 1] == 2  # [B, H, k, D]
    key = keys[:, :, 0]
    is_mine = mine.any(2)
    coded = ((key - zero) / scale).round().clamp(0, 15) * scale + zero
    rows = old.key_right[:, :, 1].float()
    missed = (key - coded).masked_fill(is_mine, 0)
    low = (missed[:, :, None] @ rows.mT) @ rows
    want = torch.where(is_mine, key.half().float(), coded + low[:, :, 0])
    got_keys, got_values = read(codec, store, C)
    torch.testing.assert_close(got_keys[:, :, 10], want, atol=0.02, rtol=2e-3)
    assert is_mine.any() and not is_mine.all()
    others = [slot for slot in range(C) if slot != 10]
    for now, then in zip((got_keys, got_values), read(codec, before, C), strict=True):
        assert torch.equal(now[:, :, others], then[:, :, others])
    assert (got_values[:, :, 10] - values[:, :, 0]).abs().max() < 0.2


def test_an_error_beyond_the_range_of_the_coefficients() -> None:
    """Of the largest key in a block that was fitted to small ones, along a row of its basis."""
    codec = made(2, sparse=0.0)
    store, _, values = fill_(codec)
    occupied = ALL.clone()
    occupied[:, :, 10] = False
    huge = 65504 * store.codes.key_right[:, :, 1, 0].float().sign()[:, :, None]
    codec.write(store, huge, values[:, :, :1], at([10]), flags([True]), occupied)
    assert bool((store.codes.key_left[:, :, 10].abs() == 65504).any())
    assert all(bool(part.isfinite().all()) for part in read(codec, store, C))


def test_a_group_of_equal_numbers_is_exact() -> None:
    for fields in ({}, {"sparse": 0.0}, {"rank": 0}):
        codec = made(2, **fields)
        store = empty(codec, C, D)
        x = torch.full((B, H, C, D), -3.25)
        codec.write(store, x, x, at(range(C)), ALL, ~ALL)
        assert all(torch.equal(got, x) for got in read(codec, store, C))


def test_the_rank_must_fit_the_head() -> None:
    GEAR(rank=8).check(ModelInfo(1, 1, 8))
    with pytest.raises(ValueError, match=r"GEAR\.rank must be at most the head dimension, 8, got"):
        GEAR(rank=9).check(ModelInfo(1, 1, 8))


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
