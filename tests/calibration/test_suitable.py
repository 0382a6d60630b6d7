"""Models and texts that a calibration does not suit are refused before the model runs; all others are calibrated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvpolicy
from kvpolicy.allocators.head_files import HEAD_FILES
from kvpolicy.calibration.driver import calibrate
from kvpolicy.calibration.samples import collect
from kvpolicy.codecs._files import load
from tests.calibration.test_driver import ALL, WITH_TEXT, build, calibrator, windows

SIZES = "must have one size to calibrate {}, got {}; try tokenwise"
MLA = r"latent attention \(MLA\)"
OTHER = "values of 8 and keys of 12 channels"


def calls_of(model: nn.Module) -> list[str]:
    """The forwards of a model and of its decoder from now on."""
    calls: list[str] = []
    for module in (model, model.base_model):
        module.register_forward_pre_hook(lambda *_: calls.append("forward"), with_kwargs=True)  # pyright: ignore
    return calls


@pytest.mark.parametrize(
    ("family", "name", "message"),
    [
        *[("deepseek_v3", name, SIZES.format(name, MLA)) for name in ("csr", "kvquant", "oscar")],
        *[("mimo_v2_flash", name, SIZES.format(name, OTHER)) for name in ("csr", "kvquant", "oscar")],
        ("kimi_linear", "csr", SIZES.format("csr", MLA)),
        ("deepseek_v3", "lowrank", f"must not be undone for {MLA}, got unrotated keys, .*; try rotated ones alone"),
        ("deepseek_v3", "triattention", f"must not be undone for {MLA}, got mean queries without it"),
        ("deepseek_v3", "heads", f"Heads must have keys of their own to be scored, got {MLA}"),
        ("deepseek_v3", "razor", f"Heads must have keys of their own to be scored, got {MLA}"),
        ("deepseek_v3", "kvtc", "try compress='zlib'"),
        ("jetmoe", "gate", "must have a weight in floating point"),
    ],
)
def test_a_model_that_a_part_cannot_be_used_with(family: str, name: str, message: str, tmp_path: Path) -> None:
    model = build(family)
    calls = calls_of(model)
    with pytest.raises(kvpolicy.KVPolicyError, match=message):
        calibrate(calibrator(name), model, windows(name), tmp_path / "out")
    assert not calls and not [*tmp_path.rglob("*")]


def test_gradients_of_values_of_another_size(tmp_path: Path) -> None:
    model = build("mimo_v2_flash")
    assert collect(model, windows(), tokens=9).values[0].shape[-1] == 8
    with pytest.raises(kvpolicy.KVPolicyError, match=f"must have one size for gradients .* got {OTHER}"):
        collect(model, windows(), fisher=True)
    with pytest.raises(kvpolicy.KVPolicyError, match=SIZES.format("lowrank by Fisher information", OTHER)):
        calibrate(calibrator("lowrank", fisher=True), model, windows(), tmp_path / "out")
    with pytest.raises(kvpolicy.KVPolicyError, match=f"must have heads of their own to be collected, got {MLA}"):
        collect(build("deepseek_v3"), windows(), key_spaces=("rotated",))


@pytest.mark.parametrize("name", ["heads", "razor"])
@pytest.mark.parametrize(("family", "managed"), [("qwen3_5", [1, 3]), ("lfm2", [1, 2])])
@pytest.mark.filterwarnings("ignore:No head finds")
def test_rows_of_scores_are_those_of_the_layers_of_the_model(
    name: str, family: str, managed: list[int], tmp_path: Path
) -> None:
    """Layers without attention have a row too, since rows are found by the number of the layer."""
    model = build(family)
    out = tmp_path / "heads.json"
    rows = calibrate(calibrator(name), model, windows(name), out).heads
    assert rows == HEAD_FILES.load(str(out)).heads and len(rows) == model.config.num_hidden_layers
    assert [index for index, row in enumerate(rows) if row] == managed
    with kvpolicy.attach(model, f"uniform/duo:file={out}+streaming:sinks=2@0.5"), torch.no_grad():
        assert model.generate(windows()[0][None], max_new_tokens=2, min_new_tokens=2).shape == (1, 72)


@WITH_TEXT
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([], dtype=torch.int64), "Every window must have at least one token, got none in window 2; try"),
        (torch.tensor([[5, 48]]), "Token ids must be from 0 to 47, as the model has 48 of them, got 48; try"),
        (torch.tensor([-1, 5]), "got -1; try"),
        (torch.tensor([True, False]), "must be an integer tensor .*, got bool; try"),
    ],
)
def test_tokens_that_are_none(name: str, ids: Tensor, message: str, tmp_path: Path) -> None:
    model = build("llama", layers=2)
    calls = calls_of(model)
    with pytest.raises(kvpolicy.KVPolicyError, match=message):
        calibrate(calibrator(name), model, [*windows(), ids], tmp_path / "out")
    assert not calls and not [*tmp_path.rglob("*")]


@ALL
def test_a_model_without_weights(name: str, tmp_path: Path) -> None:
    model = build("llama", layers=2).to("meta")
    with pytest.raises(kvpolicy.KVPolicyError, match="must have weights to be measured, got some on the device meta"):
        calibrate(calibrator(name), model, windows(name), tmp_path / "out")


@pytest.mark.parametrize("name", ["csr", "kvquant", "oscar", "channels", "heads"])
def test_weights_may_be_offloaded(name: str, tmp_path: Path) -> None:
    """Accelerate leaves them on the device meta until their layer runs."""
    from accelerate import cpu_offload

    here = calibrate(calibrator(name), build("llama", layers=2), windows(name), tmp_path / "here")
    model = cpu_offload(build("llama", layers=2), execution_device=torch.device("cpu"))
    there = calibrate(calibrator(name), model, windows(name), tmp_path / "there")
    if name == "heads":
        assert here.heads == there.heads
    else:
        assert all(torch.equal(tensor, there.tensors[key]) for key, tensor in here.tensors.items())


def test_training_is_outside_autocast(tmp_path: Path) -> None:
    for name, options in (("csr", {}), ("gate", {"kind": "mlp", "units": 3, "epochs": 1})):
        own = calibrator(name, **options)
        with torch.autocast("cpu", torch.bfloat16):
            calibrate(own, build("llama", layers=2), windows(), tmp_path / name)
    found = load(str(tmp_path / "csr"), "csr").tensors
    assert all(bool(tensor.isfinite().all()) for tensor in found.values())


def test_a_profile_is_of_eval_mode_and_finite(tmp_path: Path) -> None:
    model: Any = build("gpt2")
    out = tmp_path / "profile.json"
    prompts = [ids[None] for ids in windows()]
    want = kvpolicy.profile(model, prompts, out)
    assert kvpolicy.profile(model.train(), prompts, out) == want and model.training
    written = out.read_bytes()
    for wrong, message in (
        (torch.tensor([[48]]), "Token ids must be from 0 to 47"),
        (torch.tensor([[True]]), r"must be a tensor of token ids \[B, P\], got \[1, 1\] of torch.bool"),
    ):
        with pytest.raises(kvpolicy.KVPolicyError, match=message):
            kvpolicy.profile(model, [*prompts, wrong], out)
    with torch.no_grad():
        model.transformer.h[1].ln_1.weight.fill_(torch.nan)
    with pytest.raises(kvpolicy.KVPolicyError, match="All cosines must be finite, got inf or NaN in layer 1; try"):
        kvpolicy.profile(model, prompts, out)
    assert out.read_bytes() == written
