"""CSR: attention on codes against what is read back, its files, and what eviction and compilation ask of it.

Its slow version is in tests/conformance/test_codes.py, and matching pursuit in test_pursuit.py.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from kvpolicy.codecs._files import save
from kvpolicy.codecs.csr.csr import CSR, CSRCodes
from kvpolicy.protocols import At, ModelInfo, StageStore
from tests import sampling
from tests.codecs.stages import B, G, H, at, copy, flags, same

C = 12


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def write_dictionaries(path: Path) -> Path:
    """Random dictionaries of several head dimensions; layers 1 and 2 share theirs."""
    for dim in (16, 32):
        sides = {"keys.pre": dim, "keys.post": dim, **{f"values.sn{sn}": dim // sn for sn in (1, 2, 4)}}
        groups = {name: [[0], [1, 2]] for name in sides} | {"values.sn4": [[0, 1, 2, 3]]}
        tensors = {
            f"{name}.{j}": torch.nn.functional.normalize(normal(width, 50 + 20 * j, seed=j), dim=0).half()
            for name, width in sides.items()
            for j in range(len(groups[name]))
        }
        save(path / str(dim), "csr", {"model": None, "head_dim": dim, "groups": groups}, tensors)
    return path


def made(folder: Path, dim: int = 16, window: int = 2, layer_idx: int = 0, **fields: Any) -> tuple[CSR, StageStore]:
    fields = {"prompt_atoms": window, "residual_length": 0, "block_size": 4, **fields}
    csr = CSR(dictionary=str(folder / str(dim)), **fields)
    atoms = (normal(B, H, window, dim, seed=90), normal(B, H, window, dim, seed=91)) if window else None
    return csr, StageStore(csr.alloc(B, H, C, dim, "cpu"), csr.load_calibration(layer_idx, "cpu"), atoms)


def tokens(count: int, dim: int = 16, seed: int = 0) -> tuple[Tensor, Tensor]:
    return normal(B, H, count, dim, seed=10 + seed), normal(B, H, count, dim, seed=50 + seed) * 3


def none_occupied() -> Tensor:
    return torch.zeros(B, H, C, dtype=torch.bool)


def write_all(csr: CSR, store: StageStore, keys: Tensor, values: Tensor) -> None:
    count = keys.shape[2]
    csr.write(store, keys, values, at(range(count)), flags([True] * count), none_occupied())


def part(store: StageStore, b: slice, h: slice) -> StageStore:
    """Some rows and KV heads, as if they were alone."""
    atoms = None if store.atoms is None else (store.atoms[0][b, h], store.atoms[1][b, h])
    return StageStore(CSRCodes(*(codes[b, h].clone() for codes in store.codes)), store.calibration, atoms)


class Quarter:
    """A rope that swaps the halves of a key by a token's place, as a rotary embedding does."""

    def __init__(self, slots: int, dim: int, held: int | None = None) -> None:
        self.occupied = (torch.arange(slots) < (slots if held is None else held)).expand(B, H, -1)
        self.angle = torch.linspace(0, 2, slots).expand(B, H, -1)
        self.half = dim // 2

    def _turned(self, x: Tensor, angle: Tensor) -> Tensor:
        one, two = x.split(self.half, -1)
        cos = angle.cos()[..., None]
        sin = angle.sin()[..., None]
        return torch.cat([one * cos - two * sin, one * sin + two * cos], -1)

    def keys(self, keys: Tensor, at: At) -> Tensor:
        return self._turned(keys, self.angle[..., at] if isinstance(at, slice) else self.angle.gather(-1, at))

    def queries(self, queries: Tensor, distance: int) -> Tensor:
        return self._turned(queries, torch.full(queries.shape[:3], -float(distance)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dictionaries(tmp_path_factory.mktemp("csr"))


def test_packed_numbers_are_the_same_numbers(folder: Path) -> None:
    for window in (0, 2):
        wide = made(folder, window=window)
        narrow = made(folder, window=window, index="packed")
        for csr, store in (wide, narrow):
            write_all(csr, store, *tokens(C))
        assert torch.equal(wide[0].keys(wide[1], slice(0, C)), narrow[0].keys(narrow[1], slice(0, C)))
        assert torch.equal(wide[0].values(wide[1], at([5, 3])), narrow[0].values(narrow[1], at([5, 3])))
        assert narrow[1].codes.key_index.dtype == torch.uint8 and narrow[1].codes.key_index.shape[-1] == 7  # 8 x 7 bits


@pytest.mark.parametrize(
    "fields", [{}, {"coef": "fp8", "outlier_atoms": 2}, {"key_space": "rotated", "value_chunks": 4, "index": "packed"}]
)
def test_attention_on_codes_is_that_on_what_is_read(
    folder: Path, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpolicy.codecs.common.CHUNK_SLOTS", 5)
    csr, store = made(folder, **fields)
    write_all(csr, store, *tokens(C))
    keys = csr.keys(store, slice(0, C))
    values = csr.values(store, slice(0, C))
    assert keys.dtype == values.dtype == torch.float32
    backwards = at(range(C)[::-1])
    assert torch.equal(csr.keys(store, backwards).flip(2), keys)
    assert torch.equal(csr.values(store, backwards).flip(2), values)
    queries = normal(B, H, G, 16, seed=1)
    weights = normal(B, H, G, C, seed=2).softmax(-1)
    rope = Quarter(C, 16)
    torch.testing.assert_close(csr.score(store, queries, None), queries @ keys.mT)
    torch.testing.assert_close(csr.score(store, queries, rope), queries @ rope.keys(keys, slice(0, C)).mT)
    torch.testing.assert_close(csr.mix(store, weights), weights @ values)
    for half in (torch.bfloat16, torch.float16):
        assert csr.score(store, queries.to(half), rope).dtype == torch.float32
        torch.testing.assert_close(csr.mix(store, weights.to(half)), weights.to(half).float() @ values)


def test_the_best_slots_alone_are_read_exactly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpolicy.codecs.csr.csr.CHUNK_SLOTS", 2)
    csr, store = made(folder, read_top_k=3, approx_distance=1)
    keys, values = tokens(9)
    write_all(csr, store, keys, values)
    queries = normal(B, H, G, 16, seed=1)
    rope = Quarter(C, 16, held=9)
    read = csr.keys(store, slice(0, C))
    rough = (rope.queries(queries, 1) @ read.mT).amax(2)[..., :9]
    chosen = torch.zeros(B, H, C, dtype=torch.bool).scatter(-1, rough.topk(3).indices, True)
    exact = queries @ rope.keys(read, slice(0, C)).mT
    got = csr.score(store, queries, rope)
    torch.testing.assert_close(got, exact.masked_fill(~chosen[:, :, None], -torch.inf))
    every = CSR(dictionary=csr.dictionary, prompt_atoms=2, read_top_k=C)
    torch.testing.assert_close(every.score(store, queries, rope), exact)


def test_an_empty_slot_displaces_no_other(folder: Path) -> None:
    csr, store = made(folder, read_top_k=3, approx_distance=0)
    key = tokens(1)[0]
    write_all(csr, store, key.expand(-1, -1, 9, -1), tokens(9)[1])
    got = csr.score(store, -key.expand(-1, -1, G, -1), Quarter(C, 16, held=9))  # below the 0 of an empty slot
    assert got[..., :9].isfinite().sum() == B * H * G * 3 and not got[..., 9:].isfinite().any()


def test_layers_of_a_group_share_a_dictionary(folder: Path) -> None:
    csr, _ = made(folder)
    one = csr.load_calibration(1, "cpu")
    two = csr.load_calibration(2, torch.device("cpu"))
    zero = csr.load_calibration(0, "cpu")
    assert one.keys is two.keys and one.values is two.values and one.keys is not zero.keys
    assert zero.keys.shape == one.keys.shape == (70, 16), "filled up with zero atoms"
    assert not zero.keys[50:].any()
    torch.testing.assert_close(one.keys.norm(dim=-1), torch.ones(70))
    assert one.values.shape == (70, 8)


@pytest.mark.parametrize(
    ("fields", "model", "message"),
    [
        ({}, ModelInfo(4, H, 16), r"keys\.pre for layer 3, got layers \[0, 1, 2\]; try kvpolicy calibrate csr"),
        ({}, ModelInfo(3, H, 32), "head dimension of 32, got 16"),
        ({"value_chunks": 4}, ModelInfo(3, H, 18), r"multiple of CSR\.value_chunks=4, got 18"),
        ({"prompt_atoms": 17000}, ModelInfo(3, H, 16), "at most 32768 atoms .* 17000 prompt tokens .* try fewer"),
        ({"outlier_atoms": 2**16, "index": "packed"}, ModelInfo(3, H, 16), "at most 65536 atoms"),
        ({"dictionary": "/no/such/folder"}, ModelInfo(3, H, 16), "must be a folder"),
    ],
)
def test_it_refuses_what_it_cannot_code(folder: Path, fields: dict[str, Any], model: ModelInfo, message: str) -> None:
    fields = {"dictionary": str(folder / "16"), **fields}
    with pytest.raises(ValueError, match=message):
        CSR(**fields).check(model)
    CSR(dictionary=str(folder / "16")).check(ModelInfo(3, H, 16))


def test_dictionaries_that_were_replaced_are_released(tmp_path: Path) -> None:
    names = ("keys.pre", "values.sn2")
    groups: dict[str, Any] = {"model": None, "groups": {name: [[0]] for name in names}}

    def calibrate(atoms: int) -> Tensor:
        tensors = {"keys.pre.0": torch.eye(16)[:, :atoms], "values.sn2.0": torch.eye(8)[:, :atoms]}
        save(tmp_path, "csr", groups, tensors)
        return CSR(dictionary=str(tmp_path)).load_calibration(0, "cpu").keys

    old = calibrate(6)
    held = weakref.ref(old)
    assert len(old) == 6
    del old
    assert held() is not None, "as long as the calibration is the one on disk"
    assert len(calibrate(7)) == 7
    gc.collect()
    assert held() is None


def test_a_dictionary_that_is_missing(folder: Path, tmp_path: Path) -> None:
    save(tmp_path, "csr", {"model": None, "groups": {"keys.pre": [[0]]}}, {"keys.pre.0": torch.eye(16)})
    with pytest.raises(ValueError, match=r"dictionary values\.sn2 for layer 0, got none; .* kvpolicy calibrate csr"):
        CSR(dictionary=str(tmp_path)).load_calibration(0, "cpu")
    with pytest.raises(ValueError, match=r"dictionaries values\.sn2, got none; .* kvpolicy calibrate csr"):
        CSR(dictionary=str(tmp_path), index="packed").alloc(1, 1, 4, 16, "meta")
    groups = {"keys.pre": [[0]], "values.sn2": [[0]]}
    tensors = {"keys.pre.0": torch.eye(16), "values.sn2.0": torch.eye(16)}
    save(tmp_path, "csr", {"model": None, "groups": groups}, tensors)
    with pytest.raises(ValueError, match="vectors of 8 elements, as the model has, got 16"):
        CSR(dictionary=str(tmp_path)).check(ModelInfo(1, 1, 16))


def test_the_last_atom_that_an_index_can_address(folder: Path) -> None:
    """2**15 atoms of values: each of the prompt's vectors is two."""
    csr, store = made(folder, window=(2**15 - 70) // 2)
    csr.check(ModelInfo(3, H, 16))
    assert store.atoms is not None
    keys, values = (atoms[:, :, -1:] for atoms in store.atoms)
    csr.write(store, keys, values, at([0]), flags([True]), none_occupied())
    assert store.codes.value_index[:, :, 0].max() == 2**15 - 1
    torch.testing.assert_close(csr.values(store, slice(0, 1)), values, atol=0.05, rtol=0.05)


def test_more_outlier_atoms_than_vectors(folder: Path) -> None:
    csr, store = made(folder, outlier_atoms=40)
    write_all(csr, store, *tokens(C))
    write_all(csr, store, *tokens(2))
    assert store.codes.key_outlier_atoms[:, :, :2].any(-1).all() and not store.codes.key_outlier_atoms[:, :, 2:].any()
    torch.testing.assert_close(csr.keys(store, slice(0, 2)), tokens(2)[0], atol=5e-3, rtol=5e-3)


def test_nothing_to_write(folder: Path) -> None:
    csr, store = made(folder)
    before = copy(store)
    empty = torch.zeros(B, H, 0, 16)
    write_all(csr, store, empty, empty)
    assert same(store, before) and csr.keys(store, slice(0, 0)).shape == (B, H, 0, 16)


ONLY_ONE: list[dict[str, Any]] = [
    {**one, **other}
    for one in ({}, {"solver": "refit"}, {"solver": "omp", "value_chunks": 1}, {"outlier_atoms": 3, "value_chunks": 4})
    for other in ({"index": "packed"}, {"window": 0}, {"outlier_atoms": 2, "window": 4, "coef": "fp8"})
] + [{}, {"key_space": "rotated", "index": "packed"}, {"outlier_atoms": 40}]
COUNTS = [C, 4, 1]


@sampling.product("fields,count", ONLY_ONE, COUNTS, sample=sampling.each_once(ONLY_ONE, COUNTS))
def test_a_head_alone_has_the_codes_that_it_has_beside_others(folder: Path, fields: dict[str, Any], count: int) -> None:
    """To the last bit: a rank of several holds the codes of its heads that one rank would hold."""
    csr, store = made(folder, 32, **fields)
    empty = copy(store)
    occupied = none_occupied()
    some = flags([True] * count).clone()
    some[0, 2, : count // 2] = False
    occupied[1, 1, C - 1] = True  # so that its outlier atoms and scale stay
    new = *tokens(count, 32), at(range(count)), some
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


COMPILED: list[dict[str, Any]] = [
    *({}, {"coef": "fp8", "outlier_atoms": 3}, {"solver": "omp", "index": "packed"}),
    *({"solver": "refit", "value_chunks": 4}, {"read_top_k": 3}, {"key_space": "rotated"}),
]
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
        new = (*tokens(4, seed=seed), at(range(4)) + 4 * seed, flags([seed != 1] * 4), occupied)
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
    new = (*tokens(C), at(range(C)), flags([True] * C), none_occupied())
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
