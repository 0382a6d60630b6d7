"""What holds for every calibration: which text it takes, which file it replaces, and how its command is made."""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy.calibration.calibrator import Calibrator
from kvpolicy.calibration.calibrators import CALIBRATORS, HeadCalibrator
from kvpolicy.calibration.driver import calibrate, kind_of
from kvpolicy.cli.app import main
from kvpolicy.cli.strategy_docs import attributes
from tests.conformance import models

OPTIONS: dict[str, dict[str, Any]] = {
    "csr": {"atoms": 8, "pairs": 2, "key_groups": "all", "value_groups": "all", "tokens": 100, "epochs": 1},
    "kvquant": {"bits": (2,), "no_fisher": True},
    "lowrank": {},
    "oscar": {},
    "kvtc": {"tokens": 130, "ratios": (2,)},
    "channels": {},
    "heads": {"positions": 30, "sinks": 2, "recent": 5},
    "razor": {"probe": "razor", "random": 9, "repeats": 3},
    "qfilters": {"tokens": 130},
    "triattention": {},
    "gate": {"tokens": 130},
}
OTHERS: dict[str, dict[str, Any]] = {
    "csr": {"atoms": 9},
    "kvquant": {"outliers": 0.1},
    "lowrank": {"key_spaces": ("rotated",)},
    "oscar": {"shared": True},
    "kvtc": {"layers": 2},
    "heads": {"recent": 6},
    "razor": {"seed": 5},
    "qfilters": {"tokens": 140},
    "gate": {"kind": "mlp", "units": 3, "epochs": 1},
}
"""For each calibrator with options, some that differ in one."""

ALL = pytest.mark.parametrize("name", OPTIONS)
WITH_TEXT = pytest.mark.parametrize("name", [name for name in OPTIONS if name != "razor"])


def calibrator(name: str, **options: Any) -> Calibrator:
    kind = CALIBRATORS["heads" if name == "razor" else name]
    return kind(**OPTIONS[name] | options)


def build(family: str, **options: Any) -> Any:
    """A model of its own, since tests change it."""
    return copy.deepcopy(models.build(family, **options))


def windows(name: str = "", seed: int = 0, length: int = 70) -> list[Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return [] if name == "razor" else [torch.randint(3, 40, (length,), generator=chance) for _ in range(2)]


def compared(own: Calibrator, content: Any) -> Any:
    """What must be equal for a file to be replaced, as JSON has it."""
    return json.loads(json.dumps(kind_of(own).compared(content)))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@ALL
@pytest.mark.filterwarnings("ignore:No head finds")
def test_a_finished_one_is_replaced_only_when_that_is_said(name: str, tmp_path: Path) -> None:
    model: Any = build("gemma2", layers=2)
    out = tmp_path / "new" / "out"
    own = calibrator(name)
    first = calibrate(own, model.train(), windows(name), out, name="one")
    assert model.training, "the model is as it was"
    kind = kind_of(own)
    assert compared(own, kind.load(str(out))) == compared(own, first)
    before = files(out.parent)
    calibrate(own, model.eval(), windows(name), out, name="two")  # the same, whatever it is called
    assert files(out.parent).keys() == before.keys(), "no checkpoint or half of a file is left"
    before = files(out.parent)
    others = [(own, build("llama", layers=2), windows(name))]
    if name != "razor":
        others.append((own, model, windows(seed=1)))
    if name in OTHERS:
        others.append((calibrator(name, **OTHERS[name]), model, windows(name)))
    for other in others:
        with pytest.raises(kvpolicy.KVPolicyError, match=r"must be absent, or a calibration|must not hold another"):
            calibrate(*other, out)
        assert files(out.parent) == before, "what was refused changed nothing"
    replaced = calibrate(*others[-1], out, force=True)
    assert compared(own, replaced) != compared(own, first)
    with pytest.raises(kvpolicy.KVPolicyError, match=r"must be absent, or a calibration|must not hold another"):
        calibrate(own, model, windows(name), out)


@WITH_TEXT
def test_too_little_text(name: str, tmp_path: Path) -> None:
    for texts in ([], windows(length=1)):
        if name == "heads" and texts:
            continue  # one token is enough for a score
        with pytest.raises(kvpolicy.KVPolicyError, match=r"must be at least|must contain tokens") as raised:
            calibrate(calibrator(name), build("llama", layers=2), texts, tmp_path / "out")
        assert "longer text" in str(raised.value) or "more text" in str(raised.value)
    assert not [*tmp_path.rglob("*")]


@ALL
def test_a_model_with_a_policy(name: str, tmp_path: Path) -> None:
    model: Any = build("llama", layers=2)
    wanted = pytest.raises(kvpolicy.KVPolicyError, match=r"already attached|got one with a policy attached")
    with wanted, kvpolicy.attach(model, "window@0.5"):
        calibrate(calibrator(name), model, windows(name), tmp_path / "out")
    assert not [*tmp_path.rglob("*")]


@ALL
def test_weights_that_are_not_finite(name: str, tmp_path: Path) -> None:
    model: Any = build("llama", layers=2)
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight.fill_(float("inf"))
    with pytest.raises(kvpolicy.KVPolicyError, match=r"must be finite, got inf or NaN in .*1.*; try loading"):
        calibrate(calibrator(name), model, windows(name), tmp_path / "out")
    assert not [*tmp_path.rglob("*")]


@pytest.mark.parametrize("name", CALIBRATORS)
def test_the_fields_are_the_options_of_the_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", name, "--help"]) == 0
    printed = "".join(capsys.readouterr().out.split())
    kind: Any = CALIBRATORS[name]
    told = attributes(kind)
    for each in fields(kind):
        if each.metadata.get("hidden"):
            continue
        assert f"--{each.name.replace('_', '-')}" in printed
        assert "".join(told[each.name].split()) in printed
    assert "".join((kind.__doc__ or "").partition("Attributes:")[0].split()) in printed
    limited = [each for each in fields(kind) if each.metadata.get("least") is not None]
    assert printed.count("x>=") == len(limited) + 2, "of length and windows too"
    assert (kind is HeadCalibrator) == ("Withreach,UTF-8textfile" in printed)
