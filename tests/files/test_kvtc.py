"""Cache files of quantized principal components: exact but for the codes, whose vectors are those of the definition."""

from __future__ import annotations

import copy
import itertools
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import kvpolicy
from kvpolicy import KVPolicyError, PolicyCache
from kvpolicy.calibration import calibrate_kvtc
from kvpolicy.codecs._files import load
from kvpolicy.hf import cache_file
from kvpolicy.hf.cache_header import read_header
from kvpolicy.hf.dense_cache import check_dense
from kvpolicy.hf.kvtc.form import KVTC
from tests.conformance.access import static_tensors
from tests.conformance.models import build
from tests.conformance.play import forward
from tests.conformance.policies import words
from tests.files.kvtc import LENGTH, SINKS, WINDOW, calibrated, filled, passed, spec
from tests.files.test_hostile_files import NASTY, changed, forge, places, stored
from tests.files.test_saved_cache import edited
from tests.reference import transform_coding as reference
from tests.sampling import each_once, product

SAME = ["full", "window@0.6", "full+quest:read=6:page=2"]
"""Policies under which all heads hold the same tokens."""
BY_LAYER = "pyramid+window@0.6"
"""A policy under which all heads of a layer hold the same tokens, and the next layer holds others."""
OTHERS = ["h2o@0.6", "uniform/adakv+h2o@0.6", "h2o+merge@0.6", "squeeze/adakv+snapkv:window=6:kernel=3@0.6"]
CODED = ["h2o+kivi:group_size=4:residual_length=4@0.5", words("h2o", "csr"), "window+tokenwise@0.6"]
PAGED = "uniform/adakv+h2o+tokenwise:residual_length=2:block_size=3@0.5"
pytestmark = pytest.mark.filterwarnings("ignore:The budget")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a calibration."""
    return tmp_path / "calibration"


@pytest.fixture
def model(folder: Path) -> Any:
    """A model with a calibration in the folder."""
    return calibrated(folder)


def held(cache: PolicyCache, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, positions and KV heads of the full-precision slots of a layer."""
    tensors = cache.policy_layers[layer].store.tensors
    if tensors.pages is not None:
        heads = tensors.pages.owner[..., None].expand_as(tensors.positions)
        return tensors.keys, tensors.values, tensors.positions, heads
    positions = tensors.positions[..., : tensors.keys.shape[2]]
    heads = torch.arange(positions.shape[1])[None, :, None].expand_as(positions)
    return tensors.keys, tensors.values, positions, heads


def coded(cache: PolicyCache, layer: int, sinks: int = SINKS, window: int = WINDOW) -> Tensor:
    """Which slots are encoded, slot by slot."""
    _, _, positions, _ = held(cache, layer)
    lengths = cache.policy_layers[layer].length.tolist()
    reserved = cache.policy_layers[layer].store.contents.reserved
    flags = torch.zeros_like(positions, dtype=torch.bool)
    for row, head, slot in [tuple(place) for place in (positions >= 0).nonzero().tolist()]:
        position = int(positions[row, head, slot])
        flags[row, head, slot] = slot >= reserved and reference.is_coded(position, lengths[row], sinks, window)
    return flags


