"""LowRank: its directions, the ranks of layers, heads that have directions together, and what it refuses.

Its stages are in tests/codecs/test_every_stage.py, and its slow version in tests/conformance/test_codes.py.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import KIVI, KVPolicyError, LowRank, Policy, TokenWise, TurboQuant
from kvpolicy.calibration import calibrate_lowrank
from kvpolicy.codecs import projection
from kvpolicy.codecs._files import load, save
from kvpolicy.codecs.lowrank.ranks import by_weight, equal_energy, least_energy, load_ranks
from kvpolicy.codecs.projection import Basis
from kvpolicy.policy import ModelPolicy, for_model
from kvpolicy.protocols import ModelInfo, StageStore
from kvpolicy.testing import check, conformance
from kvpolicy.tuning.candidates import check_candidates
from tests.codecs.stages import H, lowrank_files
from tests.reference.codecs import _lowrank_ranks as slow

D = 16


def test_a_basis_for_scores_has_the_least_error_of_products(tmp_path: Path) -> None:
    """Keys and queries with the calibrated moments: the error is that of the eigenvalues left out, and the least."""
    folder = lowrank_files(tmp_path, D, heads=1)
    tensors = load(folder, "lowrank").tensors
    keys, queries = (
        (projection.orthonormal(tensors[f"{part}.basis.0"]), tensors[f"{part}.energy.0"].double())
        for part in ("keys.post", "queries")
    )
    covariance, moment = ((basis * energy[:, None]) @ basis.mT for basis, energy in (keys, queries))
    errors: dict[str, float] = {}
    for name in ("keys", "scores"):
        given = projection.of_keys(Basis(folder, kind=name), 4, 0, "cpu")
        lost = torch.eye(D).double() - (given.encode[0] @ given.decode[0]).double()
        errors[name] = float(torch.einsum("hij,hjk->hik", moment, lost.mT @ covariance @ lost).diagonal(0, 1, 2).sum())
    values, vectors = torch.linalg.eigh(moment)
    root = (vectors * values.sqrt()[:, None]) @ vectors.mT
    least = float(torch.linalg.eigvalsh(root @ covariance @ root)[0, : D - 4].sum())
    assert errors["scores"] == pytest.approx(least, rel=1e-4)
    assert errors["scores"] < 0.9 * errors["keys"]


def test_unequal_ranks_take_no_bytes_for_the_other_side(tmp_path: Path) -> None:
    codec = LowRank(rank=7, value_rank=2, calibration=lowrank_files(tmp_path, D))
    codes: Any = codec.alloc(1, 1, 10, D, "cpu")
    assert codes.keys.keys.shape == (1, 1, 10, 7) and codes.values.values.shape == (1, 1, 10, 2)
    assert codes.keys.values.numel() == codes.values.keys.numel() == 0


def test_one_basis_may_serve_all_heads(tmp_path: Path) -> None:
    codec = LowRank(rank=4, calibration=lowrank_files(tmp_path / "shared", D, heads=1))
    codec.check(ModelInfo(1, 6, D))
    assert codec.load_calibration(0, "cpu", slice(3, 6)).key_encode.shape == (1, 1, D, 4)
    codec = LowRank(rank=4, calibration=lowrank_files(tmp_path / "own", D, heads=6))
    one, every = (codec.load_calibration(0, "cpu", heads).key_encode for heads in (slice(3, 6), slice(0, 6)))
    assert torch.equal(one, every[:, 3:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be"),
        ({"basis": "scores", "key_space": "unrotated"}, "basis must be 'keys' with key_space='unrotated'"),
        ({"base": TokenWise(), "block_size": 3}, "must be auto over TokenWise"),
        ({"calibration": ""}, "calibration must be a folder"),
        ({"head_group": 0}, "head_group must be at least 1, got 0"),
        ({"ranks": "ranks.json", "rank": 4}, "must not be given with a file of ranks"),
        ({"ranks": "ranks.json", "value_rank": 4}, "must not be given with a file of ranks"),
        ({"ranks": "ranks.json", "rank_multiple": 2}, "must not be given with a file of ranks"),
        ({"rank_multiple": 2}, "rank_multiple must be 1 with ranks='same', which divides none, got 2"),
        ({"ranks": ""}, "ranks must be same, energy, threshold, fisher or a file, got ''"),
    ],
)
def test_parameters(options: dict[str, Any], message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        LowRank(**options)


@pytest.mark.parametrize(
    ("options", "info", "message"),
    [
        ({"rank": 17}, ModelInfo(1, H, D), "LowRank.rank must be at most the head dimension, 16, got 17"),
        ({"value_rank": 17}, ModelInfo(1, H, D), "LowRank.value_rank must be at most"),
        ({}, ModelInfo(1, H, 32), "for a head dimension of 32, got 16"),
        ({}, ModelInfo(1, H + 1, D), "must be for 4 KV heads of dimension 16, as the model has, got 3"),
        ({}, ModelInfo(2, H, D), "must contain values.mean for layer 1|must contain keys.post.mean for layer 1"),
        ({"base": TurboQuant(bits=4), "rank": 5}, ModelInfo(1, H, D), "multiple of 2 for TurboQuant.bits=4, got 5"),
        ({"ranks": "energi"}, ModelInfo(1, H, D), "ranks must be same, .* fisher or a file, got 'energi'"),
        ({"ranks": "energy", "rank_multiple": 3}, ModelInfo(1, H, D), "multiple must divide the head dimension, 16"),
        ({"ranks": "energy", "rank": 5, "rank_multiple": 8}, ModelInfo(1, H, D), "at most the mean rank, got 8"),
        ({"ranks": "energy", "rank": 17}, ModelInfo(1, H, D), "rank must be at most the head dimension"),
        (
            {"ranks": "energy", "rank": 3, "base": TurboQuant(bits=4)},
            ModelInfo(1, H, D),
            "be a multiple of 2 for Turbo",
        ),
        ({"ranks": "fisher"}, ModelInfo(1, H, D), "must contain the Fisher information of layer 0 .*--fisher"),
        ({"head_group": 2}, ModelInfo(1, 3, D), "head_group must divide the model's 3 KV heads, got 2; try"),
        ({"head_group": 4}, ModelInfo(1, 4, D), "must contain keys.post.joint4.mean .* --head-groups 4"),
    ],
)
def test_models(tmp_path: Path, options: dict[str, Any], info: ModelInfo, message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        LowRank(calibration=lowrank_files(tmp_path, D), **options).check(info)


def test_where_a_layer_stands_alone_ranks_are_given(tmp_path: Path) -> None:
    spec = f"snapkv+lowrank:ranks=energy:calibration={lowrank_files(tmp_path, D)}@0.5"
    with pytest.raises(KVPolicyError, match=r"must not depend on the other layers, .* try ranks=same with a rank"):
        Policy.by_layer([spec, spec, spec], budget=0.5)
    with pytest.raises(KVPolicyError, match="codec of a candidate must not depend on the other layers"):
        check_candidates([spec], ModelInfo(3, H, D))


@pytest.mark.parametrize("selector", ["full@1.0", "window@0.5", "streaming@0.5", "tova@0.5"])
def test_selectors_that_keep_the_same_in_all_heads(selector: str) -> None:
    codec: Any = Policy.parse(selector.replace("@", "+lowrank:head_group=2@")).codec
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


# ---- Ranks of layers

HEADS = 2
DIM = 8
LAYERS = 3
MODEL = ModelInfo(LAYERS, HEADS, DIM)


def written(folder: Path, *, fisher: bool = True, layers: int = LAYERS, joint: bool = False) -> str:
    """Random bases; the energy of keys falls slower from layer to layer, and that of values is all the same."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for layer in range(layers):
        for part in ("keys.pre", "keys.post", "values", "queries"):
            for name, heads, width in (("", HEADS, DIM), *([(".joint2", 1, 2 * DIM)] if joint else [])):
                basis = torch.linalg.qr(torch.randn(heads, width, width, generator=generator)).Q
                falls = {"values": 0.8, "queries": 0.7}.get(part, 0.3 + 0.2 * layer)
                tensors[f"{part}{name}.basis.{layer}"] = basis.half()
                tensors[f"{part}{name}.energy.{layer}"] = (3 + layer) * falls ** torch.arange(width).expand(heads, -1)
                tensors[f"{part}{name}.mean.{layer}"] = torch.randn(heads, width, generator=generator)
        if fisher:
            tensors[f"fisher.{layer}"] = torch.tensor([1.0, 4.0]) * 4**layer
    save(folder, "lowrank", {"model": None, "head_dim": DIM}, tensors)
    return str(folder)


