"""The reference codecs that write a vector as a sum, GEAR and CSR, against numbers that are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import orthogonal_mp
from torch import Tensor

from .codecs import csr, gear
from .drawn import D, noise, share

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
    frames = list(head.key_frames)
    basis = head.key_basis.copy()
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
    dim = 32
    xs = structured(30, 32)
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


@pytest.mark.parametrize(("nnz", "bits"), [(4, 1.0), (6, 1.5), (8, 2.0), (16, 4.0)])
def test_pairs_and_bits(nnz: int, bits: float) -> None:
    head = csr_head(dictionary(20), dictionary(20, D // 2), nnz=nnz)
    codes, _, _ = head.code(*noise(2))
    for side in ("key", "value"):
        assert len(codes[f"{side}_index"]) == len(codes[f"{side}_coef"]) == nnz
        assert nnz * (16 + 16) / D == bits


def test_prompt_atoms_and_outlier_atoms_code_themselves() -> None:
    keys = noise(6, 32, 1)
    values = noise(6, 32, 2)
    head = csr.Head({"nnz": 2, "outlier_atoms": 2}, 32, dictionary(10, 32), dictionary(10, 16), keys[:2], values[:2])
    assert len(head.keys.atoms) == 12 and len(head.values.atoms) == 14
    head.fit(keys[2:], values[2:])
    assert len(head.keys.atoms) == 14 and len(head.values.atoms) == 16
    exact = [share([head.keys.code(key)[2]], [key]) < 1e-6 for key in keys]
    assert exact[:2] == [True, True] and sum(exact) == 4, "two prompt atoms and two outlier atoms"
    assert share([head.values.code(values[0])[2]], values[:1]) < 1e-6


def test_zero_vectors_are_nothing() -> None:
    for solver in ("mp", "refit", "omp"):
        head = csr.Head(
            {"solver": solver}, 32, dictionary(10, 32), dictionary(10, 16), [torch.zeros(32)], [torch.zeros(32)]
        )
        head.fit([torch.zeros(32)], [torch.zeros(32)])
        _, key, value = head.code(torch.zeros(32), torch.zeros(32))
        assert not key.any() and not value.any()