def expected(
    cache: PolicyCache, layers: list[int], folder: Path, *, joint: bool, **exact: int
) -> dict[int, list[Tensor]]:
    """Keys and values of layers behind a file, by the definition, token by token."""
    file = load(str(folder), "kvtc")
    found: dict[int, list[Tensor]] = {layer: [t.clone() for t in held(cache, layer)[:2]] for layer in layers}
    flags = {layer: coded(cache, layer, **exact) for layer in layers}
    ropes = cache.attachment.rotations
    for number, side in enumerate(("keys", "values")):
        if joint:
            places = [[(row, slot)] for row, slot in flags[layers[0]][:, 0].nonzero().tolist()]
            heads = range(flags[layers[0]].shape[1])
            units = [
                (layers, f"joint{len(layers)}.{side}", layers[0], [[(r, h, s) for h in heads] for [(r, s)] in places])
            ]
        else:
            units = [
                ([layer], f"heads.{side}.{head}", layer, [[tuple(place)] for place in where.nonzero().tolist()])
                for layer in layers
                for head in range(cache.policy_layers[layer].store.shape.heads)
                for where in [flags[layer] & (held(cache, layer)[3] == head)]
            ]
        for unit, name, at, tokens in units:
            for token in tokens:
                own: list[Tensor] = []
                for layer in unit:
                    for place in token:
                        vector = held(cache, layer)[number][place].float()
                        where = held(cache, layer)[2][place].long().view(1, 1, 1)
                        plain = ropes[layer].unrotate(vector[None, None, None], where) if side == "keys" else vector
                        own.append(plain.flatten())
                mean, directions, groups = (
                    file.tensors[f"{name}.{part}.{at}"] for part in ("mean", "directions", "groups2")
                )
                pairs = [(size, bits) for size, bits in groups.tolist()]
                left = reference.coded(torch.cat(own)[None], mean.double(), directions, pairs)[0].float()
                parts = iter(left.chunk(len(own)))
                for layer in unit:
                    for place in token:
                        vector = next(parts)
                        where = held(cache, layer)[2][place].long().view(1, 1, 1)
                        turned = ropes[layer].rotate(vector[None, None, None], where) if side == "keys" else vector
                        found[layer][number][place] = turned.flatten()
    return found


@product("policy,layers", [*SAME, BY_LAYER, *OTHERS], [1, 2], sample=each_once([*SAME, BY_LAYER, *OTHERS], [1, 2]))
def test_vectors_are_those_of_the_definition(policy: str, layers: int, folder: Path, path: Path) -> None:
    model = calibrated(folder, layers=layers)
    with kvpolicy.attach(model, policy):
        cache, _, _ = filled(model, [LENGTH, 23])
        loaded = passed(model, cache, path, spec(folder))
        joint = policy not in OTHERS
        groups = [[0, 1]] if layers == 2 and policy in SAME else [[0], [1]]
        names = load_file(path).keys()
        assert (
            any(f".joint{len(groups[0])}." in name for name in names) == joint
            and any(".heads." in name for name in names) != joint
        )
        for group in groups:
            wanted = expected(cache, group, folder, joint=joint)
            for layer in group:
                flags = coded(cache, layer)
                occupied = held(cache, layer)[2] >= 0
                assert flags.any() and not flags.all()
                for before, after, want in zip(held(cache, layer), held(loaded, layer), wanted[layer], strict=False):
                    torch.testing.assert_close(after[flags], want[flags], atol=2e-4, rtol=1e-4)
                    assert torch.equal(after[~flags & occupied], before[~flags & occupied])
                    assert not after[~occupied].any() and not torch.equal(after[flags], before[flags])
        plain = [name for name in names if "kvtc" not in name and "codes" not in name]
        assert not any(name.endswith((".keys", ".values")) for name in plain)


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_more_bits_are_more_exact_and_every_file_is_smaller_than_with_zlib(
    ratio: int, folder: Path, model: Any, path: Path
) -> None:
    with kvpolicy.attach(model, "full"):
        cache, _, _ = filled(model, [LENGTH])
        cache.save(path, compress="zlib")
        plain = path.stat().st_size
        loaded = passed(model, cache, path, spec(folder, ratio))
        assert path.stat().st_size < plain
        keys = torch.cat([held(each, 0)[0].flatten() for each in (cache, loaded)]).view(2, -1)
        error = float((keys[0] - keys[1]).square().sum() / keys[0].square().sum())
        assert error < {1: 1e-3, 2: 0.02, 4: 0.5}[ratio]
        assert error > {1: 0, 2: 1e-4, 4: 0.02}[ratio]


@pytest.mark.parametrize("policy", [*SAME, *OTHERS, *CODED, PAGED])
def test_few_tokens_are_stored_as_they_are(policy: str, folder: Path, model: Any, path: Path) -> None:
    """Bit for bit, as without compression, and what the slots of empty ones hold is of no consequence."""
    with kvpolicy.attach(model, policy):
        cache, _, _ = filled(model, [26], steps=19)
        loaded = passed(model, cache, path, spec(folder, window=128))
    for layer, (one, other) in enumerate(zip(cache.policy_layers, loaded.policy_layers, strict=True)):
        keys, _, positions, _ = held(cache, layer)
        occupied = positions >= 0 if positions.shape == keys.shape[:3] else torch.ones(keys.shape[:3], dtype=torch.bool)
        for before, after in zip(held(cache, layer)[:2], held(loaded, layer)[:2], strict=True):
            assert torch.equal(before[occupied], after[occupied])
        assert torch.equal(one.store.tensors.positions, other.store.tensors.positions)
        assert torch.equal(one.store.tensors.length, other.store.tensors.length)


