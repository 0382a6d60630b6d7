"""Heads that have directions together: one latent vector, of which every head reads its part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import KIVI, KVPolicyError, LowRank, Policy, TokenWise
from kvpolicy.calibration import calibrate_lowrank
from kvpolicy.codecs import projection
from kvpolicy.codecs._files import load
from kvpolicy.protocols import ModelInfo, StageStore
from kvpolicy.testing import check, conformance
from tests.codecs.test_lowrank_ranks import DIM, HEADS, LAYERS, MODEL, written
from tests.reference.codecs._lowrank_ranks import joint_latents

B = 2
C = 9
G = 3


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return written(tmp_path / "bases", joint=True)


def filled(codec: LowRank) -> tuple[StageStore, Tensor, Tensor]:
    """A layer whose slots hold tokens, of which the order is not that of the slots, and the tokens by slot."""
    generator = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, B, HEADS, C, DIM, generator=generator)
    store = StageStore(codec.alloc(B, HEADS, C, DIM, "cpu"), codec.load_calibration(0, "cpu"))
    order = torch.randperm(C, generator=generator).expand(B, HEADS, -1)
    everything = torch.ones(B, HEADS, C, dtype=torch.bool)
    codec.write(store, keys, values, order, everything, ~everything)
    index = order.argsort(-1)[..., None].expand_as(keys)
    return store, keys.gather(2, index), values.gather(2, index)


@pytest.mark.parametrize("key_space", ["rotated", "unrotated"])
def test_latent_vectors_are_those_of_all_heads_as_one(folder: str, key_space: Any) -> None:
    """The slow version goes number by number over the long vector."""
    codec = LowRank(rank=3, value_rank=2, head_group=2, key_space=key_space, calibration=folder)
    store, keys, values = filled(codec)
    tensors = load(folder, "lowrank").tensors
    sides = (("keys.pre" if key_space == "unrotated" else "keys.post", 3, keys), ("values", 2, values))
    for (part, rank, given), codes, read in zip(sides, store.codes, (codec.keys, codec.values), strict=True):
        held = codes.keys if part != "values" else codes.values
        assert held.shape == (B, 1, C, 2 * rank)
        directions = projection.orthonormal(tensors[f"{part}.joint2.basis.0"])[0].mT[: 2 * rank].tolist()
        means = tensors[f"{part}.joint2.mean.0"].view(HEADS, DIM).double().tolist()
        decoded = read(store, slice(0, C))
        for row in range(B):
            for slot in range(C):
                latents, want = joint_latents(given[row, :, slot].double().tolist(), means, directions)
                assert held[row, 0, slot].tolist() == pytest.approx(latents, rel=1e-3, abs=2e-3)
                torch.testing.assert_close(decoded[row, :, slot], torch.tensor(want), atol=6e-3, rtol=0)


BASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tokenwise": {"base": TokenWise(bits=8)},
    "kivi": {"base": KIVI(bits=8, group_size=3)},
}


@pytest.mark.parametrize("options", [*BASES.values(), {"basis": "scores"}], ids=[*BASES, "scores"])
def test_products_are_those_of_decoded_vectors(folder: str, options: dict[str, Any]) -> None:
    codec = LowRank(rank=4, value_rank=2, head_group=2, calibration=folder, **options)
    store, _, _ = filled(codec)
    decoded = codec.keys(store, slice(0, C)), codec.values(store, slice(0, C))
    generator = torch.Generator().manual_seed(2)
    queries = torch.randn(B, HEADS, G, DIM, generator=generator)
    weights = torch.rand(B, HEADS, G, C, generator=generator).softmax(-1)
    torch.testing.assert_close(codec.score(store, queries, None), queries @ decoded[0].mT, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(codec.mix(store, weights), weights @ decoded[1], atol=1e-5, rtol=1e-5)
    # Heads may read different slots.
    some = torch.stack([torch.randperm(C, generator=generator)[:4] for _ in range(B * HEADS)]).view(B, HEADS, 4)
    index = some[..., None].expand(-1, -1, -1, DIM)
    assert torch.equal(codec.keys(store, some), decoded[0].gather(2, index))
    assert torch.equal(codec.values(store, some), decoded[1].gather(2, index))
    part = slice(3, 6)
    assert torch.equal(codec.keys(store, part), decoded[0][:, :, part])


@pytest.mark.parametrize("basis", ["keys", "scores"])
def test_all_directions_lose_nothing_but_the_rounding(folder: str, basis: Any) -> None:
    codec = LowRank(rank=DIM, head_group=2, basis=basis, calibration=folder)
    store, keys, values = filled(codec)
    torch.testing.assert_close(codec.keys(store, slice(0, C)), keys, atol=2e-2, rtol=0)
    torch.testing.assert_close(codec.values(store, slice(0, C)), values, atol=1e-2, rtol=0)


def test_bytes_are_those_of_heads_alone(folder: str) -> None:
    """As many directions for each head on average, whether alone or together."""
    joint, alone = (LowRank(rank=3, head_group=group, calibration=folder) for group in (2, 1))
    sizes = [sum(t.nbytes for side in codec.alloc(B, HEADS, C, DIM, "cpu") for t in side) for codec in (joint, alone)]
    assert sizes[0] == sizes[1] == B * HEADS * C * 2 * 3 * 2


def test_ranks_are_divided_of_joint_directions(folder: str) -> None:
    codec = LowRank(rank=3, ranks="energy", head_group=2, calibration=folder)
    found: dict[int, Any] = dict(codec.by_layer(MODEL))
    assert sum(own.rank + own.value_rank for own in found.values()) == LAYERS * 6
    assert all(own.head_group == 2 for own in found.values()) and len({own.rank for own in found.values()}) > 1
    codec.check(MODEL)


def test_a_rank_that_holds_whole_groups_reads_its_own(tmp_path: Path) -> None:
    """Of four heads in groups of two, the second half has the second basis."""
    from kvpolicy.codecs._files import save

    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, Tensor] = {}
    for part in ("keys.post", "values"):
        tensors[f"{part}.joint2.basis.0"] = torch.linalg.qr(torch.randn(2, 16, 16, generator=generator)).Q.half()
        tensors[f"{part}.joint2.mean.0"] = torch.randn(2, 16, generator=generator)
    save(tmp_path, "lowrank", {"model": None, "head_dim": 8}, tensors)
    codec = LowRank(rank=2, head_group=2, calibration=str(tmp_path))
    every = codec.load_calibration(0, "cpu")
    half = codec.load_calibration(0, "cpu", slice(2, 4))
    assert all(torch.equal(part, whole[:, 2:]) for part, whole in zip(half, every, strict=True))
    with pytest.raises(KVPolicyError, match="must divide the KV heads of every rank, got 2 for the heads 1 to 1"):
        codec.load_calibration(0, "cpu", slice(1, 2))


@pytest.mark.parametrize(
    ("options", "info", "message"),
    [
        ({"head_group": 0}, MODEL, "head_group must be at least 1, got 0"),
        ({"head_group": 2}, ModelInfo(LAYERS, 3, DIM), "head_group must divide the model's 3 KV heads, got 2; try"),
        (
            {"head_group": 2},
            ModelInfo(LAYERS, 4, DIM),
            "must be for 4 KV heads of dimension 8, as the model has, got 2",
        ),
        ({"head_group": 4}, ModelInfo(LAYERS, 4, DIM), "must contain keys.post.joint4.mean .* --head-groups 4"),
    ],
)
def test_models_that_are_refused(folder: str, options: dict[str, Any], info: ModelInfo, message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        LowRank(calibration=folder, **options).check(info)


@pytest.mark.parametrize(
    "options",
    [
        {"head_group": 2, "ranks": "fisher", "key_space": "unrotated", "residual_length": 8, "block_size": 8},
        {"head_group": 2, "base": TokenWise(bits=8, residual_length=8, block_size=8)},
    ],
)
def test_the_rules_of_codecs_hold(tmp_path: Path, options: dict[str, Any]) -> None:
    texts = [torch.randint(3, 40, (70,), generator=torch.Generator().manual_seed(n)) for n in range(2)]
    calibrate_lowrank(conformance._model(), texts, tmp_path, head_groups=[2], fisher=True)
    check(LowRank(rank=8, calibration=str(tmp_path), **options))


@pytest.mark.parametrize("other", ["full", "window@0.5", "streaming@0.5", "tova@0.5"])
def test_selectors_that_keep_the_same_in_all_heads(other: str) -> None:
    name, _, budget = other.partition("@")
    codec: Any = Policy.parse(f"{name}+lowrank:head_group=2" + f"@{budget}" * bool(budget)).codec
    assert codec.head_group == 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("snapkv+lowrank:head_group=2@0.5", "must keep the same tokens in every head .* got snapkv"),
        ("h2o+lowrank:head_group=2@0.5", "must keep the same tokens in every head"),
        ("uniform/adakv+window+lowrank:head_group=2@0.5", "to be combined with adakv"),
        ("window+lowrank:head_group=2+labels@0.5", "The reader must read every token"),
    ],
)
def test_parts_that_are_refused(spec: str, message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        Policy.parse(spec)
