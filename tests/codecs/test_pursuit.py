"""Matching pursuit against its definition, and attention on codes against what is read back."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.codecs.csr import pursuit as _pursuit
from kvpolicy.codecs.csr import sparse
from kvpolicy.codecs.csr.pursuit import Solver, pursue
from kvpolicy.codecs.csr.sparse import Dictionary, reconstruct, unit
from tests import sampling

B = 2
H = 3
D = 16
N = 40
M = 12


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_dictionary(own: int = M, count: int = N, width: int = D) -> Dictionary:
    return Dictionary(unit(normal(count, width, seed=1)), unit(normal(B, H, own, width, seed=2)))


def definition(x: Tensor, atoms: Tensor, pairs: int) -> tuple[list[int], list[float]]:
    """Algorithm 1 with its mends, for one vector: signed coefficients, and pairs instead of places."""
    rest = x.double()
    found = list[int]()
    coefs = list[float]()
    for _ in range(pairs):
        products = atoms.double() @ rest
        found.append(int(products.abs().argmax()))
        coefs.append(float(products[found[-1]]))
        rest = rest - coefs[-1] * atoms[found[-1]].double()
    return found, coefs


@pytest.mark.parametrize("own", [0, M])
@pytest.mark.parametrize("area", [0, _pursuit._MAX_GRAM])
def test_it_takes_the_atom_of_the_largest_product(own: int, area: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pursuit, "_MAX_GRAM", area)  # 0: no products of atoms with each other
    monkeypatch.setattr(_pursuit, "_CPU_CHUNK", 1000)  # several chunks
    dictionary = random_dictionary(own)
    x = normal(B, H, 30, D, seed=3)
    index, coef = pursue(x, dictionary, 6)
    for b, h in product(range(B), range(H)):
        atoms = torch.cat([dictionary.shared, dictionary.per_head[b, h]])
        for i in range(30):
            found, coefs = definition(x[b, h, i], atoms, 6)
            assert index[b, h, i].tolist() == found
            want = torch.tensor(coefs, dtype=torch.float64)
            torch.testing.assert_close(coef[b, h, i].double(), want, atol=1e-5, rtol=0)


ALONE = ([1, 4, 5, 33, 120], [0, _pursuit._MAX_GRAM], ["mp", "refit", "omp"], [(0, D), (M, D), (M, 128)])


@sampling.product("count,area,solver,shape", *ALONE, sample=sampling.each_once(*ALONE))
def test_a_head_alone_has_the_codes_that_it_has_beside_others(
    count: int, area: int, solver: Solver, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, since one that is off can change the next atom; in several chunks."""
    monkeypatch.setattr(_pursuit, "_MAX_GRAM", area)
    monkeypatch.setattr(_pursuit, "_CPU_CHUNK", 2000)
    own, width = shape
    dictionary = random_dictionary(own, width=width)
    x = normal(B, H, count, width, seed=11)
    index, coef = pursue(x, dictionary, 5, solver)
    for b, h in ((slice(1), slice(1)), (slice(1, 2), slice(2, 3)), (slice(B), slice(1, 3))):
        alone = pursue(x[b, h], Dictionary(dictionary.shared, dictionary.per_head[b, h]), 5, solver)
        assert torch.equal(alone[0], index[b, h]) and torch.equal(alone[1], coef[b, h])