@pytest.mark.parametrize("policy", [*CODED, PAGED])
def test_codes_stay_as_they_are(policy: str, folder: Path, model: Any, path: Path) -> None:
    with kvpolicy.attach(model, policy):
        cache, _, _ = filled(model, [LENGTH, 23])
        loaded = passed(model, cache, path, spec(folder))
        names = [name for name in cache_file.read(path).tensors if ".codes." in name]
        cache.save(path)
        assert names and all(name in load_file(path) for name in names)
        for before, after in zip(cache.policy_layers, loaded.policy_layers, strict=True):
            codes = zip(_tensors(before.store.tensors.codes), _tensors(after.store.tensors.codes), strict=True)
            assert all(torch.equal(one, other) for one, other in codes)
        if policy == PAGED:  # the buffers of its heads hold the newest tokens alone
            pairs = zip(static_tensors(cache), static_tensors(loaded), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)


def test_slots_that_codes_refer_to_stay_as_they_are(folder: Path, model: Any, path: Path) -> None:
    """Their own tokens were evicted, so that nothing but the codes says that they are in use."""
    with kvpolicy.attach(model, words("h2o", "csr")):
        cache, _, _ = filled(model, [26], steps=19)
        loaded = passed(model, cache, path, spec(folder))
        for layer in range(2):
            count = cache.policy_layers[layer].store.contents.reserved
            assert count and bool((held(cache, layer)[2][..., :count] < 0).all())
            for before, after in zip(held(cache, layer)[:2], held(loaded, layer)[:2], strict=True):
                assert before[:, :, :count].all() and torch.equal(before[:, :, :count], after[:, :, :count])


def _tensors(state: Any) -> list[Tensor]:
    return [state] if isinstance(state, Tensor) else [t for part in state for t in _tensors(part)]


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.bfloat16), ("gemma2", torch.float32), ("gpt2", torch.float32)]
)
def test_families_and_dtypes(family: str, dtype: torch.dtype, folder: Path, path: Path) -> None:
    """Other dtypes, layers that no policy manages, and a model without a rotary embedding; all go on."""
    model = calibrated(folder, family, dtype=dtype)
    with kvpolicy.attach(model, "full"):
        cache, ids, mask = filled(model, [LENGTH], steps=8)
        loaded = passed(model, cache, path, spec(folder, 1))
        kept = [held(each, 0)[0].float() for each in (cache, loaded)]
        assert 0 < float((kept[0] - kept[1]).abs().max()) < 0.1 * float(kept[0].abs().max())
        assert held(loaded, 0)[0].dtype == dtype
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        ids = torch.cat([ids, ids[:, :1]], 1)
        one, other = (forward(model, ids, mask, ids.shape[1] - 1, ids.shape[1], each) for each in (cache, loaded))
        assert torch.isfinite(other).all() and float((one - other).abs().mean()) < 0.5 * float(one.std())


def test_one_token_and_a_single_head(folder: Path, path: Path) -> None:
    model = calibrated(folder, "falcon_single")
    with kvpolicy.attach(model, "full"):
        cache, _, _ = filled(model, [1], steps=0)
        loaded = passed(model, cache, path, spec(folder, sinks=0, window=0))
        wanted = expected(cache, [0], folder, joint=True, sinks=0, window=0)[0]
        for after, want in zip(held(loaded, 0), wanted, strict=False):
            torch.testing.assert_close(after[:, :, :1], want[:, :, :1], atol=2e-4, rtol=1e-4)


