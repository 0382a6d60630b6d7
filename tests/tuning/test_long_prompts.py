"""Tuning on prompts that layers take in tiles: the same measures, with one layer at a time on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvpolicy.hf.embedded import config_of
from kvpolicy.hf.model_spec import describe
from kvpolicy.policy import Policy
from kvpolicy.tuning import rivals
from kvpolicy.tuning.evidence import Score
from kvpolicy.tuning.measure import joint_kls, layer_kls, output_errors, sensitivities
from kvpolicy.tuning.peak import tuning_peak
from kvpolicy.tuning.proof import prove
from kvpolicy.tuning.rivals import estimate_rivals
from kvpolicy.tuning.tap import tapped
from kvpolicy.tuning.tune import tune
from kvpolicy.tuning.windows import Window
from tests.engine.live import Alive
from tests.tuning.test_measure import llama, window

MODEL = llama(num_hidden_layers=3)
WINDOWS = [window(40, 6, seed) for seed in range(2)]
SPECS = ["snapkv:window=4@0.3", "uniform/adakv+h2o+tokenwise@0.5", "kvzip:chunk=16@0.4", "keydiff+merge@0.4", "rotate"]


@pytest.mark.parametrize("measure", [output_errors, layer_kls, joint_kls])
def test_measures_in_tiles(measure: Any) -> None:
    whole = measure(MODEL, WINDOWS, SPECS)
    torch.testing.assert_close(measure(MODEL, WINDOWS, SPECS, tile=7), whole, rtol=1e-3, atol=1e-7)


def test_sensitivities_in_tiles() -> None:
    whole = sensitivities(MODEL, WINDOWS)
    torch.testing.assert_close(sensitivities(MODEL, WINDOWS, tile=7), whole, rtol=1e-3, atol=1e-7)


def test_a_file_and_its_evidence(tmp_path: Path) -> None:
    found = [tune(MODEL, WINDOWS, tmp_path / f"{tile}.json", candidates=SPECS, tile=tile) for tile in (None, 16)]
    torch.testing.assert_close(
        torch.tensor(found[0].distortion), torch.tensor(found[1].distortion), rtol=2e-3, atol=1e-6
    )
    others = [window(40, 6, seed) for seed in (5, 6)]
    evidence = [
        prove(MODEL, tmp_path / "16.json", 0.5, WINDOWS, others, specs=["window", "squeeze+h2o"], tile=tile)
        for tile in (None, 16)
    ]
    assert evidence[0]["rival"] == evidence[1]["rival"]
    assert evidence[0]["tuned"] == pytest.approx(evidence[1]["tuned"], rel=1e-3)


def test_prompts_of_all_layers_are_stored_on_the_host() -> None:
    """On another device they would not stay: what a layer is compressed from has been moved back."""
    with tapped(MODEL) as tap:
        assert tap.store is None
    with tapped(MODEL, 8) as tap:
        assert tap.store == torch.device("cpu")


def test_seconds_of_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of windows, and of two that are held out, of which a score takes a second."""

    def one_second(*args: Any, **kwargs: Any) -> Score:
        none = torch.zeros(1)
        return Score(none, none, none, 0.0, seconds=1.0)

    assert estimate_rivals(MODEL, WINDOWS, 2, ["streaming:sinks=64"]) == 0, "it cannot run"
    monkeypatch.setattr(rivals, "score", one_second)
    monkeypatch.setattr(rivals, "reference_logits", lambda *args: [])
    three = [window(40, 6, seed) for seed in range(3)]
    assert estimate_rivals(MODEL, three, 2, ["window"]) == pytest.approx(3 + 2 * 2, abs=0.1)
    assert estimate_rivals(MODEL, three, 2, ["window", "kvzip"] * 20) == pytest.approx(40 * 3 + 2 * 2, abs=0.1)
    many = three * 4  # a quarter of them first, then the best policies on all
    assert estimate_rivals(MODEL, many, 2, ["window"] * 40) == pytest.approx(40 * 4 + 8 * 12 + 2 * 2, abs=0.1)


LEAST = 0.4
"""The smallest part of a planned peak that is in use: answers and forwards are not at their largest in every window."""


@pytest.mark.parametrize("policy", ["snapkv@0.3", "h2o+tokenwise@0.5", "kvzip@0.4"])
def test_the_peak_is_planned(policy: str) -> None:
    model = llama(num_hidden_layers=6)
    text = Window(torch.arange(600) % 30 + 1, torch.arange(8) + 3)
    with Alive(model) as watch:
        joint_kls(model, [text], [policy])
    planned = tuning_peak(describe(model.config, torch.float32), 0, [Policy.parse(policy)], 600, 8)
    assert LEAST * planned <= watch.peak <= planned


def test_tiles_need_the_memory_of_one_layer() -> None:
    shape = describe(config_of("llama-3.1-8b"), torch.bfloat16)
    policies = [Policy.parse("snapkv@0.1"), Policy.parse("snapkv+tokenwise:bits=4@0.2")]
    weights = 15 * 2**30
    assert tuning_peak(shape, weights, policies, 127_000, 64, 4096) < 24 * 2**30 < 100 * 2**30
    assert tuning_peak(shape, weights, policies, 127_000, 64) > 90 * 2**30
    # A prompt that waits for its replay is held in all layers.
    assert tuning_peak(shape, weights, [*policies, Policy.parse("kvzip@0.1")], 127_000, 64, 4096) > 30 * 2**30
