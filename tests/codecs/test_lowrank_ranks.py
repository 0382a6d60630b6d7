"""Ranks of layers: the divisions against every other one, and what a codec makes of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import KVPolicyError, LowRank, Policy, TurboQuant
from kvpolicy.codecs import projection as _projection
from kvpolicy.codecs._files import load, save
from kvpolicy.codecs.lowrank.ranks import by_weight, equal_energy, least_energy, load_ranks
from kvpolicy.codecs.projection import Basis
from kvpolicy.policy import ModelPolicy, for_model
from kvpolicy.protocols import ModelInfo
from kvpolicy.tuning.candidates import check_candidates
from tests.reference.codecs import _lowrank_ranks as slow

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
    components = _projection.orthonormal(tensors[f"keys.post{name}.basis.1"])
    covariance = (components * tensors[f"keys.post{name}.energy.1"].double()[:, None]) @ components.mT
    of_queries = _projection.orthonormal(tensors["queries.basis.1"])
    moments = (of_queries * tensors["queries.energy.1"].double()[:, None]) @ of_queries.mT
    energy, _ = _projection.energies(basis, 1)
    for rank in (1, 3, DIM - 1):
        projection = _projection.of_keys(basis, rank, 1, "cpu")
        kept_directions = rank * basis.group
        lost = torch.zeros(len(components), dtype=torch.float64)
        for head in range(HEADS):
            # What the head reads of the long vector of its group, less what it is.
            group = head // basis.group
            members = range(group * basis.group, (group + 1) * basis.group)
            read = (
                torch.cat([projection.encode[0, other].double() for other in members])
                @ projection.decode[0, head].double()
            )
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": "energi"}, "ranks must be same, energy, threshold, fisher or a file, got 'energi'"),
        ({"ranks": "energy", "rank_multiple": 3}, "rank_multiple must divide the head dimension, 8"),
        ({"ranks": "energy", "rank": 3, "rank_multiple": 4}, "be at most the mean rank, got 4"),
        ({"ranks": "energy", "rank": 9}, "rank must be at most the head dimension"),
        ({"ranks": "energy", "rank": 3, "base": TurboQuant(bits=4)}, "must be a multiple of 2 for TurboQuant.bits=4"),
    ],
)
def test_divisions_that_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        LowRank(calibration=written(tmp_path), **options).check(MODEL)


def test_multiples_suit_a_base_that_needs_them(tmp_path: Path) -> None:
    LowRank(rank=3, ranks="energy", rank_multiple=2, base=TurboQuant(bits=4), calibration=written(tmp_path)).check(
        MODEL
    )


def test_a_calibration_without_information_is_refused(tmp_path: Path) -> None:
    codec = LowRank(ranks="fisher", calibration=written(tmp_path, fisher=False))
    with pytest.raises(KVPolicyError, match=r"must contain the Fisher information of layer 0 .*--fisher"):
        codec.check(MODEL)


def test_a_changed_calibration_divides_anew(tmp_path: Path) -> None:
    codec = LowRank(rank=2, ranks="energy", calibration=written(tmp_path))
    before = codec.by_layer(MODEL)
    file = load(str(tmp_path), "lowrank")
    save(tmp_path, "lowrank", file.meta, file.tensors | {"values.energy.0": torch.ones(HEADS, DIM)})
    assert codec.by_layer(MODEL) != before


def test_where_a_layer_stands_alone_ranks_are_given(tmp_path: Path) -> None:
    spec = f"snapkv+lowrank:ranks=energy:calibration={written(tmp_path)}@0.5"
    with pytest.raises(KVPolicyError, match=r"must not depend on the other layers, .* try ranks=same with a rank"):
        Policy.by_layer([spec, spec, spec], budget=0.5)
    with pytest.raises(KVPolicyError, match="codec of a candidate must not depend on the other layers"):
        check_candidates([spec], MODEL)


@pytest.mark.parametrize("options", [{"rank": 4}, {"value_rank": 4}, {"rank_multiple": 2}])
def test_a_file_is_all_that_is_given(options: dict[str, Any]) -> None:
    with pytest.raises(KVPolicyError, match="must not be given with a file of ranks"):
        LowRank(ranks="ranks.json", **options)


def test_a_multiple_is_of_what_is_divided() -> None:
    with pytest.raises(KVPolicyError, match="rank_multiple must be 1 with ranks='same', which divides none, got 2"):
        LowRank(rank_multiple=2)


def test_a_name_is_text() -> None:
    with pytest.raises(KVPolicyError, match="ranks must be same, energy, threshold, fisher or a file, got ''"):
        LowRank(ranks="")