def test_the_calibration_is_found_next_to_the_file_and_must_be_the_same(
    tmp_path: Path, folder: Path, model: Any
) -> None:
    path = tmp_path / "caches" / "cache.safetensors"
    path.parent.mkdir()
    with kvpolicy.attach(model, "full"):
        cache, _, _ = filled(model, [LENGTH])
        first = passed(model, cache, path, spec(folder))
        shutil.move(folder, path.parent / "calibration")
        second = PolicyCache.load(model, path)
        assert all(torch.equal(*pair) for pair in zip(static_tensors(first), static_tensors(second), strict=True))
        shutil.move(path.parent / "calibration", path.parent / "moved")
        (path.parent / "calibration").mkdir()  # of the same name, and no calibration
        with pytest.raises(KVPolicyError, match=r"got none in .*; put the folder 'calibration' of that time next to"):
            PolicyCache.load(model, path)
        shutil.copytree(path.parent / "moved", folder)
        third = PolicyCache.load(model, path)
        assert all(torch.equal(*pair) for pair in zip(static_tensors(first), static_tensors(third), strict=True))
    calibrate_kvtc(model, [torch.arange(3, 40).repeat(5)], path.parent / "calibration", ratios=[2])
    with (
        kvpolicy.attach(model, "full"),
        pytest.raises(KVPolicyError, match="with the calibration that it was saved with"),
    ):
        PolicyCache.load(model, path)


