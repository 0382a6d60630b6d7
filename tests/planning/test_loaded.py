"""The plan of a loaded model refuses what attaching to it refuses, in the same sentence."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy.calibration import calibrate_channels, calibrate_qfilters
from kvpolicy.tuning.tune import tune
from kvpolicy.tuning.windows import Window
from tests.conformance.models import build


def refusals(model: Any, policy: str) -> list[str]:
    found: list[str] = []
    for call in (lambda: kvpolicy.plan(model, policy, prompt=40), lambda: kvpolicy.attach(model, policy)):
        with pytest.raises(kvpolicy.KVPolicyError) as raised:
            call()
        found.append(str(raised.value))
    return found


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        ("jetmoe", "critical/h2o@0.5"),
        ("jetmoe", "kvzip:plus=true@0.5"),
        ("llama", "kvzip:instruction=999@0.5"),
    ],
)
def test_what_its_modules_do_not_have(family: str, policy: str) -> None:
    planned, attached = refusals(build(family), policy)
    assert planned == attached
    kvpolicy.plan(copy.deepcopy(build("llama")).to("meta"), "critical/h2o@0.5", prompt=40)  # which may yet be loaded


def test_a_file_of_other_weights(tmp_path: Path) -> None:
    model: Any = build("llama")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    texts = [torch.randint(3, 40, (130,), generator=torch.Generator().manual_seed(0))]
    calibrate_channels(model, texts, tmp_path / "channels")
    calibrate_qfilters(model, texts, tmp_path / "filters")
    tune(model, [Window(texts[0][:60], texts[0][60:66])], tmp_path / "plan.json", candidates=["window@0.5"])
    for spec in (
        f"full+labels:read=16:channels=2:calibration={tmp_path / 'channels'}",
        f"qfilters:file={tmp_path / 'filters'}@0.5",
        f"tuned:file={tmp_path / 'plan.json'}@0.5",
    ):
        assert kvpolicy.plan(model, spec, prompt=40) == kvpolicy.plan(model.config, spec, prompt=40, dtype=model.dtype)
        planned, attached = refusals(other, spec)
        assert planned == attached and "whose weights differ" in planned
