"""Codes of principal components, and how bits are divided among them, against their definitions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import KVPolicyError
from kvpolicy.calibration import calibrate_kvtc
from kvpolicy.calibration.kvtc import plans, sample_vectors
from kvpolicy.calibration.samples import collect
from kvpolicy.hf.kvtc.allocation import SIZES, STEP, allocate, measure_errors
from kvpolicy.hf.kvtc.quantizer import Group, dequantize, quantize, read_stored, stored, stored_nbytes
from kvpolicy.hf.kvtc.transform import principal_components
from tests.conformance.models import build
from tests.files.kvtc import windows
from tests.reference import transform_coding as reference
from tests.sampling import product


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


INPUTS = {
    "normal": draw(20, 9),
    "falling": draw(20, 9) * torch.logspace(2, -3, 9, dtype=torch.float64),
    "offset": draw(20, 9) + 1000,
    "constant": torch.full((4, 9), 3.7, dtype=torch.float64),
    "zero": torch.zeros(4, 9, dtype=torch.float64),
    "tiny": draw(20, 9) * 1e-9,
    "huge": draw(20, 9) * 1e6,
    "one token": draw(1, 9),
    "one component": draw(20, 1),
}


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("name", INPUTS)
def test_codes_are_those_of_the_definition(name: str, bits: int) -> None:
    x = INPUTS[name].clamp(-65504, 65504)
    found = dequantize(quantize(x, bits))
    wanted = torch.tensor([reference.rounded(row, bits) for row in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-9)
    # Half a step, and what rounding the shift and the scale to fp16 adds at the ends.
    spread = x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)
    slack = 2.0**-11 * (x.abs().amax(-1, keepdim=True) + spread) + 2.0**-24 * 2**bits
    assert bool(((found - x).abs() <= spread / (2**bits - 1) / 2 + slack).all())


def test_numbers_beyond_fp16_stay_finite() -> None:
    assert dequantize(quantize(torch.tensor([[-1e9, 0.0, 1e9]]), 2)).isfinite().all()


@pytest.mark.parametrize("tokens", [0, 1, 7, 64])
def test_stored_bytes(tokens: int) -> None:
    x = draw(tokens, 40)
    groups = [Group(16, 4), Group(3, 0), Group(1, 2), Group(16, 8)]
    blob = stored(x, groups)
    assert len(blob) == stored_nbytes(groups, tokens)
    found = read_stored(blob, groups, tokens)
    wanted = [reference.decoded(row, groups)[:36] for row in x.tolist()]
    torch.testing.assert_close(
        found.double(), torch.tensor(wanted, dtype=torch.float64).view(tokens, 36), rtol=1e-6, atol=1e-9
    )
    assert stored(x, []) == b"" and read_stored(b"", [], tokens).shape == (tokens, 0)


@product("kind,seed", ["normal", "falling", "equal"], range(4), sample=[("normal", 0), ("falling", 1), ("equal", 2)])
def test_bits_are_divided_with_the_least_error(kind: str, seed: int) -> None:
    """As trying every way does, for every budget."""
    x = draw(5, 5, seed=seed)
    x = {"normal": x, "falling": x * torch.tensor([50.0, 9.0, 3.0, 1.0, 0.1]), "equal": torch.ones_like(x)}[kind]
    sizes, bits = (1, 2, 3), (2, 4)
    choices = measure_errors(x, sizes, bits)
    energy = x.square().sum(0)
    for budget in (0, 33, 34, 36, 40, 70, 75, 110, 200):
        groups = allocate(choices, energy, budget)
        assert reference.cost(groups) <= budget and sum(group.cost for group in groups) == reference.cost(groups)
        assert sum(group.size for group in groups) <= 5 and (not groups or groups[-1].bits)
        least = reference.least_error(x, budget, sizes, bits)
        assert reference.error(x, groups) == pytest.approx(least, rel=1e-4, abs=1e-6)


def test_no_component_and_no_token() -> None:
    assert allocate(measure_errors(draw(3, 0)), draw(0), 1000) == ()
    assert allocate(measure_errors(draw(0, 4)), torch.zeros(4), 1000) == ()


def test_larger_groups_begin_at_some_components_only() -> None:
    errors = dict(measure_errors(draw(3, 100)))
    assert {group.size for group in errors} == {size for size in SIZES if size <= 100}
    assert errors[Group(16, 4)].isfinite().all()
    assert errors[Group(64, 4)].isfinite().nonzero().flatten().tolist() == [0, STEP, 2 * STEP]
    groups = allocate([*errors.items()], torch.ones(100) * 100, 10**4)
    starts = torch.tensor([0, *(group.size for group in groups)]).cumsum(0).tolist()
    assert all(
        start % STEP == 0 for start, group in zip(starts, groups, strict=False) if group.size > STEP and group.bits
    )


@pytest.mark.parametrize(("tokens", "width"), [(50, 6), (6, 6), (4, 9)])
def test_components_are_those_of_the_definition(tokens: int, width: int) -> None:
    x = draw(tokens, width) @ draw(width, width, seed=1) + 5
    found = principal_components(x)
    mean, directions, variance = reference.components(x)
    torch.testing.assert_close(found.mean.double(), mean, rtol=1e-6, atol=1e-6)
    count = int((variance > 1e-9 * variance[0]).sum())
    assert count <= found.directions.shape[1] <= min(tokens, width)
    product = found.directions.double().T @ found.directions.double()
    torch.testing.assert_close(product, torch.eye(len(product), dtype=torch.float64), rtol=0, atol=1e-5)
    cosines = (found.directions[:, :count].double() * directions[:, :count]).sum(0).abs()
    torch.testing.assert_close(cosines, torch.ones(count, dtype=torch.float64), rtol=0, atol=1e-4)
    torch.testing.assert_close(found.vectors(found.latents(x)), x.float(), rtol=1e-4, atol=1e-3)
    assert principal_components(x, 2).directions.shape == (width, 2)


def test_equal_vectors_have_no_directions_that_matter() -> None:
    for tokens in (3, 12):
        x = torch.full((tokens, 5), 2.5)
        found = principal_components(x)
        torch.testing.assert_close(found.vectors(found.latents(x)), x)
        assert {name for name, t in plans(x, [4]).items() if not len(t)} == {"groups4"}


def test_a_plan_has_as_many_directions_as_its_ratios_have_bits_for() -> None:
    x = draw(400, 64) * torch.logspace(2, -2, 64, dtype=torch.float64)
    found = plans(x, [4, 32])
    sizes = {name: int(t[:, 0].sum()) for name, t in found.items() if name.startswith("groups")}
    assert sizes["groups32"] < sizes["groups4"] == found["directions"].shape[1] < 64
    for ratio in (4, 32):
        assert reference.cost(found[f"groups{ratio}"].tolist()) <= 16 * 64 / ratio


def test_errors_are_measured_on_other_tokens() -> None:
    """Those that no component was computed from: here they alone vary, in directions that the others do not know."""
    x = torch.zeros(40, 20, dtype=torch.float64)
    held_out = torch.arange(40) % 4 == 3
    x[~held_out, :2] = draw(30, 2)
    x[held_out, 5:] = draw(10, 15) * 100
    directions = plans(x, [1])["directions"]
    assert not directions[5:, :2].abs().gt(1e-6).any()


def test_samples_are_the_unrotated_keys_and_the_values_of_later_tokens() -> None:
    model = build("llama", layers=2)
    texts = windows()
    found = sample_vectors(model, texts, 10**6, 0, progress=False)
    every = collect(model, texts, tokens=10**6)
    later = torch.arange(sum(map(len, texts))) % len(texts[0]) >= 4
    for side, layers in (("keys", every.unrotated), ("values", every.values)):
        for layer, x in layers.items():
            torch.testing.assert_close(found[side][layer], x[:, later], rtol=1e-4, atol=1e-4)
    few = sample_vectors(model, texts, 30, 0, progress=False)
    assert {x.shape[1] for layers in few.values() for x in layers.values()} == {30}


def test_the_first_tokens_of_windows_are_not_counted(tmp_path: Path) -> None:
    """They are not used: of 200 windows of four tokens, nothing would be left."""
    model = build("llama", layers=2)
    for length, left in ((3, 0), (4, 0), (5, 60)):
        with pytest.raises(KVPolicyError, match=rf"without the first 4 .* must be at least 128, got {left}; try"):
            calibrate_kvtc(model, [torch.arange(3, 3 + length)] * 60, tmp_path / "calibration")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ratios": []}, "integers from 1, got none"),
        ({"ratios": [4, 0]}, "integers from 1, got 4,0"),
        ({"ratios": [4.5]}, r"integers from 1, got 4\.5"),
        ({"ratios": [True]}, "integers from 1, got True"),
        ({"ratios": "16"}, "integers from 1, got 1,6"),
        ({"layers": 0}, "layers must be an integer from 1, got 0"),
        ({"layers": 1.5}, r"layers must be an integer from 1, got 1\.5"),
    ],
)
def test_options_that_are_no_counts(options: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(KVPolicyError, match=said):
        calibrate_kvtc(build("llama", layers=2), windows(), tmp_path / "calibration", **options)