@pytest.mark.parametrize("folder", [".", ".."])
def test_the_folder_of_the_calibration_has_no_name(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = calibrated(tmp_path / "calibration")
    here = tmp_path / "calibration" / ("" if folder == "." else "below")
    here.mkdir(exist_ok=True)
    monkeypatch.chdir(here)
    path = tmp_path / "caches" / "cache.safetensors"
    path.parent.mkdir()
    with kvpolicy.attach(model, "full"):
        cache, _, _ = filled(model, [LENGTH])
        assert passed(model, cache, path, f"kvtc:calibration={folder}:ratio=2").get_seq_length() == LENGTH + 2


def test_under_autocast_a_file_is_written_and_read_as_it_is_without(folder: Path, model: Any, path: Path) -> None:
    with kvpolicy.attach(model, "full"):
        cache, _, _ = filled(model, [LENGTH])
        wanted = passed(model, cache, path, spec(folder))
        before = path.read_bytes()
        with torch.autocast("cpu", torch.bfloat16):
            found = passed(model, cache, path, spec(folder))
        assert path.read_bytes() == before
        assert all(map(torch.equal, static_tensors(wanted), static_tensors(found)))


class Unnamed:
    """A form that no file could name."""

    def check(self, attachment: Any) -> None: ...

    def encode(self, content: cache_file.CacheFile, attachment: Any) -> cache_file.CacheFile:
        return content

    def decode(self, content: cache_file.CacheFile, *_: Any) -> cache_file.CacheFile:
        return content


def test_what_cannot_be_saved_is_refused(tmp_path: Path, folder: Path, model: Any, path: Path) -> None:
    other = build("qwen3", layers=2)
    config = copy.deepcopy(model.config)
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    cases = [
        (model, spec(folder, 3), r"KVTC.ratio must be one that the calibration .* was made for, 1, 2, 4, got 3"),
        (model, "kvtc", "KVTC.calibration must be a folder of kvpolicy calibrate kvtc, .* got none; try"),
        (model, "kvtc:calibration=tiny", "none ships with the package, got tiny; try"),
        (model, f"{spec(folder)}@0.2", "must have no budget"),
        (model, f"kvtc:calibration={tmp_path / 'nowhere'}", "The calibration must be a folder, got"),
        (model, KVTC, "compress must be one of None, 'zlib', 'kvtc:...'"),
        (model, "", "compress must be one of"),
        (model, Unnamed(), "compress must be one of"),
        (other, spec(folder), "must be for this model"),
        (type(model)(config).eval(), spec(folder), "must not depend on the length of the text"),
    ]
    for own, form, message in cases:
        with kvpolicy.attach(own, "full"):
            cache, _, _ = filled(own, [LENGTH])
            with pytest.raises(KVPolicyError, match=message):
                cache.save(path, compress=form)  # pyright: ignore[reportArgumentType]
    assert not path.exists()


def test_files_with_a_form_are_of_a_newer_format_and_refused_by_other_engines(
    folder: Path, model: Any, path: Path
) -> None:
    with kvpolicy.attach(model, "full"):
        cache, _, _ = filled(model, [LENGTH])
        for compress in (None, "zlib"):
            cache.save(path, compress=compress)
            assert read_header(path)["format"] == 1
        cache.save(path)
        assert check_dense(read_header(path), str(path)) == LENGTH + 2
        cache.save(path, compress=spec(folder))
        assert read_header(path)["format"] == 2
        with pytest.raises(KVPolicyError, match="must have plain keys and values, got kvtc:"):
            check_dense(read_header(path), str(path))


def codes(edit: Callable[[Tensor], Tensor]) -> Callable[[Any, dict[str, Tensor]], None]:
    """Other codes of the keys of layer 0."""

    def change(_: Any, tensors: dict[str, Tensor]) -> None:
        name = "layers.0.kvtc.joint1.keys"
        tensors[name] = edit(tensors[name])

    return change


BOMB = torch.frombuffer(bytearray(zlib.compress(bytes(2**28))), dtype=torch.uint8)
HOSTILE: list[tuple[Any, str]] = [
    (codes(lambda _: BOMB), "bytes of codes"),
    (codes(lambda t: torch.cat([t, t])), "bytes of codes"),
    (codes(lambda t: t[:-9]), "bytes of codes"),
    (codes(lambda _: torch.arange(200, dtype=torch.uint8)), "bytes of codes"),
    (lambda _, tensors: tensors.pop("layers.0.kvtc.joint1.values"), "the codes joint1.values of layer 0, got none"),
    (lambda _, tensors: tensors.pop("layers.1.kvtc.rest.keys"), "keys of 9 tokens|keys of .* got none"),
    (lambda _, tensors: tensors.update({"layers.1.kvtc.rest.keys": torch.zeros(2**20, 8)}), "keys of .* got torch"),
    (lambda _, tensors: tensors.pop("layers.0.positions"), "positions of a layer"),
    (lambda _, tensors: tensors.update({"layers.0.positions": tensors["layers.0.positions"].long()}), "positions of a"),
    (lambda _, tensors: tensors.update({"layers.0.positions": tensors["layers.0.positions"][:, :1]}), "slots of"),
    (lambda _, tensors: tensors.update({"layers.0.length": torch.zeros(3, dtype=torch.int64)}), "1 rows, got others"),
    (lambda _, tensors: tensors.update({"layers.0.owner": torch.zeros(1, 1, dtype=torch.int64)}), "owner of each page"),
    (lambda header, _: header["layers"]["0"].update(shape=[1, 2**39, 8]), "in layers.0.shape"),
    (lambda header, _: header["layers"]["0"].update(layout=[2**39, []]), "slots of"),
    (lambda header, _: header["form"].update(spec="gzip:level=3"), "must be one of kvtc, got 'gzip'"),
    (lambda header, _: header["form"].update(spec="kvtc:x=1"), "options of 'kvtc' must be among"),
    (lambda header, _: header["form"].update(calibration="0"), "with the calibration that it was saved with"),
    (lambda header, _: header["form"].pop("calibration"), "form.calibration"),
    (lambda header, _: header.pop("form"), "the policy and the model"),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_files(number: int, folder: Path, model: Any, path: Path) -> None:
    change, message = HOSTILE[number]
    with kvpolicy.attach(model, "full"):
        cache, _, _ = filled(model, [LENGTH])
        cache.save(path, compress=spec(folder))
        with pytest.raises(KVPolicyError, match=message) as raised:
            edited(path, change)
            PolicyCache.load(model, path)
        assert "\n" not in str(raised.value)


def test_headers_with_nasty_values(folder: Path, model: Any, path: Path) -> None:
    """The file is refused in one sentence, or loaded as what it was."""
    with kvpolicy.attach(model, "full"):
        cache, _, _ = filled(model, [LENGTH])
        header, tensors = stored(cache, path, compress=spec(folder))
        wanted = [t for layer in (0, 1) for t in held(PolicyCache.load(model, path), layer)]
        fields = [
            field
            for field in places(header)
            if field[0] == "form" or field[2:3] in (("shape",), ("layout",), ("reserved",))
        ]
        assert len(fields) > 6
        refused = 0
        for field, text in itertools.product(fields, [None, *NASTY]):
            forge(path, changed(header, field, text), tensors)
            try:
                found = PolicyCache.load(model, path)
            except KVPolicyError as error:
                assert "\n" not in str(error) and len(str(error)) < 800, field
                refused += 1
                continue
            assert all(map(torch.equal, wanted, [t for layer in (0, 1) for t in held(found, layer)])), (field, text)
        assert refused > 100
