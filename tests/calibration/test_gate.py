"""Gates fit the scores of KVzip+, for the inputs that the model's layers take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy.calibration import calibrate_gate
from kvpolicy.calibration.gate import FLOOR, Moments, Sample, Training, explained, mlp_gate, scored_windows
from kvpolicy.selectors.gate_files import GATE_FILES, LayerGate
from tests.calibration.test_heads import gemma, llama, windows
from tests.calibration.test_queries import places_of


def drawn(count: int, hidden: int = 6, heads: int = 2, seed: int = 0) -> Sample:
    """Labels that are linear in the inputs, and noise."""
    chance = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, hidden, generator=chance) * torch.arange(1, hidden + 1) + 3
    weight = torch.randn(hidden, heads, generator=torch.Generator().manual_seed(99))
    return Sample(inputs, inputs @ weight - 5 + torch.randn(count, heads, generator=chance))


def inputs_of(model: Any, ids: Tensor) -> dict[int, Tensor]:
    """What the attention of each layer is given for tokens [n], by a stock forward: [n, hidden]."""
    found: dict[int, Tensor] = {}

    def keep(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        found[module.layer_idx] = (args[0] if args else kwargs["hidden_states"])[0]

    handles = [block.self_attn.register_forward_pre_hook(keep, with_kwargs=True) for block in model.model.layers]
    with torch.no_grad():
        model(ids[None])
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("make", [llama, gemma])
def test_samples_are_inputs_and_the_logarithm_of_the_scores_of_kvzip(make: Any) -> None:
    model = make()
    texts = [windows(1, 9)[0], windows(1, 14)[0]]
    found = [*scored_windows(model, texts, [9, 14], seed=0)]
    for ids, layers in zip(texts, found, strict=True):
        assert sorted(layers) == ([1] if make is gemma else [0, 1])
        expected = inputs_of(model, ids)
        with torch.no_grad(), kvpolicy.attach(model, "kvzip:plus=true:sinks=4@1.0"):
            cache = PolicyCache(model)
            model(ids[None], cache=cache)
        for layer in cache.policy_layers:
            sample = layers[layer.layer_idx]
            torch.testing.assert_close(sample.inputs, expected[layer.layer_idx], atol=1e-5, rtol=1e-5)
            state: Any = layer.store.tensors.state
            scores = (-1 / state.score[0]).log().clamp_min(FLOOR).mT  # positions are in order: all are kept
            torch.testing.assert_close(sample.labels, scores, atol=1e-5, rtol=1e-4)


def test_the_same_tokens_are_drawn_in_all_layers() -> None:
    model = llama()
    texts = windows(2, 30)
    whole = [*scored_windows(model, texts, [30, 30], seed=0)]
    some = [*scored_windows(model, texts, [10, 10], seed=3)]
    for every, few in zip(whole, some, strict=True):
        places = [places_of(every[layer].labels, few[layer].labels) for layer in (0, 1)]
        assert places[0] == places[1] == sorted(places[0]) and len({*places[0]}) == 10
        assert places_of(every[1].inputs, few[1].inputs) == places[0]


@pytest.mark.parametrize("ridge", [0.0, 0.01, 3.0])
def test_a_linear_gate_is_ridge_regression(ridge: float) -> None:
    sample = drawn(200)
    parts = [Sample(sample.inputs[rows], sample.labels[rows]) for rows in (slice(0, 30), slice(30, 200))]
    gate = Moments.of(parts[0]).plus(Moments.of(parts[1])).gate(ridge)
    x, y = (t.double().numpy() for t in sample)
    centered = x - x.mean(0)
    weight = ridge * centered.var(0).mean()
    # The penalty as further rows of least squares, each for the mean of all tokens.
    rows = np.concatenate([centered, np.sqrt(200 * weight) * np.eye(6)])
    want = np.linalg.lstsq(rows, np.concatenate([y - y.mean(0), np.zeros((6, 2))]), rcond=None)[0]
    np.testing.assert_allclose(gate.weight.numpy(), want.T, atol=1e-5)
    np.testing.assert_allclose(gate.bias.numpy(), y.mean(0) - x.mean(0) @ want, atol=1e-4)


def test_channels_without_variance_get_no_weight() -> None:
    sample = drawn(50)
    inputs = torch.cat([sample.inputs, torch.full((50, 1), 4.0)], 1)
    gate = Moments.of(Sample(inputs, sample.labels)).gate(0.0)
    assert bool(gate.weight.isfinite().all()) and bool((gate.weight[:, -1].abs() < 1e-6).all())
    gate = Moments.of(Sample(torch.ones(9, 3), torch.arange(9.0)[:, None])).gate(0.0)
    assert gate.weight.abs().max() < 1e-6 and gate.bias.item() == pytest.approx(4.0)


def test_a_hidden_layer_learns_what_a_line_cannot() -> None:
    chance = torch.Generator().manual_seed(0)
    inputs = torch.randn(600, 3, generator=chance) * 5 - 7
    sample = Sample(inputs, ((inputs + 7) / 5).square() * 100 + 40)
    gate = mlp_gate(sample, Training(units=64, epochs=60, batch=64))
    other = Moments.of(sample).gate()
    assert explained(gate, sample) > 0.95 > 0.2 > explained(other, sample)
    again = mlp_gate(sample, Training(units=64, epochs=60, batch=64))
    assert torch.equal(gate.weight, again.weight), "a seed determines it"
    with torch.inference_mode():
        assert mlp_gate(sample, Training(units=4, epochs=1)).weight.shape == (3, 4)


def test_explained_variance() -> None:
    sample = Sample(torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[1.0, 0.0], [3.0, 0.0], [5.0, 0.0]]))
    right = LayerGate(torch.tensor([[2.0], [0.0]]), torch.tensor([1.0, 0.0]))
    assert explained(right, sample) == 1.0
    assert explained(right._replace(bias=torch.tensor([2.0, 0.0])), sample) == pytest.approx(1 - 3 / 8)
    assert explained(LayerGate(torch.zeros(2, 1), torch.tensor([3.0, 0.0])), sample) == 0.0


def test_a_file_is_written_for_the_model(tmp_path: Path) -> None:
    model = gemma()
    texts = windows(2, 70)
    path = tmp_path / "gate.safetensors"
    written = calibrate_gate(model.train(), texts, path, tokens=130)
    found = GATE_FILES.load(str(path))
    assert model.training and (found.model, found.made) == (written.model, written.made)
    assert [*found.gates] == [1], "no gate of the sliding layer"
    layers = [*scored_windows(model.eval(), texts, [65, 65], seed=0)]
    gate = Moments.of(layers[0][1]).plus(Moments.of(layers[1][1])).gate()
    assert torch.equal(found.gates[1].weight, gate.weight) and torch.equal(found.gates[1].bias, gate.bias)
    kvpolicy.attach(model, f"kvzap:file={path}@0.5").detach()
    with pytest.raises(kvpolicy.KVPolicyError, match=r"made for another model \(gemma2"):
        kvpolicy.attach(llama(), f"kvzap:file={path}@0.5")


def test_one_window_of_ten_says_how_well_the_others_predict(tmp_path: Path) -> None:
    model = llama()
    texts = [ids for seed in range(10) for ids in windows(1, 13 + seed)]
    written = calibrate_gate(model, texts, tmp_path / "gate.safetensors")
    layers = [*scored_windows(model, texts, [len(ids) for ids in texts], seed=0)]
    sums = Moments.of(layers[0][0])
    for each in layers[1:9]:
        sums = sums.plus(Moments.of(each[0]))
    torch.testing.assert_close(written.gates[0].weight, sums.gate().weight)
    assert written.made is not None
    assert written.made["r2"][0] == pytest.approx(explained(sums.gate(), layers[9][0]), abs=1e-3)