def falling(sides: int, directions: int, seed: int, *, ties: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(sides, directions, generator=generator, dtype=torch.float64) ** 3
    drawn = (4 * drawn).round() + 0.0 if ties else drawn
    drawn = drawn.sort(-1, descending=True).values
    return drawn / drawn.sum(-1, keepdim=True).clamp_min(1e-300)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("sides", "directions"), [(1, 1), (1, 5), (2, 1), (3, 4), (4, 3)])
def test_no_other_division_leaves_out_less_or_keeps_more(sides: int, directions: int, ties: bool) -> None:
    for seed in range(3):
        shares = falling(sides, directions, seed, ties=ties)
        rows = shares.tolist()
        for total in range(sides, sides * directions + 1):
            by_energy, by_threshold = (divide(shares, total) for divide in (least_energy, equal_energy))
            for ranks in (by_energy, by_threshold):
                assert sum(ranks) == total and all(1 <= rank <= directions for rank in ranks)
            assert slow.left_out(rows, tuple(by_energy)) == pytest.approx(slow.least_energy(rows, total))
            least = slow.kept(rows, tuple(by_threshold))
            assert (least[0] if least else math.inf) == pytest.approx(slow.largest_threshold(rows, total))


def test_ties_go_to_the_earlier_side() -> None:
    shares = torch.full((3, 4), 0.25)
    assert least_energy(shares, 6) == [4, 1, 1] and equal_energy(shares, 5) == [2, 2, 1]