def test_products_of_a_head_know_nothing_of_others_and_of_threads() -> None:
    before = torch.get_num_threads()
    try:
        for count, width, atoms in ((1, 8, 70), (5, 64, 7), (6, 128, 500), (33, 20, 70), (128, 32, 70)):
            x = normal(H, count, width)
            shared = normal(atoms, width, seed=1)
            own = normal(H, atoms, width, seed=2)
            want = _pursuit._products(x, shared), _pursuit._products(x, own)
            torch.testing.assert_close(want[0], x @ shared.mT, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(want[1], x @ own.mT, atol=1e-4, rtol=1e-4)
            for threads, h in product((1, 2, 4), range(H)):
                torch.set_num_threads(threads)
                its = slice(h, h + 1)
                assert torch.equal(_pursuit._products(x[its], shared), want[0][its])
                assert torch.equal(_pursuit._products(x[its], own[its]), want[1][its])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("solver", ["mp", "refit", "omp"])
def test_zero_vectors_and_equal_atoms(solver: Solver) -> None:
    dictionary = Dictionary(unit(torch.ones(3, 4)), torch.zeros(1, 1, 2, 4))
    x = torch.stack([torch.zeros(4), torch.full((4,), 3.0), torch.full((4,), 1e6)])[None, None]
    index, coef = pursue(x, dictionary, 3, solver)
    assert index[0, 0, 0].tolist() == [0, 0, 0] and not coef[0, 0, 0].any()
    assert index[0, 0, 1, 0] == 0, "the first of equal atoms"
    torch.testing.assert_close(reconstruct(dictionary, dictionary.table(), index, coef), x, rtol=1e-5, atol=0)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("places", [(0, 31), (31, 32), (5, 63), (31, 64), (40, 69), (64, 69), (3, 70), (69, 70)])
def test_of_equal_atoms_anywhere_the_first_is_taken(places: tuple[int, int], sign: int) -> None:
    """Two blocks of 32 atoms that are searched together and six more, before two atoms of the head's own."""
    atoms = torch.zeros(72, 4)
    atoms[places[0], 1] = 1
    atoms[places[1], 1] = sign
    dictionary = Dictionary(atoms[:70], atoms[None, None, 70:])
    x = torch.tensor([0.0, 3.0, 0.0, 0.0]).expand(1, 1, 100, 4)
    for count in (1, 100):  # a step for each vector, and products of atoms
        index, coef = pursue(x[:, :, :count], dictionary, 2)
        assert index[..., 0].unique().tolist() == [places[0]] and coef[..., 0].unique().tolist() == [3]


@pytest.mark.parametrize("solver", ["mp", "refit", "omp"])
@pytest.mark.parametrize("own", [0, 1])
def test_more_pairs_than_atoms_and_channels_reconstruct_what_atoms_can(solver: Solver, own: int) -> None:
    """Two atoms at an angle in a plane: what is outside the plane stays, and all else is found."""
    atoms = unit(torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]))
    dictionary = Dictionary(atoms[: 2 - own], atoms[None, None, 2 - own :])
    x = normal(1, 1, 9, 3, seed=9)
    index, coef = pursue(x, dictionary, 30, solver)
    want = torch.cat([x[..., :2], torch.zeros(1, 1, 9, 1)], -1)
    torch.testing.assert_close(
        reconstruct(dictionary, dictionary.table(), index, coef), want, atol=1e-3 if solver == "mp" else 1e-5, rtol=0
    )


@pytest.mark.parametrize("solver", ["refit", "omp"])
def test_nearly_equal_atoms_stay_finite(solver: Solver) -> None:
    close = torch.ones(N, D) + 1e-4 * normal(N, D)
    dictionary = Dictionary(unit(close), torch.zeros(B, H, 0, D))
    index, coef = pursue(normal(B, H, 50, D, seed=7) * 1e6, dictionary, 16, solver)
    assert coef.isfinite().all() and int(index.max()) < N


@pytest.mark.parametrize("own", [0, M])
@pytest.mark.parametrize("parts", [1, 2])
def test_score_and_mix_read_nothing_back(own: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpolicy.codecs.common.CHUNK_SLOTS", 7)
    group = 2
    slots = 20
    pairs = 4
    dictionary = random_dictionary(own)
    index = torch.randint(N + own, (B, H, slots, parts, pairs), generator=torch.Generator().manual_seed(8))
    coef = normal(*index.shape)
    queries = normal(B, H, group, D)
    weights = normal(B, H, group, slots)
    every = [
        F.embedding(index[b, h], torch.cat([dictionary.shared, dictionary.per_head[b, h]]))
        for b, h in product(range(B), range(H))
    ]
    dense = (torch.stack(every).unflatten(0, (B, H)) * coef[..., None]).sum(-2)  # [B, H, C, p, d]
    torch.testing.assert_close(reconstruct(dictionary, dictionary.table(), index, coef), dense)
    got = sparse.mix(dictionary, weights, lambda at: (index[:, :, at], coef[:, :, at]), parts)
    torch.testing.assert_close(got, weights @ dense.flatten(-2), atol=1e-5, rtol=1e-4)
    got = sparse.score(dictionary, queries, lambda at: (index[:, :, at, :1], coef[:, :, at, :1]), slots)
    torch.testing.assert_close(got, queries @ dense[:, :, :, 0].mT, atol=1e-5, rtol=1e-4)
