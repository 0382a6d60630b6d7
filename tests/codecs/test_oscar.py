"""OSCAR: vectors of the authors' code, and its rules; tests/conformance has its slow version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import kvpolicy
from kvpolicy import OSCAR, Policy
from kvpolicy.calibration import calibrate_oscar, rotation_of
from kvpolicy.calibration.oscar import collect_covariances
from kvpolicy.codecs._files import load, save
from kvpolicy.codecs.oscar import OSCARRotations, clipped
from kvpolicy.protocols import ModelInfo, StageStore
from kvpolicy.text.errors import KVPolicyError
from tests.calibration.test_heads import gemma, llama, qwen, windows

# The authors' code. `oscar.safetensors` has queries of 4 heads, and keys and values of 2, for 60 tokens; the rotations
# that `compute_qqt`, `compute_sst` and `compose_rotation` (`r_h_pbr`) made of them; what clipping at 0.96 of the keys
# and 0.92 of the values leaves; and what `simulate_int2_asym` reads back, recorded on a CPU.

RECORDED = load_file(Path(__file__).parent / "oscar.safetensors")
D = 16
SIDES = ["keys", "values"]


def covariances() -> tuple[Tensor, Tensor]:
    """Those of queries and of weighted values, by their definition, one of each KV head."""
    queries, keys, values = (RECORDED[name].double().transpose(0, 1) for name in ("queries", "keys", "values"))
    of_queries = torch.stack(
        [own.flatten(0, 1).T @ own.flatten(0, 1) / (2 * 60) for own in queries.unflatten(0, (2, 2))]
    )
    weights = torch.einsum("hnd,hde,hne->hn", keys, of_queries, keys)
    weights = weights / weights.mean(1, keepdim=True)
    return of_queries, torch.einsum("hn,hnd,hne->hde", weights, values, values) / 60


@pytest.mark.parametrize("which", [0, 1])
def test_rotations_are_the_authors(which: int) -> None:
    """But for the signs of eigenvectors, which are any."""
    side = SIDES[which]
    covariance = covariances()[which].mean(0, keepdim=True)
    torch.testing.assert_close(
        torch.linalg.eigvalsh(covariance)[0], RECORDED[f"{side}.eigenvalues"], rtol=1e-6, atol=1e-9
    )
    rotation = rotation_of(covariance)[0]
    assert (rotation @ rotation.T - torch.eye(D)).abs().max() < 1e-5
    products = vectors(rotation).T @ vectors(RECORDED[f"{side}.rotation"])
    torch.testing.assert_close(products.abs(), torch.eye(D), rtol=0, atol=1e-4)


def vectors(rotation: Tensor) -> Tensor:
    """The eigenvectors in a rotation, without the Hadamard transform and the permutation, of falling eigenvalue."""
    hadamard = torch.tensor([[(-1.0) ** (i & j).bit_count() / 4 for j in range(D)] for i in range(D)])
    place = [int(f"{rank:04b}"[::-1], 2) for rank in range(D)]  # of the channel of each rank
    unpermuted = torch.zeros_like(rotation)
    for rank in range(D):
        unpermuted[:, D - 1 - rank] = rotation[:, place[rank]]
    return (unpermuted @ hadamard).flip(1)


@pytest.mark.parametrize(("which", "clip"), [(0, 0.96), (1, 0.92)])
def test_codes_are_the_authors(which: int, clip: float) -> None:
    side = SIDES[which]
    rotation = RECORDED[f"{side}.rotation"]
    x = RECORDED[side].reshape(1, 1, -1, D)
    inside = clipped((x @ rotation)[0, 0], clip)
    torch.testing.assert_close(inside, RECORDED[f"{side}.clipped"], rtol=1e-5, atol=1e-5)
    codec = OSCAR()
    count = x.shape[2]
    same = rotation[None, None]
    store = StageStore(codec.alloc(1, 1, count, D, "cpu"), OSCARRotations(same, same))
    yes = torch.ones(1, 1, count, dtype=torch.bool)
    # Clips of the two sides differ.
    given = (x, x) if which == 0 else (torch.zeros_like(x), x)
    codec.write(store, *given, torch.arange(count)[None, None], yes, ~yes)
    read = (codec.keys if which == 0 else codec.values)(store, slice(0, count))[0, 0] @ rotation
    want = RECORDED[f"{side}.read"]
    step = (inside.amax(-1, keepdim=True) - inside.amin(-1, keepdim=True)) / 3
    off = (read - want).abs() / step
    assert off.max() < 1.1, "never more than the next code"
    assert (off > 0.05).double().mean() < 0.005, "where a number is half way between two codes"


def test_clipping() -> None:
    x = torch.tensor([[3.0, -9.0, 1.0, 2.0]])
    assert clipped(x, 1.0) is x
    assert clipped(x, 0.75).tolist() == x.tolist() and clipped(x, 0.7).tolist() == [[3, -3, 1, 2]]
    assert clipped(x, 0.1).abs().tolist() == [[1.0] * 4]


# ---- Calibration


@pytest.mark.parametrize("make", [llama, qwen, gemma])
def test_covariances_are_those_of_the_definition(make: Any) -> None:
    model = make()
    texts = [windows(1, 30)[0], windows(1, 17)[0]]
    found = collect_covariances(model, texts)
    seen: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
    from kvpolicy.calibration.listener import listening
    from kvpolicy.statistics import ModuleCall, Vectors

    def look(results: Any, view: Any) -> None:
        vectors = results[Vectors]
        own = results[ModuleCall].queries[0].double(), vectors.keys[0].double(), vectors.values[0].double()
        seen.setdefault(view.layer_idx, []).append(own)

    with listening(model, (ModuleCall(), Vectors()), look) as run:
        for ids in texts:
            run(ids)
    assert sorted(found) == sorted(seen)
    for layer, parts in seen.items():
        queries, keys, values = (torch.cat([part[i] for part in parts], 1) for i in range(3))
        heads = len(keys)
        for h in range(heads):
            own = queries.unflatten(0, (heads, -1))[h].flatten(0, 1)
            moment = own.T @ own / len(own)
            torch.testing.assert_close(found[layer][0][h], moment)
            weight = [float(key @ moment @ key) for key in keys[h]]
            want = sum(w * torch.outer(v, v) for w, v in zip(weight, values[h], strict=True)) / sum(weight)
            torch.testing.assert_close(found[layer][1][h], want)


@pytest.mark.parametrize("shared", [False, True])
def test_a_calibration_of_a_model(shared: bool, tmp_path: Path) -> None:
    model, _ = kvpolicy.tiny()
    facts = calibrate_oscar(model, [torch.arange(3, 200) % 190 + 5], tmp_path, shared=shared)
    assert facts["shared"] is shared
    tensors = load(str(tmp_path), "oscar").tensors
    assert len(tensors) == 16
    for rotation in tensors.values():
        assert rotation.shape == (1 if shared else 4, 32, 32)
        assert (rotation @ rotation.mT - torch.eye(32)).abs().max() < 1e-5
    policy = Policy(codec=OSCAR(calibration=str(tmp_path), sinks=4, residual_length=8))
    with torch.no_grad(), kvpolicy.attach(model, policy) as handle:
        model.generate(torch.arange(60, 160)[None], max_new_tokens=4, do_sample=False)
        held: Any = handle.cache
        plan: Any = handle.plan
        assert held.nbytes == plan.nbytes


def test_a_dimension_that_is_no_power_of_two() -> None:
    x = torch.randn(3, 50, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rotation = rotation_of(x.mT @ x)
    assert (rotation @ rotation.mT - torch.eye(24)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, r"must contain keys\.rotation for layer 0, got none; try kvpolicy calibrate oscar"),
        ({"keys.rotation.0": (1, 8, 8), "values.rotation.0": (3, 8, 8)}, "for 2 KV heads of dimension 8, .* got 3"),
        (
            {"keys.rotation.0": (1, 4, 4), "values.rotation.0": (1, 8, 8)},
            "for 2 KV heads of dimension 8, .* dimension 4",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tensors: dict[str, tuple[int, ...]], message: str, tmp_path: Path) -> None:
    save(
        tmp_path, "oscar", {"model": None, "head_dim": 8}, {name: torch.zeros(shape) for name, shape in tensors.items()}
    )
    with pytest.raises(KVPolicyError, match=message):
        OSCAR(calibration=str(tmp_path)).check(ModelInfo(1, 2, 8))


def test_a_rank_takes_its_heads(tmp_path: Path) -> None:
    rotation = torch.arange(4 * 64.0).reshape(4, 8, 8)
    save(tmp_path, "oscar", {"model": None, "head_dim": 8}, {f"{side}.rotation.0": rotation.clone() for side in SIDES})
    found = OSCAR(calibration=str(tmp_path)).load_calibration(0, "cpu", slice(1, 3))
    assert torch.equal(found.keys[0], rotation[1:3]) and torch.equal(found.values[0], rotation[1:3])


# ---- Rules


def test_the_layout_is_that_of_the_paper() -> None:
    codec = OSCAR()
    assert codec.layout(4000) == (64 + 256 + 32, (4000 - 256 - 64,)) and codec.layout(300) == (300, ())
    assert codec.traits.pins == "first" and OSCAR(sinks=0).traits.pins == "none"


def test_bits_of_a_number() -> None:
    codes = [OSCAR().alloc(1, 1, slots, 128, "meta") for slots in (1000, 2000)]
    few, more = (sum(part.nbytes for part in each) for each in codes)
    assert (more - few) * 8 / 1000 / 256 == 2.25


@pytest.mark.parametrize("model", ["tiny", "tiny-4k"])
def test_the_embedded_models_have_a_calibration(model: Any) -> None:
    net, _ = kvpolicy.tiny(name=model)
    with torch.no_grad(), kvpolicy.attach(net, f"oscar:calibration={model}:sinks=4:residual_length=8") as handle:
        net.generate(torch.arange(60, 160)[None], max_new_tokens=4, do_sample=False)
        cache: Any = handle.cache
        assert cache.layers[0].store.layout.coded
