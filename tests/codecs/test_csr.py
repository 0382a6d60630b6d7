"""CSR against its definition, and attention on codes against what is read back."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy.codecs._files import save
from kvpolicy.codecs.csr.csr import CSR, CSRCodes
from kvpolicy.protocols import Codec, ModelInfo
from tests.codecs.csr_cases import B, C, G, H, Quarter, at, made, normal, tokens, write_all, write_dictionaries


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dictionaries(tmp_path_factory.mktemp("csr"))


def test_atoms_of_other_heads_serve_no_head(folder: Path) -> None:
    csr, store = made(folder, window=3)
    assert store.atoms is not None
    write_all(csr, store, *(part.roll(1, 1) for part in store.atoms))  # each head is given another head's tokens
    first = store.codes.key_coef[:, :, :3, 0].float().abs()
    assert (first < 0.999 * store.atoms[0].roll(1, 1).norm(dim=-1)).all()


@pytest.mark.parametrize("fields", [{}, {"solver": "omp", "index": "packed"}, {"solver": "refit", "coef": "fp8"}])
@pytest.mark.parametrize("value_chunks", [1, 2, 4])
def test_online_tokens_need_one_atom(folder: Path, value_chunks: int, fields: dict[str, Any]) -> None:
    csr, store = made(folder, value_chunks=value_chunks, **fields)
    assert store.atoms is not None
    write_all(csr, store, *(-5 * part for part in store.atoms))
    coef = store.codes.key_coef.view(torch.float8_e4m3fn).float() if csr.coef == "fp8" else store.codes.key_coef
    assert (coef[:, :, :2, 0] < 0).all()
    near = 0.04 if csr.coef == "fp8" else 1e-3
    for got, want in zip((csr.keys(store, slice(0, 2)), csr.values(store, slice(0, 2))), store.atoms, strict=True):
        torch.testing.assert_close(got, -5 * want, atol=near, rtol=2 * near)
    if csr.solver == "mp":
        assert (coef[:, :, :2, 1:].abs() < 1e-5).all()


def test_packed_numbers_are_the_same_numbers(folder: Path) -> None:
    for window in (0, 2):
        wide = made(folder, window=window)
        narrow = made(folder, window=window, index="packed")
        for csr, store in (wide, narrow):
            write_all(csr, store, *tokens(C))
        assert torch.equal(wide[0].keys(wide[1], slice(0, C)), narrow[0].keys(narrow[1], slice(0, C)))
        assert torch.equal(wide[0].values(wide[1], at(5, 3)), narrow[0].values(narrow[1], at(5, 3)))
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
    backwards = at(*reversed(range(C)))
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
        (
            {},
            ModelInfo(4, H, 16),
            r"a dictionary keys\.pre for layer 3, got layers \[0, 1, 2\]; try kvpolicy calibrate csr",
        ),
        ({}, ModelInfo(3, H, 32), "head dimension of 32, got 16"),
        ({"value_chunks": 4}, ModelInfo(3, H, 18), r"multiple of CSR\.value_chunks=4, got 18"),
        (
            {"prompt_atoms": 17000},
            ModelInfo(3, H, 16),
            "at most 32768 atoms .* 17000 prompt tokens .* try fewer prompt_atoms",
        ),
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


def test_layout_and_traits() -> None:
    csr = CSR(prompt_atoms=8, residual_length=4, block_size=16)
    assert isinstance(csr, Codec)
    assert csr.layout(27) == (27, ()) and csr.layout(100) == (28, (96,))
    assert (csr.traits.pins, csr.traits.pinned, csr.traits.key_space) == ("newest", 8, "unrotated")
    assert CSR(prompt_atoms=0).traits.pins == "none"
    with pytest.raises(ValueError, match=r"CSR\.read_top_k must be 0 with key_space='rotated'.*, got 5"):
        CSR(key_space="rotated", read_top_k=5)


@pytest.mark.parametrize(
    ("fields", "bits"),
    [({}, 2.0), ({"nnz": 4}, 1.0), ({"nnz": 16, "coef": "fp8"}, 3.0), ({"nnz": 6, "value_chunks": 1}, 1.5)],
)
def test_bytes_are_known_without_memory(folder: Path, fields: dict[str, Any], bits: float) -> None:
    codes = CSR(dictionary=str(folder / "128"), **fields).alloc(2, 8, 4096, 128, "meta")
    assert all(part.device.type == "meta" for part in codes)
    scales = sum(part.nbytes for name, part in zip(CSRCodes._fields, codes, strict=True) if "scale" in name)
    assert scales == (2 * 2 * 8 * 2 if fields.get("coef") == "fp8" else 0)
    assert sum(part.nbytes for part in codes) - scales == 2 * 8 * 4096 * 128 * 2 * bits / 8
