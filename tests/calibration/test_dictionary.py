"""Training lowers the error by the written gradient, and layers are compared and put together by the written rules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy.calibration.dictionary import (
    Codes,
    Curvature,
    State,
    Training,
    balance,
    gradient,
    losses,
    relative_error,
    start,
    train,
)
from kvpolicy.calibration.grouping import Directions, divergence, group_layers, parse_groups
from kvpolicy.codecs.csr.sparse import unit

QUICK = Training(epochs=6, batch=64, rate=0.5, patience=6)


def vectors(count: int = 600, seed: int = 0) -> Tensor:
    """Sums of two of twelve hidden atoms, and some noise, [n, 8]."""
    generator = torch.Generator().manual_seed(seed)
    hidden = unit(torch.randn(12, 8, generator=generator))
    index = torch.randint(12, (count, 2), generator=generator)
    coef = torch.randn(count, 2, 1, generator=generator) * 3
    return (hidden[index] * coef).sum(1) + 0.05 * torch.randn(count, 8, generator=generator)


def atoms(count: int = 12, seed: int = 3) -> Tensor:
    return unit(torch.randn(count, 8, generator=torch.Generator().manual_seed(seed)))


def test_training_lowers_the_error() -> None:
    state = train(vectors(), 12, 2, QUICK)
    assert len(state.losses) == 7
    assert min(state.losses) < 0.8 * state.losses[0]
    torch.testing.assert_close(state.best.norm(dim=-1), torch.ones(12))
    assert relative_error(vectors(200, seed=0)[:200], state.best, 2) < state.losses[0]


def reached(*losses: float) -> State:
    return State(atoms(), atoms(seed=4), list(losses))


def test_the_best_atoms_are_kept() -> None:
    state = train(vectors(), 12, 2, QUICK, state=reached(0.0))  # nothing can be better
    assert torch.equal(state.best, atoms(seed=4))
    assert not torch.equal(state.atoms, atoms())
    state = train(vectors(), 12, 2, QUICK, state=reached(9.0))
    assert relative_error(vectors(), state.best, 2) < relative_error(vectors(), atoms(seed=4), 2)


def test_training_stops_early() -> None:
    for before, epochs in (((0.1, 0.2), 7), ((9.0, 0.1, 0.2, 0.1), 3), ((0.0, 1.0, 1.0, 1.0), 3)):
        training = Training(epochs=7, batch=64, patience=2 if epochs == 3 else 9)
        assert len(train(vectors(), 12, 2, training, state=reached(*before)).losses) == epochs + 1


@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1.0, 1e3])
def test_the_diversity_term_stays_a_tenth_of_the_error(scale: float) -> None:
    error, diversity = losses(Codes(vectors() * scale, atoms(), 2), atoms())
    weight = balance(error, diversity, 0.1)
    assert 0 <= weight <= 1
    assert weight * diversity <= 0.1 * error * (1 + 1e-5)
    assert weight == 1 or weight * diversity == pytest.approx(0.1 * float(error), rel=1e-4)


def test_the_gradient_against_differences() -> None:
    """Codes are constant, so differences are of the error with the codes that were found."""
    from kvpolicy.codecs.csr.pursuit import pursue
    from kvpolicy.codecs.csr.sparse import Dictionary

    x = vectors(40).double().float()
    unit_atoms = atoms()
    index, coef = (t[0, 0] for t in pursue(x[None, None], Dictionary(unit_atoms, torch.zeros(1, 1, 0, 8)), 2))
    codes = Codes(x, unit_atoms, 2)
    weight = balance(*losses(codes, unit_atoms), 0.1).double()

    def total(moved: Tensor) -> Tensor:
        rest = x.double() - (coef.double()[..., None] * moved[index]).sum(1)
        apart = (torch.eye(12) - moved @ moved.T).square().sum() / 12**2
        return rest.square().sum(-1).mean() + weight * apart

    slope = torch.zeros(12, 8, dtype=torch.float64)
    for at in range(96):
        step = torch.zeros(96, dtype=torch.float64)
        step[at] = 1e-5
        up, down = (total(unit_atoms.double() + sign * step.view(12, 8)) for sign in (1, -1))
        slope.view(-1)[at] = (up - down) / 2e-5
    slope -= (slope * unit_atoms).sum(-1, keepdim=True) * unit_atoms
    got = gradient(codes, unit_atoms, 0.1)
    torch.testing.assert_close(got.double(), slope, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close((got * unit_atoms).sum(-1), torch.zeros(12), rtol=0, atol=1e-5)


def test_odd_starts() -> None:
    assert start(torch.zeros(20, 8), 4, 0).norm(dim=-1).allclose(torch.ones(4))
    with pytest.raises(ValueError, match="at least that of the atoms, 9, got 5"):
        start(torch.randn(5, 8), 9, 0)
    assert train(torch.zeros(60, 8), 4, 2, Training(epochs=1)).best.isfinite().all()
    assert train(torch.full((60, 8), 1e6), 4, 2, Training(epochs=2)).best.isfinite().all()


@pytest.mark.parametrize("field", ["epochs", "batch", "patience", "held_out", "rate", "diverse"])
def test_bad_numbers(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        Training(**{field: -1})
    if field in ("held_out", "rate", "diverse"):
        for wrong in ("nan", "inf"):
            given: dict[str, Any] = {field: float(wrong)}
            with pytest.raises(ValueError, match=field):
                Training(**given)


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


@pytest.mark.parametrize("seed", [-1, 2**40])
def test_any_seed_of_64_bits(seed: int) -> None:
    assert len(start(vectors(), 12, seed)) == 12


def slow(a: Tensor, b: Tensor, bins: int) -> float:
    """The divergence of [H, n, D], one number at a time."""
    a, b = (x.flatten(0, 1).double() / x.flatten(0, 1).double().norm(dim=-1, keepdim=True) for x in (a, b))
    both = torch.cat([a, b])
    axes = torch.linalg.svd(both - both.mean(0), full_matrices=False).Vh[:2]
    flat = both @ axes.T
    counts = [[[0] * bins for _ in range(bins)] for _ in range(2)]
    low = flat.min(0).values
    high = flat.max(0).values
    for place, point in enumerate(flat):
        x, y = (min(int((point[i] - low[i]) / (high[i] - low[i]) * bins), bins - 1) for i in range(2))
        counts[int(place >= len(a))][x][y] += 1
    total = 0.0
    for x in range(bins):
        for y in range(bins):
            p = counts[0][x][y] / len(a)
            q = counts[1][x][y] / len(b)
            total += sum(part / 2 * math.log2(part / ((p + q) / 2)) for part in (p, q) if part)
    return total


def some(seed: int, shift: float = 0.0, count: int = 300) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, count, 6, generator=generator) * torch.tensor([5.0, 3.0, 1, 1, 1, 1]) + shift


@pytest.mark.parametrize("bins", [4, 10])
def test_the_divergence_against_its_definition(bins: int) -> None:
    a = some(0)
    b = some(1, 2.0)
    assert divergence(Directions.of(a), Directions.of(b), bins) == pytest.approx(slow(a, b, bins), abs=0.02)


def test_the_divergence_of_extremes() -> None:
    a = some(0, 50.0)
    b = some(1, -50.0)
    assert divergence(Directions.of(a), Directions.of(a)) == 0
    assert divergence(Directions.of(a), Directions.of(b)) == pytest.approx(1)
    assert divergence(Directions.of(torch.zeros(1, 5, 6)), Directions.of(torch.zeros(1, 5, 6))) == 0
    assert divergence(Directions.of(a), Directions.of(b)) == divergence(Directions.of(b), Directions.of(a))


def test_every_pair_of_a_group_is_alike() -> None:
    apart = {(0, 1): 0.1, (1, 2): 0.1, (0, 2): 0.3, (2, 3): 0.2, (2, 4): 0.1, (3, 4): 0.21}
    assert group_layers(range(5), lambda a, b: apart[a, b]) == [[0, 1], [2, 3], [4]]


def test_a_group_is_no_long_chain() -> None:
    assert group_layers(range(9), lambda a, b: 0.15, chain=0.31) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert group_layers([], lambda a, b: 0.0) == []
    assert group_layers([1, 5], lambda a, b: 0.0) == [[1, 5]]


def test_groups_are_read() -> None:
    assert parse_groups("0, 1-2,3", range(4)) == [[0], [1, 2], [3]]
    assert parse_groups("each", [1, 3]) == [[1], [3]]
    assert parse_groups("all", [1, 3]) == parse_groups("0-3", [1, 3]) == [[1, 3]]


@pytest.mark.parametrize("text", ["0,1", "0-3,3", "0-4,9", "x", "", "0-3,", "1-0,2,3", "-1,0-3"])
def test_groups_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="group"):
        parse_groups(text, range(4))
