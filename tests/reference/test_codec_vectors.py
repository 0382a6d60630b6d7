"""The reference codecs against numbers that are known: errors on white noise, levels, sizes, and other libraries."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import orthogonal_mp
from torch import Tensor

from . import bfp, csr, gear, kvquant, mikv, rotate, scalars, tokenwise, turboquant, zipcache

D = 128


def noise(count: int, dim: int = D, seed: int = 0) -> list[Tensor]:
    return list(torch.randn(count, dim, generator=torch.Generator().manual_seed(seed)))


def channels(count: int, dim: int = D) -> list[Tensor]:
    """Tokens of which every channel has a spread and an offset of its own."""
    generator = torch.Generator().manual_seed(1)
    spread = torch.rand(dim, generator=generator) * 4 + 0.2
    offset = torch.randn(dim, generator=generator) * 5
    return [x * spread + offset for x in noise(count, dim)]


def nmse(read: list[Tensor], xs: list[Tensor]) -> float:
    """Squared error over variance, each channel on its own scale."""
    given, got = torch.stack(xs).double(), torch.stack(read).double()
    return float(((got - given) ** 2).mean(0).div(given.var(0, correction=0)).mean())


def share(read: list[Tensor], xs: list[Tensor]) -> float:
    """Squared error over the sum of squares."""
    given, got = torch.stack(xs).double(), torch.stack(read).double()
    return float(((got - given) ** 2).sum() / (given**2).sum())


def reads(head: Any, keys: list[Tensor], values: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    head.fit(keys, values)
    coded = [head.code(key, value) for key, value in zip(keys, values, strict=True)]
    return [key for _, key, _ in coded], [value for _, _, value in coded]


# ---- Rounding


def test_fp16_and_fp8() -> None:
    xs = [*(torch.randn(500) * 10.0 ** torch.randint(-9, 7, (500,)).float()).tolist(), 0.0, -0.0, 2**-10, 3 * 2**-10]
    for x in xs:
        t = torch.tensor(x)
        assert float(scalars.half(x)) == t.clamp(-65504, 65504).half().item()
        assert scalars.e4m3(x) == t.clamp(-448, 448).to(torch.float8_e4m3fn).float().item()


# ---- Tokenwise: what was measured of keys with offsets and of white noise


@pytest.mark.parametrize(
    ("bits", "group", "error"), [(2, 128, 0.250), (3, 128, 0.0458), (4, 128, 0.0100), (2, 32, 0.154)]
)
def test_error_of_normalised_keys(bits: int, group: int, error: float) -> None:
    keys = channels(200)
    read, _ = reads(tokenwise.Head({"bits": bits, "group_size": group}, D), keys, keys)
    assert nmse(read, keys) == pytest.approx(error, rel=0.05)


@pytest.mark.parametrize(("bits", "error"), [(2, 0.155), (4, 0.0061)])
def test_error_of_values_in_groups_of_32(bits: int, error: float) -> None:
    values = noise(100)
    _, read = reads(tokenwise.Head({"bits": bits, "group_size": 32}, D), values, values)
    assert share(read, values) == pytest.approx(error, rel=0.05)


def test_without_a_normaliser_offsets_cost_all() -> None:
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
    peaks = torch.linspace(5, 0.5, D)
    head = mikv.Head({"bits": 4}, D, peaks.tolist())
    head.fit(keys, keys)
    balance = scalars.vector(head.balance)
    largest = torch.stack(keys).abs().amax(0)
    torch.testing.assert_close(largest * balance, peaks / balance, rtol=2e-3, atol=0)
    queries = torch.stack(noise(40, seed=3)) * peaks / 3

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


# ---- GEAR


def gear_error(keys: list[Tensor], values: list[Tensor], **config: Any) -> tuple[float, float]:
    coded = gear.Head(config, D).fit_block(keys, values)
    return share([key for key, _ in coded], keys), share([value for _, value in coded], values)


@pytest.mark.parametrize("backbone", ["kivi", "kcvt"])
def test_every_part_of_gear_helps(backbone: str) -> None:
    xs = [
        x * (1 + 20 * (torch.rand(D, generator=torch.Generator().manual_seed(j)) < 0.01))
        for j, x in enumerate(noise(64))
    ]
    plain = gear_error(xs, xs, rank=0, sparse=0.0, backbone=backbone)
    low_rank = gear_error(xs, xs, rank=4, sparse=0.0, backbone=backbone)
    both = gear_error(xs, xs, rank=4, sparse=0.02, backbone=backbone)
    assert all(a > b > c for a, b, c in zip(plain, low_rank, both, strict=True))


def test_the_basis_is_nearly_the_best() -> None:
    generator = np.random.default_rng(0)
    error = (generator.standard_normal((64, 2)) @ generator.standard_normal((2, D)) * 2).astype(np.float32)
    error += generator.standard_normal(error.shape).astype(np.float32) * 0.3
    by = gear.basis(error, 2)
    best = (np.linalg.svd(error)[1][2:] ** 2).sum()
    assert ((error - error @ by @ by.T) ** 2).sum() == pytest.approx(best, rel=0.01)


def test_full_rank_is_exact_to_fp16() -> None:
    xs = noise(64)
    assert max(gear_error(xs, xs, rank=64)) < 1e-6


def test_outliers_of_both_sides_without_overlap() -> None:
    apart = gear.pull_out([np.float32(x) for x in (5, 1, -5, 2, 5, 3)], 1)
    assert apart.places == [0, 2] and apart.filled == [2.75, 1, 2.75, 2, 5, 3]
    flat = gear.pull_out([np.float32(1)] * 4, 1)
    assert flat.places == [0, 1] and flat.filled == [1] * 4
    assert [gear.outliers(length, 0.02) for length in (64, 128, 512)] == [1, 1, 5]


@pytest.mark.parametrize(("tokens", "each"), [(64, 1), (150, 2), (250, 2)])
def test_outliers_are_a_share_of_their_vector(tokens: int, each: int) -> None:
    """Not of all heads' channels, as in GEAR's code; one of each side at least."""
    head = gear.Head({"rank": 0, "group_size": tokens}, D)
    xs = noise(tokens)
    head.fit_block(xs, xs)
    assert len(head.key_places) == 2 * each * D


def test_overwriting_keeps_the_frames_and_outlier_places() -> None:
    xs = noise(64)
    head = gear.Head({}, D)
    head.fit_block(xs, xs)
    frames, basis = list(head.key_frames), head.key_basis.copy()
    key, value = head.overwrite(3, noise(1, seed=9)[0], noise(1, seed=10)[0])
    assert head.key_frames == frames and (head.key_basis == basis).all()
    assert share([key], noise(1, seed=9)) < 0.4 and share([value], noise(1, seed=10)) < 0.3


# ---- CSR


def dictionary(atoms: int, dim: int = D, seed: int = 5) -> list[Tensor]:
    return [x / x.norm() for x in noise(atoms, dim, seed)]


def csr_head(atoms: list[Tensor], half: list[Tensor], dim: int = D, **config: Any) -> csr.Head:
    return csr.Head(config, dim, atoms, half, [], [])


def test_white_noise_is_no_food_for_csr() -> None:
    xs = noise(12)
    head = csr_head(dictionary(4096), dictionary(8, D // 2))
    read = [head.keys.code(x)[2] for x in xs]
    assert share(read, xs) == pytest.approx(0.445, rel=0.04)


def structured(count: int, dim: int, seed: int = 0) -> list[Tensor]:
    """Vectors of low rank with a little noise."""
    generator = torch.Generator().manual_seed(77)
    directions = torch.randn(12, dim, generator=generator)
    return [
        (torch.randn(12, generator=torch.Generator().manual_seed(1000 * seed + j)) @ directions) + 0.05 * x
        for j, x in enumerate(noise(count, dim, seed))
    ]


def test_solvers_in_order_and_repeated_atoms() -> None:
    dim, xs = 32, structured(30, 32)
    atoms = [x / x.norm() for x in structured(200, 32, seed=1)]
    errors: list[float] = []
    repeated = 0
    for solver in ("mp", "refit", "omp"):
        head = csr_head(atoms, dictionary(8, 16), dim, solver=solver)
        coded = [head.keys.code(x) for x in xs]
        errors.append(share([read for _, _, read in coded], xs))
        if solver == "mp":
            repeated = sum(len(set(indices)) < len(indices) for indices, _, _ in coded)
    assert errors[0] > errors[1] > errors[2]
    assert repeated > 0, "matching pursuit takes an atom twice where atoms are alike"


def test_orthogonal_matching_pursuit_is_that_of_scikit_learn() -> None:
    atoms = dictionary(64, 32)
    columns = torch.stack(atoms, 1).double().numpy()
    for x in noise(10, 32):
        chosen, coefficients = csr.orthogonal_matching_pursuit(
            x.double().numpy(), [a.double().numpy() for a in atoms], 6
        )
        sparse = orthogonal_mp(columns, x.double().numpy(), n_nonzero_coefs=6)
        assert sorted(chosen) == sorted(np.flatnonzero(sparse))
        np.testing.assert_allclose(np.take(sparse, chosen), coefficients, rtol=1e-8)


@pytest.mark.parametrize(("s", "bits"), [(4, 1.0), (6, 1.5), (8, 2.0), (16, 4.0)])
def test_pairs_and_bits(s: int, bits: float) -> None:
    head = csr_head(dictionary(20), dictionary(20, D // 2), s=s)
    codes, _, _ = head.code(*noise(2))
    for side in ("key", "value"):
        assert len(codes[f"{side}_index"]) == len(codes[f"{side}_coef"]) == s
        assert s * (16 + 16) / D == bits


def test_the_prompt_and_the_guard_code_themselves() -> None:
    keys, values = noise(6, 32, 1), noise(6, 32, 2)
    head = csr.Head({"s": 2, "guard": 2}, 32, dictionary(10, 32), dictionary(10, 16), keys[:2], values[:2])
    assert len(head.keys.atoms) == 12 and len(head.values.atoms) == 14
    head.fit(keys[2:], values[2:])
    assert len(head.keys.atoms) == 14 and len(head.values.atoms) == 16
    exact = [share([head.keys.code(key)[2]], [key]) < 1e-6 for key in keys]
    assert exact[:2] == [True, True] and sum(exact) == 4, "two that were seen and two that were guarded"
    assert share([head.values.code(values[0])[2]], values[:1]) < 1e-6


def test_zero_vectors_are_nothing() -> None:
    for solver in ("mp", "refit", "omp"):
        head = csr.Head(
            {"solver": solver}, 32, dictionary(10, 32), dictionary(10, 16), [torch.zeros(32)], [torch.zeros(32)]
        )
        head.fit([torch.zeros(32)], [torch.zeros(32)])
        _, key, value = head.code(torch.zeros(32), torch.zeros(32))
        assert not key.any() and not value.any()


# ---- All of them


MADE: dict[str, Callable[[int], Any]] = {
    "tokenwise": lambda d: tokenwise.Head({}, d),
    "bfp": lambda d: bfp.Head({}, d),
    "mikv": lambda d: mikv.Head({}, d, [1.0] * d),
    "zipcache": lambda d: zipcache.Head({}, d),
    "rotate": lambda d: rotate.Head({}, d),
    "turboquant": lambda d: turboquant.Head({}, d, [1.0] * d),
    "csr": lambda d: csr_head(dictionary(8, d), dictionary(8, d // 2), d),
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("size", [0.0, 1e-6, 1e6, 1e18])
def test_whatever_is_given_what_is_read_is_finite(name: str, size: float) -> None:
    xs = [x.clamp(-1, 1) * size for x in noise(3, 16)]
    assert all(x.isfinite().all() for side in reads(MADE[name](16), xs, xs) for x in side)