@pytest.mark.parametrize(
    ("weights", "total", "most"),
    [([1.0, 2.0, 3.0], 12, 8), ([0.0, 1.0], 7, 8), ([0.0, 0.0, 0.0], 9, 4), ([1.0, 100.0, 1.0], 15, 8), ([5.0], 3, 3)],
)
def test_weights_divide_in_proportion(weights: list[float], total: int, most: int) -> None:
    got = by_weight(torch.tensor(weights), total, most)
    want = slow.proportional(weights, total, most)
    assert sum(got) == total and all(abs(rank - exact) < 1 for rank, exact in zip(got, want, strict=True))


@pytest.mark.parametrize("ranks", ["energy", "threshold", "fisher"])
@pytest.mark.parametrize("options", [{}, {"value_rank": 2}, {"rank_multiple": 2}, {"key_space": "unrotated"}])
def test_layers_have_the_ranks_of_the_division(tmp_path: Path, ranks: str, options: dict[str, Any]) -> None:
    codec = LowRank(rank=4, ranks=ranks, calibration=written(tmp_path), **options)
    layers = 2  # few enough to try every division
    found: dict[int, Any] = dict(codec.by_layer(ModelInfo(layers, HEADS, DIM)))
    step = codec.rank_multiple
    total = layers * (4 + (options.get("value_rank") or 4)) // step
    sides: list[list[float]] = []
    for layer in range(layers):
        for part in ("keys.pre" if codec.key_space == "unrotated" else "keys.post", "values"):
            energy = load(codec.calibration, "lowrank").tensors[f"{part}.energy.{layer}"].double().sum(0).tolist()
            sides.append([math.fsum(energy[at : at + step]) / math.fsum(energy) for at in range(0, DIM, step)])
    got = tuple(rank // step for layer in range(layers) for rank in (found[layer].rank, found[layer].value_rank))
    assert sum(got) == total and len({*got}) > 1
    assert all(own.ranks == "same" and own.rank % step == own.value_rank % step == 0 for own in found.values())
    if ranks == "energy":
        assert slow.left_out(sides, got) == pytest.approx(slow.least_energy(sides, total))
    elif ranks == "threshold":
        assert slow.kept(sides, got)[0] == pytest.approx(slow.largest_threshold(sides, total))
    else:
        want = slow.proportional([1.0, 2.0, 2.0, 4.0], total, DIM // step)  # roots of the information
        assert all(abs(rank - exact) < 1 for rank, exact in zip(got, want, strict=True))


@pytest.mark.parametrize("joint", [False, True])
def test_energies_for_scores_are_what_products_lose(tmp_path: Path, joint: bool) -> None:
    """Of keys and queries with the calibrated moments, the error without the last directions is their energy."""
    basis = Basis(written(tmp_path, joint=True), kind="scores", group=2 if joint else 1)
    name, width = (".joint2", 2 * DIM) if joint else ("", DIM)
    tensors = load(basis.folder, "lowrank").tensors
    components = projection.orthonormal(tensors[f"keys.post{name}.basis.1"])
    covariance = (components * tensors[f"keys.post{name}.energy.1"].double()[:, None]) @ components.mT
    of_queries = projection.orthonormal(tensors["queries.basis.1"])
    moments = (of_queries * tensors["queries.energy.1"].double()[:, None]) @ of_queries.mT
    energy, _ = projection.energies(basis, 1)
    for rank in (1, 3, DIM - 1):
        given = projection.of_keys(basis, rank, 1, "cpu")
        kept_directions = rank * basis.group
        lost = torch.zeros(len(components), dtype=torch.float64)
        for head in range(HEADS):
            # What the head reads of the long vector of its group, less what it is.
            group = head // basis.group
            members = range(group * basis.group, (group + 1) * basis.group)
            read = torch.cat([given.encode[0, other].double() for other in members]) @ given.decode[0, head].double()
            place = (head % basis.group) * DIM
            miss = (read - torch.eye(width, dtype=torch.float64)[:, place : place + DIM]).mT
            lost[group] += torch.trace(moments[head] @ miss @ covariance[group] @ miss.mT)
        torch.testing.assert_close(lost, energy[:, kept_directions:].sum(-1), rtol=1e-4, atol=1e-7)


def test_a_policy_has_the_codec_of_each_layer(tmp_path: Path) -> None:
    policy = Policy.parse(f"snapkv+lowrank:rank=3:ranks=energy:calibration={written(tmp_path)}@0.5")
    own = for_model(policy, MODEL)
    assert isinstance(own, ModelPolicy) and own == policy and str(own) == str(policy) and not own.layer_groups
    codec: Any = policy.codec
    assert {index: own.at(index).codec for index in range(LAYERS)} == codec.by_layer(MODEL)
    assert len(own.distinct) > 1 and own.with_budget(30).at(1).codec == own.at(1).codec
    assert for_model(Policy.parse(f"lowrank:calibration={tmp_path}"), MODEL) == Policy.parse(
        f"lowrank:calibration={tmp_path}"
    )
    own.check(MODEL)


def test_only_layers_under_the_policy_share_the_total(tmp_path: Path) -> None:
    codec = LowRank(rank=4, ranks="fisher", calibration=written(tmp_path))
    found: dict[int, Any] = dict(codec.by_layer(ModelInfo(2, HEADS, DIM, evictable=(0, 2), total=LAYERS)))
    assert [*found] == [0, 2] and sum(own.rank + own.value_rank for own in found.values()) == 16


def ranks_file(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_ranks_of_a_file(tmp_path: Path) -> None:
    path = ranks_file(tmp_path / "ranks.json", {"keys": [1, 8, 5], "values": [2, 3, 4]})
    codec = LowRank(ranks=path, calibration=written(tmp_path / "bases"))
    found: dict[int, Any] = dict(codec.by_layer(MODEL))
    assert [(own.rank, own.value_rank) for own in found.values()] == [(1, 2), (8, 3), (5, 4)]
    assert Policy.parse(str(Policy(codec=codec))).codec == codec
    hybrid = ModelInfo(1, HEADS, DIM, evictable=(1,), total=3)  # the ranks of other layers are not read
    assert load_ranks(ranks_file(tmp_path / "b.json", {"keys": [None, 8, 0], "values": [99, 3, ""]}), hybrid) == {
        1: (8, 3)
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "must be JSON"),
        ([], "must have a list of keys with a rank for each of the model's 3 layers, got none"),
        ({"keys": [1, 2, 3]}, "a list of values with a rank for each of the model's 3 layers, got none"),
        ({"keys": [1, 2], "values": [1, 2]}, "got 2 ranks"),
        ({"keys": [1, 9, 1], "values": [1, 2, 1]}, "from 1 to 8, got 9 for the keys of layer 1"),
        ({"keys": [1, 1, 1], "values": [1, 2, True]}, "got True for the values of layer 2"),
        ({"format": 9, "keys": [1, 1, 1], "values": [1, 2, 1]}, "must have format 1 or older, got 9"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    path = ranks_file(tmp_path / "ranks.json", content)
    with pytest.raises(KVPolicyError, match=message):
        LowRank(ranks=path, calibration=written(tmp_path / "bases")).check(MODEL)


def test_multiples_suit_a_base_that_needs_them(tmp_path: Path) -> None:
    LowRank(rank=3, ranks="energy", rank_multiple=2, base=TurboQuant(bits=4), calibration=written(tmp_path)).check(
        MODEL
    )


def test_a_changed_calibration_divides_anew(tmp_path: Path) -> None:
    codec = LowRank(rank=2, ranks="energy", calibration=written(tmp_path))
    before = codec.by_layer(MODEL)
    file = load(str(tmp_path), "lowrank")
    save(tmp_path, "lowrank", file.meta, file.tensors | {"values.energy.0": torch.ones(HEADS, DIM)})
    assert codec.by_layer(MODEL) != before


# ---- Heads that have directions together

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
                latents, want = slow.joint_latents(given[row, :, slot].double().tolist(), means, directions)
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
    with pytest.raises(KVPolicyError, match="must be for 8 KV heads of dimension 8, as the model has, got 4"):
        codec.check(ModelInfo(1, 8, 8))


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
