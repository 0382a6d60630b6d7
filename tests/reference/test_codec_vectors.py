"""The reference codecs against numbers that are known: errors on white noise, levels, sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from . import scalars
from .codecs import bfp, csr, kvquant, mikv, rotate, tokenwise, turboquant, zipcache
from .drawn import D, channels, nmse, noise, reads, share

# ---- Rounding


def test_fp16_and_fp8() -> None:
    xs = [*(torch.randn(500) * 10.0 ** torch.randint(-9, 7, (500,)).float()).tolist(), 0.0, -0.0, 2**-10, 3 * 2**-10]
    for x in xs:
        t = torch.tensor(x)
        assert float(scalars.half(x)) == t.clamp(-65504, 65504).half().item()
        assert scalars.e4m3(x) == t.clamp(-448, 448).to(torch.float8_e4m3fn).float().item()


# ---- Tokenwise: what was measured of keys with offsets and of white noise


@pytest.mark.parametrize(("bits", "group", "error"), [(3, 128, 0.0458), (2, 32, 0.154)])
def test_error_of_normalized_keys(bits: int, group: int, error: float) -> None:
    keys = channels(200)
    read, _ = reads(tokenwise.Head({"bits": bits, "group_size": group}, D), keys, keys)
    assert nmse(read, keys) == pytest.approx(error, rel=0.05)


@pytest.mark.parametrize(("bits", "error"), [(2, 0.155), (4, 0.0061)])
def test_error_of_values_in_groups_of_32(bits: int, error: float) -> None:
    values = noise(100)
    _, read = reads(tokenwise.Head({"bits": bits, "group_size": 32}, D), values, values)
    assert share(read, values) == pytest.approx(error, rel=0.05)


def test_without_a_normalizer_offsets_cost_all() -> None:
    keys = channels(50)
    with_it, _ = reads(tokenwise.Head({"bits": 2}, D), keys, keys)
    without, _ = reads(tokenwise.Head({"bits": 2, "normalize": False}, D), keys, keys)
    assert nmse(without, keys) > 3 > 10 * nmse(with_it, keys)


def test_fp8_errs_by_a_sixteenth_at_most() -> None:
    values = noise(20)
    _, read = reads(tokenwise.Head({"bits": "fp8"}, D), values, values)
    for x, y in zip(torch.stack(values).flatten(), torch.stack(read).flatten(), strict=True):
        assert abs(x - y) <= abs(x) / 16 * 1.001 + 1e-4


# ---- Block floating point


def test_mantissas_of_a_block() -> None:
    xs = [np.float32(x) for x in (7.9, -7.9, 6.5, 5.5, 0.5, 0.51, 0.0, -1.0)]
    codes, read = bfp.blocks(xs, 8, 4)  # the largest is 1.975 * 2^2, so a step is 1
    assert codes == [7, -7, 6, 6, 0, 1, 0, -1]
    assert read == codes


@pytest.mark.parametrize(("size", "bits"), [(32, 4.25), (64, 4.125), (128, 4.0625)])
def test_bits_of_block_floating_point(size: int, bits: float) -> None:
    codes, _ = bfp.blocks(scalars.scalars(noise(1)[0]), size, 4)
    assert (4 * len(codes) + 8 * D / size) / D == bits


def test_sorting_helps_small_blocks_only() -> None:
    spread = torch.tensor([10.0 ** (c % 4) for c in range(D)])
    keys = [x * spread for x in noise(20)]

    def errors(size: int) -> tuple[float, float]:
        """With and without sorting."""
        head = bfp.Head({"block_channels": size}, D)
        head.fit(keys, keys)
        coded = [head.code(key, key)[1:] for key in keys]
        return nmse([key for key, _ in coded], keys), nmse([value for _, value in coded], keys)

    with_it, without = errors(32)
    assert 10 * with_it < without
    assert errors(128)[0] == errors(128)[1]


# ---- MiKV, ZipCache


def test_the_balancer_evens_peaks() -> None:
    keys = [x * torch.linspace(0.1, 30, D) for x in noise(40)]
    query_absmax = torch.linspace(5, 0.5, D)
    head = mikv.Head({"bits": 4}, D, query_absmax.tolist())
    head.fit(keys, keys)
    balance = scalars.vector(head.balance)
    largest = torch.stack(keys).abs().amax(0)
    torch.testing.assert_close(largest * balance, query_absmax / balance, rtol=2e-3, atol=0)
    queries = torch.stack(noise(40, seed=3)) * query_absmax / 3

    def error(read: list[Tensor]) -> float:
        return float(((torch.stack(read) - torch.stack(keys)) @ queries.T).square().mean())

    plain = tokenwise.Head({"bits": 4, "normalize": False}, D)
    assert error(reads(head, keys, keys)[0]) < error(reads(plain, keys, keys)[0])


def test_zipcache_evens_outlier_channels_but_not_offsets() -> None:
    spread = torch.ones(D)
    spread[5] = 100
    keys = [x * spread for x in noise(40)]
    plain = tokenwise.Head({"bits": 4, "normalize": False}, D)
    assert (
        nmse(reads(zipcache.Head({"bits": 4}, D), keys, keys)[0], keys) < nmse(reads(plain, keys, keys)[0], keys) / 10
    )
    keys = channels(60)
    normal = nmse(reads(tokenwise.Head({"bits": 4}, D), keys, keys)[0], keys)
    assert nmse(reads(zipcache.Head({"bits": 4}, D), keys, keys)[0], keys) > 1.5 * normal


def test_what_is_zero_is_divided_by_one() -> None:
    zero = [torch.zeros(8)] * 3
    for head in (zipcache.Head({}, 8), mikv.Head({}, 8, [1.0] * 8), mikv.Head({}, 8, [0.0] * 8)):
        assert not any(x.any() for side in reads(head, zero, zero) for x in side)
    assert zipcache.roots([torch.tensor([0.0, 4.0]), torch.tensor([0.0, -9.0])]) == [1, 3]


# ---- Rotations


@pytest.mark.parametrize("dim", [1, 5, 8, 32, 80, 96, 128])
def test_the_mixing_is_orthonormal(dim: int) -> None:
    matrix = np.array(rotate.mixing(dim))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(dim), atol=1e-12)


def test_hadamard_and_cosines() -> None:
    torch.testing.assert_close(
        torch.tensor(rotate.hadamard(4)) * 2,
        torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1.0]]),
    )
    first = [row[0] for row in rotate.cosines(5)]
    assert first == pytest.approx([1 / math.sqrt(5)] * 5)


def test_rotation_spreads_outliers() -> None:
    spread = torch.ones(D)
    spread[[3, 70]] = 40
    keys = [x * spread for x in noise(20)]
    read, _ = reads(rotate.Head({"bits": 2}, D), keys, keys)
    plain = [scalars.vector(rotate.integer_zero(scalars.scalars(key), 2)[1]) for key in keys]
    assert share(read, keys) < 0.35
    others = [c for c in range(D) if c not in (3, 70)]
    assert float(torch.stack(plain)[:, others].count_nonzero()) < 0.05 * 20 * D, "unrotated, small channels vanish"


@pytest.mark.parametrize(
    ("bits", "half_of_levels", "error"),
    [
        (2, [0.4528, 1.510], 0.1175),
        (3, [0.2451, 0.7560, 1.344, 2.152], 0.03454),
        (4, [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733], 0.009497),
    ],
)
def test_the_levels_of_max(bits: int, half_of_levels: list[float], error: float) -> None:
    """Against Table I of Max (1960)."""
    levels = turboquant.lloyd_max(bits)
    assert levels[2 ** (bits - 1) :] == pytest.approx(half_of_levels, rel=6e-4)
    assert levels == pytest.approx([-x for x in reversed(levels)])
    keys = [x * 7 for x in noise(60)]
    signs = [(-1.0) ** (c * c % 5) for c in range(D)]
    read, _ = reads(turboquant.Head({"bits": bits}, D, signs), keys, keys)
    assert share(read, keys) == pytest.approx(error, rel=0.06)


# ---- KVQuant


def test_outliers_stay_and_the_rest_takes_the_nearest_level() -> None:
    levels = [-1.0, -0.25, 0.25, 1.0]
    config: dict[str, Any] = {"bits": 2, "outliers": 0.25}
    head = kvquant.Head(config, 8, [1.0] * 8, [2.0] * 8, levels, levels)
    assert head.outliers == 2
    key = torch.tensor([1.0, 2.4, 30.123, -0.9, 1.5, 3.5, 1.6, -9.0])
    _, read, value = head.code(key, torch.tensor([0.0, 1, 2, 3, 4, 100, -50, 1.5]))
    inner = [0.5, 3.0, 30.123, -1.0, 1.5, 3.0, 1.5, -9.0]  # 1.0 is in the middle of two levels, and takes the lower
    torch.testing.assert_close(read, torch.tensor(inner), rtol=5e-4, atol=0)
    torch.testing.assert_close(value, torch.tensor([0.0, 1.5, 1.5, 2.5, 4, 100, -50, 1.5]))


def test_the_norm_of_levels() -> None:
    levels = [-1.0, 1.0]
    head = kvquant.Head({"bits": 1, "outliers": 0}, 2, [0.0] * 2, [1.0] * 2, levels, levels, (0.5, 0.25), (2.0, 0.0))
    _, key, value = head.code(torch.tensor([-3.0, 3.0]), torch.tensor([-3.0, 3.0]))
    assert key.tolist() == [-0.25, 0.75] and value.tolist() == [-6.0, 6.0]


# ---- All of them


def unit(count: int, dim: int) -> list[Tensor]:
    return [x / x.norm() for x in noise(count, dim, 5)]


MADE: dict[str, Callable[[int], Any]] = {
    "tokenwise": lambda d: tokenwise.Head({}, d),
    "bfp": lambda d: bfp.Head({}, d),
    "mikv": lambda d: mikv.Head({}, d, [1.0] * d),
    "zipcache": lambda d: zipcache.Head({}, d),
    "rotate": lambda d: rotate.Head({}, d),
    "turboquant": lambda d: turboquant.Head({}, d, [1.0] * d),
    "csr": lambda d: csr.Head({}, d, unit(8, d), unit(8, d // 2), [], []),
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("size", [0.0, 1e-6, 1e6, 1e18])
def test_whatever_is_given_what_is_read_is_finite(name: str, size: float) -> None:
    xs = [x.clamp(-1, 1) * size for x in noise(3, 16)]
    assert all(x.isfinite().all() for side in reads(MADE[name](16), xs, xs) for x in side)


# ---- Ties

LEVELS = [-0.9, -0.4, 0.0, 0.4, 0.9]
SUMMED: dict[str, Callable[[], rotate.Head | turboquant.Head | kvquant.Head]] = {
    **{f"rotate-{bits}": lambda bits=bits: rotate.Head({"bits": bits}, 32) for bits in (2, 3, 4)},
    "rotate-groups": lambda: rotate.Head({"bits": 3, "group_size": 8}, 32),
    **{f"turboquant-{bits}": lambda bits=bits: turboquant.Head({"bits": bits}, 32, [1.0] * 32) for bits in (2, 4)},
    "kvquant": lambda: kvquant.Head({"bits": 3, "outliers": 0.1}, 32, [0.2] * 32, [2.5] * 32, LEVELS, LEVELS),
}
"""Codecs that say how near to a tie they came."""


@pytest.mark.parametrize("name", SUMMED)
def test_a_change_that_is_smaller_than_the_margin_changes_no_code(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    changed = 0
    for _ in range(60):
        head = SUMMED[name]()
        key, value, step = (torch.randn(32, generator=generator) for _ in range(3))
        codes, *_ = head.code(key, value)
        if head.margin > 2e-6:  # more than fp32 rounds off
            # No channel, mixed or not, changes by more than the whole vector.
            step *= head.margin * float(key.norm()) / math.sqrt(32) / 2 / float(step.norm())
            assert head.code(key + step, value)[0]["key"] == codes["key"]
            changed += 1
    assert changed > 30


def test_ties_are_seen() -> None:
    unmix = torch.tensor(rotate.mixing(4)).T
    for larger, near in ((1.0, True), (1.0001, False)):
        head = rotate.Head({"bits": 3}, 4)
        key = torch.tensor([7 * (1 + 2.0**-11), 0.1, 1.2, 2.3]) * larger  # a scale half way between two of fp16
        head.code(key @ unmix, torch.tensor([0.3, 0.1, 0.2, 0.7]))
        assert (head.margin < 1e-7) == near
    levels = turboquant.lloyd_max(2)
    for first, near in (((levels[2] + levels[3]) / 2, True), ((levels[2] + levels[3]) / 2 + 1e-3, False)):
        head = turboquant.Head({"bits": 2}, 4, [1.0] * 4)
        key = torch.tensor([first, 0.5, 0.7, math.sqrt(4 - first**2 - 0.25 - 0.49)])
        head.code(key * 0.7 @ unmix, torch.ones(4))
        assert (head.margin < 1e-7) == near
