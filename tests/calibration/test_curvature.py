"""The curvature is C^T C of the codes, and a step with it goes where the error is least."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpolicy.calibration.curvature import Codes, Curvature
from kvpolicy.codecs.csr.sparse import unit


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix_of(codes: Codes, count: int) -> Tensor:
    """The coefficients as a matrix [n, N]; an atom that is used twice has the sum."""
    matrix = torch.zeros(len(codes.index), count)
    for row, (atoms, coefs) in enumerate(zip(codes.index.tolist(), codes.coef.tolist(), strict=True)):
        for atom, coef in zip(atoms, coefs, strict=True):
            matrix[row, atom] += coef
    return matrix


@pytest.mark.parametrize("pairs", [1, 3])
def test_codes_leave_the_residual_and_its_gradient(pairs: int) -> None:
    x = drawn(30, 6)
    atoms = unit(drawn(9, 6, seed=1))
    codes = Codes(x, atoms, pairs)
    matrix = matrix_of(codes, 9)
    torch.testing.assert_close(codes.residual, x - matrix @ atoms)
    torch.testing.assert_close(codes.gradient(9), -2 / 30 * matrix.T @ (x - matrix @ atoms))


def test_the_mean_forgets_old_batches() -> None:
    atoms = unit(drawn(9, 6, seed=1))
    batches = [Codes(drawn(20, 6, seed=seed), atoms, 2) for seed in range(4)]
    mean = Curvature(atoms)
    expected = torch.zeros(9, 9)
    weights = 0.0
    for codes in batches:
        mean.add(codes)
        matrix = matrix_of(codes, 9)
        expected = 0.97 * expected + 0.03 * 2 / 20 * matrix.T @ matrix
        weights = 0.97 * weights + 0.03
        torch.testing.assert_close(mean.mean(), expected / weights, rtol=1e-4, atol=1e-5)


def test_steps_add_up_to_the_solution_of_the_damped_equations() -> None:
    atoms = unit(drawn(9, 6, seed=1))
    codes = Codes(drawn(200, 6), atoms, 3)
    found = Curvature(atoms)
    found.add(codes)
    matrix = 2 / 200 * matrix_of(codes, 9).T @ matrix_of(codes, 9)
    diagonal = matrix.diagonal()
    damped = matrix + torch.diag(0.3 * diagonal + 1e-3 * diagonal.mean())
    gradient = codes.gradient(9)
    step = [found.solve(gradient) for _ in range(200)][-1]
    torch.testing.assert_close(step, torch.linalg.solve(damped, gradient), rtol=1e-3, atol=1e-4)


def test_a_step_lowers_the_error_of_its_codes() -> None:
    """With the codes as constants, the error is quadratic in the atoms, and a few iterations take most of it."""
    atoms = unit(drawn(9, 6, seed=1))
    x = drawn(200, 6)
    codes = Codes(x, atoms, 3)
    found = Curvature(atoms)
    found.add(codes)
    matrix = matrix_of(codes, 9)
    before, after, least = (
        float((x - matrix @ table).square().sum())
        for table in (
            atoms,
            atoms - found.solve(codes.gradient(9)),
            torch.linalg.lstsq(matrix, x).solution,
        )
    )
    assert least <= after < before
    assert before - after > 0.5 * (before - least)


def test_atoms_that_are_never_used_stay() -> None:
    atoms = torch.eye(3)
    x = torch.tensor([[2.0, 0.1, 0.0]]).repeat(5, 1)
    found = Curvature(atoms)
    codes = Codes(x, atoms, 1)
    found.add(codes)
    step = found.solve(codes.gradient(3))
    assert step[1:].abs().max() == 0
    assert step[0, 1] < 0  # toward the vectors


def test_zero_vectors_give_no_step() -> None:
    atoms = torch.eye(3)
    found = Curvature(atoms)
    codes = Codes(torch.zeros(5, 3), atoms, 2)
    found.add(codes)
    assert found.solve(codes.gradient(3)).abs().max() == 0
