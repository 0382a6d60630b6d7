"""Gate files: what is written comes back, and everything else is refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import kvpolicy
from kvpolicy.protocols import ModelInfo
from kvpolicy.selectors.gate_files import GATE_FILES, GateFile, Inner, LayerGate
from kvpolicy.text.model_file import digest

WEIGHTS = torch.linspace(-1, 1, 64)
MODEL = {"name": "m", "type": "llama", "layers": 3, "heads": 2, "head_dim": 4, "weights": WEIGHTS.tolist()}
KEY = GATE_FILES.key
INFO = ModelInfo(layers=3, heads=2, head_dim=4, weights=WEIGHTS, hidden=8)


def some(heads: int = 2, layers: int = 3, hidden: int = 8, units: int = 0) -> dict[int, LayerGate]:
    """A gate of each layer, linear without units."""
    found: dict[int, LayerGate] = {}
    for layer in range(layers):
        chance = torch.Generator().manual_seed(layer)
        inner = Inner(torch.randn(units, hidden, generator=chance), torch.randn(units, generator=chance))
        weight = torch.randn(heads, units or hidden, generator=chance)
        found[layer] = LayerGate(weight, torch.randn(heads, generator=chance), inner if units else ())
    return found


def tensors_of(gate: LayerGate) -> list[Tensor]:
    return [gate.weight, gate.bias, *gate.inner]


@pytest.mark.parametrize("units", [0, 5])
def test_round_trip(units: int, tmp_path: Path) -> None:
    path = tmp_path / "new" / "gate.safetensors"
    GATE_FILES.save(path, GateFile(some(units=units), MODEL, {"tokens": 300}))
    found = GATE_FILES.load(str(path))
    for layer, gate in some(units=units).items():
        assert all(torch.equal(*pair) for pair in zip(tensors_of(found.gates[layer]), tensors_of(gate), strict=True))
        assert found.gates[layer].hidden == 8
    parts = ["bias", "weight"] if not units else ["bias", "inner_bias", "inner_weight", "weight"]
    assert sorted(load_file(path)) == [f"gates.{layer}.{part}" for layer in range(3) for part in parts]


def test_tensors_that_were_read_in_inference_mode_serve_outside(tmp_path: Path) -> None:
    path = tmp_path / "gate.safetensors"
    GATE_FILES.save(path, GateFile(some()))
    with torch.inference_mode():
        gate = GATE_FILES.load(str(path)).gates[0]
    assert not gate.weight.is_inference()


def test_heads_of_a_gate() -> None:
    gate = some(heads=4, units=3)[0]
    inputs = torch.randn(2, 5, 8)
    torch.testing.assert_close(gate.of_heads(slice(1, 3)).score(inputs), gate.score(inputs)[:, 1:3])
    shared = some(heads=1)[0]
    assert shared.of_heads(slice(1, 3)) is shared and shared.score(inputs).shape == (2, 1, 5)


def sealed(path: Path, tensors: dict[str, Tensor], **fields: Any) -> None:
    """Write a file whose hash fits, whatever is in it."""
    facts = {"format": 1, "kvpolicy": "0", "model": None, "made": None, **fields}
    save_file(tensors, path, metadata={KEY: json.dumps(facts | {"sha256": digest(facts, tensors)})})


LINE = torch.zeros(2)
TABLE = torch.zeros(2, 8)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: save_file({"a": WEIGHTS}, path), "must be written by kvpolicy, got one that does not say so"),
        (lambda path: save_file({}, path, {"kvpolicy_filters": "{}"}), "got one that does not say so"),
        (lambda path: save_file({}, path, {KEY: "{}"}), "must be as it was written, got an edited or damaged one"),
        (lambda path: sealed(path, {"gates.0.weight": LINE}), "got 'gates.0.weight' of the shape [2]"),
        (lambda path: sealed(path, {"gates.x.bias": LINE}), "got 'gates.x.bias' of the shape [2]"),
        (lambda path: sealed(path, {"0.bias": LINE}), "got '0.bias' of the shape [2]"),
        (lambda path: sealed(path, {"gates.0.norm": LINE}), "got 'gates.0.norm' of the shape [2]"),
        (lambda path: sealed(path, {"gates.0.bias": LINE / 0}), "must have finite weights and biases of layers"),
        (lambda path: sealed(path, {"gates.0.bias": LINE}), "got {'bias': [2]} in layer 0"),
        (lambda path: sealed(path, {"gates.0.weight": TABLE, "gates.0.bias": LINE[:1]}), "'bias': [1]} in layer 0"),
        (
            lambda path: sealed(
                path, {"gates.3.weight": TABLE, "gates.3.bias": LINE, "gates.3.inner_bias": LINE.clone()}
            ),
            "an inner weight [n, hidden] and an inner bias [n], got",
        ),
        (
            lambda path: sealed(
                path,
                {
                    "gates.0.weight": TABLE,
                    "gates.0.bias": LINE,
                    "gates.0.inner_weight": TABLE.clone(),
                    "gates.0.inner_bias": torch.zeros(8),
                },
            ),
            "'inner_weight': [2, 8]",
        ),
    ],
)
def test_malformed_files(write: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "gate.safetensors"
    write(path)
    with pytest.raises(kvpolicy.KVPolicyError) as raised:
        GATE_FILES.load(str(path))
    assert message in str(raised.value) and "\n" not in str(raised.value) and len(str(raised.value)) < 500
    assert str(raised.value).startswith("The gate file ") and str(path)[-10:] in str(raised.value)
    assert "try kvpolicy calibrate gate" in str(raised.value) or "format 1" in message


@pytest.mark.parametrize(
    ("content", "info", "message"),
    [
        (GateFile(some(layers=2)), INFO, "must have gates of 2 KV heads and the hidden size 8, as the model has, got"),
        (GateFile(some(layers=2)), INFO, "got none in layer 2"),
        (GateFile(some()), INFO._replace(layers=2, evictable=(1, 5)), "got none in layer 5"),
        (GateFile(some()), INFO._replace(heads=4), "got 2 KV heads and 8 in layer 0"),
        (GateFile(some(hidden=9)), INFO, "got 2 KV heads and 9 in layer 0"),
        (GateFile(some(hidden=9, units=8)), INFO, "got 2 KV heads and 9 in layer 0"),
    ],
)
def test_other_models(content: GateFile, info: ModelInfo, message: str) -> None:
    GATE_FILES.check(GateFile(some(), MODEL), "a.safetensors", INFO)
    GATE_FILES.check(GateFile(some(heads=1, units=3)), "a.safetensors", INFO._replace(heads=8))
    GATE_FILES.check(GateFile(some(hidden=9)), "a.safetensors", INFO._replace(hidden=0))
    with pytest.raises(kvpolicy.KVPolicyError, match=r"^The gate file 'a.safetensors' must ") as raised:
        GATE_FILES.check(content, "a.safetensors", info)
    assert message in str(raised.value)


@pytest.mark.parametrize("spec", ["kvzap:file={}@0.5", "kvcrush/kvzap:file={}@0.5", "chunk/kvzap:file={}@0.5"])
def test_files_are_refused_when_a_policy_is_planned_or_attached(spec: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "gate.safetensors"
    model = kvpolicy.tiny()[0]
    policy = spec.format(path)
    with pytest.raises(kvpolicy.KVPolicyError, match=r"The gate file must be a readable file or tiny or tiny-4k, got"):
        kvpolicy.attach(model, policy)
    GATE_FILES.save(path, GateFile(some(4, 8, 64)))
    with pytest.raises(kvpolicy.KVPolicyError, match="must have gates of 4 KV heads and the hidden size 128"):
        kvpolicy.plan("tiny", policy)
    GATE_FILES.save(path, GateFile(some(4, 8, 128)))
    kvpolicy.attach(model, policy).detach()


@pytest.mark.parametrize("name", ["tiny", "tiny-4k"])
def test_the_gates_of_the_embedded_models_fit(name: Any) -> None:
    content = GATE_FILES.load(name)
    assert content.made is not None and content.made["kind"] == "linear" and min(content.made["r2"]) > 0.4
