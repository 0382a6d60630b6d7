"""What eviction, batches, numbers of any size and compilation ask of CSR."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from kvpolicy.codecs.csr.csr import CSRCodes
from kvpolicy.protocols import ModelInfo, StageStore
from tests import sampling
from tests.codecs.csr_cases import (
    B,
    C,
    G,
    H,
    Quarter,
    at,
    copy,
    flags,
    made,
    none_occupied,
    normal,
    part,
    same,
    tokens,
    write_all,
    write_dictionaries,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dictionaries(tmp_path_factory.mktemp("csr"))


FIELDS: list[dict[str, Any]] = [
    {},
    {"coef": "fp8", "outlier_atoms": 3},
    {"solver": "omp", "index": "packed"},
    {"solver": "refit", "value_chunks": 4},
]


@pytest.mark.parametrize("fields", FIELDS)
def test_inactive_tokens_write_nothing(folder: Path, fields: dict[str, Any]) -> None:
    csr, store = made(folder, **fields)
    write_all(csr, store, *tokens(C))
    before = copy(store)
    keys, values = tokens(3, seed=1)
    keys[:, :, 1] = torch.inf
    values[:, :, 1] = torch.nan
    for occupied in (none_occupied(), ~none_occupied()):
        csr.write(store, keys, values, at(5, 5, 9), flags(False, False, False), occupied)
        assert same(store, before)
    csr.write(store, keys, values, at(5, 5, 5), flags(False, False, True), none_occupied())
    alone = copy(before)
    csr.write(alone, keys[:, :, 2:], values[:, :, 2:], at(5), flags(True), none_occupied())
    assert same(store, alone) and not same(store, before)


@pytest.mark.parametrize("fields", FIELDS)
def test_heads_differ_in_what_is_active(folder: Path, fields: dict[str, Any]) -> None:
    csr, store = made(folder, **fields)
    write_all(csr, store, *tokens(C))
    before = copy(store)
    keys, values = tokens(4, seed=1)
    write_mask = torch.zeros(B, H, 4, dtype=torch.bool)
    write_mask[0, 0, :2] = True
    csr.write(store, keys, values, at(3, 4, 5, 6), write_mask, none_occupied())
    for name, new, old in zip(CSRCodes._fields, store.codes, before.codes, strict=True):
        assert torch.equal(new[1], old[1])
        assert torch.equal(new[0, 1:], old[0, 1:])
        if name.endswith("outlier_atoms") and csr.outlier_atoms:
            assert not torch.equal(new[0, 0], old[0, 0])
        if name.endswith(("index", "coef")):
            assert torch.equal(new[0, 0, 5:], old[0, 0, 5:]) and not torch.equal(new[0, 0, 3:5], old[0, 0, 3:5])


def test_a_scale_is_fitted_once(folder: Path) -> None:
    csr, store = made(folder, coef="fp8")
    write_all(csr, store, *tokens(C))
    before = copy(store)
    occupied = none_occupied()
    keys, values = tokens(1, seed=1)
    occupied[:, 1:] = True
    csr.write(store, keys * 100, values, at(4), flags(True), occupied)
    assert torch.equal(store.codes.key_scale[:, 1:], before.codes.key_scale[:, 1:])
    assert (store.codes.key_scale[:, 0] > 5 * before.codes.key_scale[:, 0]).all()
    largest = store.codes.key_coef[:, 1:, 4].view(torch.float8_e4m3fn).float().abs()
    assert largest.max() == 448, "clipped"
    assert csr.keys(store, slice(0, C)).isfinite().all()


def test_outlier_atoms_are_the_vectors_of_largest_error(folder: Path) -> None:
    csr, store = made(folder, outlier_atoms=2, window=0)
    plain, other = made(folder, window=0)
    keys, values = tokens(C)
    write_all(csr, store, keys, values)
    write_all(plain, other, keys, values)
    error = (plain.keys(other, slice(0, C)) - keys).norm(dim=-1) / keys.norm(dim=-1)
    worst = error.topk(2, -1).indices
    got = csr.keys(store, slice(0, C))
    for b, h in product(range(B), range(H)):
        torch.testing.assert_close(got[b, h, worst[b, h]], keys[b, h, worst[b, h]], atol=2e-3, rtol=2e-3)
    assert store.codes.key_outlier_atoms.shape == (B, H, 2, 16) and store.codes.value_outlier_atoms.shape == (
        B,
        H,
        2,
        8,
    )
    before = copy(store)
    occupied = none_occupied()
    occupied[0, 2, 7] = True  # of one head alone
    csr.write(store, *tokens(2, seed=3), at(0, 1), flags(True, True), occupied)
    for b, h in product(range(B), range(H)):
        kept = torch.equal(store.codes.key_outlier_atoms[b, h], before.codes.key_outlier_atoms[b, h])
        assert kept == ((b, h) == (0, 2))


def test_the_last_atom_that_an_index_can_address(folder: Path) -> None:
    """2**15 atoms of values: each of the prompt's vectors is two."""
    csr, store = made(folder, window=(2**15 - 70) // 2)
    csr.check(ModelInfo(3, H, 16))
    assert store.atoms is not None
    keys, values = (atoms[:, :, -1:] for atoms in store.atoms)
    csr.write(store, keys, values, at(0), flags(True), none_occupied())
    assert store.codes.value_index[:, :, 0].max() == 2**15 - 1
    torch.testing.assert_close(csr.values(store, slice(0, 1)), values, atol=0.05, rtol=0.05)


def test_more_outlier_atoms_than_vectors(folder: Path) -> None:
    csr, store = made(folder, outlier_atoms=40)
    write_all(csr, store, *tokens(C))
    write_all(csr, store, *tokens(2))
    assert store.codes.key_outlier_atoms[:, :, :2].any(-1).all() and not store.codes.key_outlier_atoms[:, :, 2:].any()
    torch.testing.assert_close(csr.keys(store, slice(0, 2)), tokens(2)[0], atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("fields", FIELDS)
def test_a_batch_is_its_rows(folder: Path, fields: dict[str, Any]) -> None:
    """Products of other shapes may round otherwise, so that codes could differ in noise; numbers here have no ties."""
    csr, store = made(folder, **fields)
    keys, values = tokens(6)
    write_mask = flags(*[True] * 6).clone()
    write_mask[0, :, :3] = write_mask[1, 1, 4:] = False
    csr.write(store, keys, values, at(*range(6)), write_mask, none_occupied())
    for b in range(B):
        first = 3 if b == 0 else 0
        _, batch = made(folder, **fields)
        alone = part(batch, slice(b, b + 1), slice(H))
        key, value, slots, some = (t[b : b + 1, :, first:] for t in (keys, values, at(*range(6)), write_mask))
        csr.write(alone, key, value, slots, some, none_occupied()[b : b + 1])
        for got, want in zip(alone.codes, store.codes, strict=True):
            if want.dtype in (torch.int16, torch.uint8):
                assert torch.equal(got[0], want[b])
            else:
                torch.testing.assert_close(got[0], want[b], atol=1e-5, rtol=2e-3)


def test_nothing_to_write(folder: Path) -> None:
    csr, store = made(folder)
    before = copy(store)
    empty = torch.zeros(B, H, 0, 16)
    write_all(csr, store, empty, empty)
    assert same(store, before) and csr.keys(store, slice(0, 0)).shape == (B, H, 0, 16)


ONLY_ONE: list[dict[str, Any]] = [
    {**one, **other}
    for one in ({}, {"solver": "refit"}, {"solver": "omp", "value_chunks": 1}, {"outlier_atoms": 3, "value_chunks": 4})
    for other in (
        {},
        {"index": "packed"},
        {"coef": "fp8"},
        {"window": 0},
        {"outlier_atoms": 2, "window": 4, "coef": "fp8"},
    )
] + [{"key_space": "rotated", "index": "packed"}, {"outlier_atoms": 40}]


COUNTS = [C, 4, 1]


@sampling.product("fields,count", ONLY_ONE, COUNTS, sample=sampling.each_once(ONLY_ONE, COUNTS))
def test_a_head_alone_has_the_codes_that_it_has_beside_others(folder: Path, fields: dict[str, Any], count: int) -> None:
    """To the last bit: a rank of several holds the codes of its heads that one rank would hold."""
    csr, store = made(folder, 32, **fields)
    empty = copy(store)
    occupied = none_occupied()
    some = flags(*[True] * count).clone()
    some[0, 2, : count // 2] = False
    occupied[1, 1, C - 1] = True  # so that its outlier atoms and scale stay
    new = *tokens(count, 32), at(*range(count)), some
    csr.write(store, *new, none_occupied())
    csr.write(store, *new, occupied)
    for b, h in ((slice(B), slice(1)), (slice(B), slice(1, 3)), (slice(1, 2), slice(2, 3))):
        alone = part(empty, b, h)
        csr.write(alone, *(x[b, h] for x in (*new, none_occupied())))
        csr.write(alone, *(x[b, h] for x in (*new, occupied)))
        assert same(alone, part(store, b, h))
        every = slice(0, C)
        assert torch.equal(csr.keys(alone, every), csr.keys(store, every)[b, h])
        assert torch.equal(csr.values(alone, every), csr.values(store, every)[b, h])


@pytest.mark.parametrize("index", ["int16", "packed"])
def test_codes_of_a_head_take_the_same_bytes_beside_others(folder: Path, index: str) -> None:
    """Also where more atoms would need one more bit."""
    csr, _ = made(folder, window=11, outlier_atoms=3, index=index)  # 50 + 11 + 3: six bits, and one token more is seven
    alone = csr.alloc(1, 1, C, 16, "meta")
    both = csr.alloc(1, 8, C, 16, "meta")
    assert [8 * part.nbytes for part in alone] == [part.nbytes for part in both]


COMPILED = [*FIELDS, {"read_top_k": 3}, {"key_space": "rotated"}]
COMPILED_HERE = [(COMPILED[-1],)]
"""The defaults are compiled on every commit by tests/engine/test_compile.py."""


@sampling.product("fields", COMPILED, sample=COMPILED_HERE)
@pytest.mark.filterwarnings("default")  # the compiler warns about itself
def test_it_compiles_whole_and_once(folder: Path, fields: dict[str, Any]) -> None:
    csr, eager = made(folder, **fields)
    compiled = copy(eager)
    counter = CompileCounterWithBackend("aot_eager")
    rope = Quarter(C, 16)
    queries = normal(B, H, G, 16, seed=1)
    weights = normal(B, H, G, C, seed=2).softmax(-1)
    turned = None if csr.key_space == "rotated" else rope

    def step(
        store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> list[Tensor]:
        csr.write(store, keys, values, slots, write_mask, occupied)
        read = csr.keys(store, slots), csr.values(store, slice(0, C))
        return [*read, csr.score(store, queries, turned), csr.mix(store, weights)]

    fast = torch.compile(step, fullgraph=True, backend=counter)
    occupied = none_occupied()
    for seed in range(3):
        new = (*tokens(4, seed=seed), at(*range(4)) + 4 * seed, flags(*[seed != 1] * 4), occupied)
        for got, want in zip(fast(compiled, *new), step(eager, *new), strict=True):
            torch.testing.assert_close(got, want)
        assert same(compiled, eager)
        occupied = occupied.clone()
        occupied[..., :4] = True
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"coef": "fp8", "outlier_atoms": 2, "solver": "refit", "index": "packed"}])
@pytest.mark.filterwarnings("default")
def test_it_compiles_to_kernels(folder: Path, fields: dict[str, Any]) -> None:
    csr, eager = made(folder, **fields)
    compiled = copy(eager)
    new = (*tokens(C), at(*range(C)), flags(*[True] * C), none_occupied())
    csr.write(eager, *new)
    torch.compile(csr.write, fullgraph=True)(compiled, *new)
    others = (compiled.codes.key_index != eager.codes.key_index).any(-1).sum(-1)
    assert (others <= csr.outlier_atoms).all(), "the residual of a vector that is an outlier atom is noise"
    queries = normal(B, H, G, 16, seed=1)
    weights = normal(B, H, G, C, seed=2).softmax(-1)
    torch.testing.assert_close(
        torch.compile(csr.score, fullgraph=True)(eager, queries, None), csr.score(eager, queries, None)
    )
    torch.testing.assert_close(torch.compile(csr.mix, fullgraph=True)(eager, weights), csr.mix(eager, weights))
    every = slice(0, C)
    torch.testing.assert_close(csr.keys(compiled, every), csr.keys(eager, every), atol=2e-3, rtol=2e-3)
