"""Files of tensors that selectors need: what is in none of them, and models that they do not fit.

What holds for every kind of file is in tests/files/test_model_files.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import kvpolicy
from kvpolicy import KVCrush, KVzap, QFilters, TriAttention
from kvpolicy.protocols import ChecksModel, ModelInfo
from kvpolicy.selectors.center_files import CENTER_FILES, CenterFile, Centers
from kvpolicy.selectors.filter_files import FILTER_FILES, FilterFile
from kvpolicy.selectors.gate_files import GATE_FILES, GateFile, Inner, LayerGate
from kvpolicy.text.model_file import digest

INFO = ModelInfo(layers=3, heads=2, head_dim=4, hidden=8)


def filters(heads: int = 2, layers: int = 3, dim: int = 4) -> FilterFile:
    return FilterFile({layer: torch.randn(heads, dim) for layer in range(layers)})


def centers(heads: int = 4, layers: int = 3, dim: int = 4) -> CenterFile:
    return CenterFile({n: Centers(torch.randn(heads, dim), torch.rand(heads, dim // 2)) for n in range(layers)})


def gates(heads: int = 2, layers: int = 3, hidden: int = 8, units: int = 0) -> GateFile:
    """A gate of each layer, linear without units."""

    def gate() -> LayerGate:
        inner = Inner(torch.randn(units, hidden), torch.randn(units)) if units else ()
        return LayerGate(torch.randn(heads, units or hidden), torch.randn(heads), inner)

    return GateFile({layer: gate() for layer in range(layers)})


@pytest.mark.parametrize("units", [0, 5])
def test_names_of_tensors(units: int, tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    FILTER_FILES.save(path, filters())
    assert sorted(load_file(path)) == ["filters.0", "filters.1", "filters.2"]
    GATE_FILES.save(path, gates(units=units, layers=1))
    parts = ["bias", "weight"] if not units else ["bias", "inner_bias", "inner_weight", "weight"]
    assert sorted(load_file(path)) == [f"gates.0.{part}" for part in parts]
    assert GATE_FILES.load(str(path)).gates[0].hidden == 8


def test_tensors_that_were_read_in_inference_mode_serve_outside(tmp_path: Path) -> None:
    path = tmp_path / "gate.safetensors"
    GATE_FILES.save(path, gates())
    with torch.inference_mode():
        gate = GATE_FILES.load(str(path)).gates[0]
    assert not gate.weight.is_inference()


LINE = torch.zeros(2)
TABLE = torch.zeros(2, 8)
INNER = {"gates.0.weight": TABLE, "gates.0.bias": LINE, "gates.0.inner_bias": torch.zeros(8)}
MEAN = {"centers.0.mean": torch.zeros(2, 4)}
CONTENTS: dict[str, list[tuple[dict[str, Tensor], str]]] = {
    "filter": [
        ({"filters.0": LINE}, "got 'filters.0' of the shape [2]"),
        ({"filters.x": LINE[None]}, "got 'filters.x' of the shape [1, 2]"),
        ({"filters.0": LINE[None] / 0}, "must have finite filters [H, D] of layers"),
    ],
    "center": [
        ({"centers.x.mean": TABLE}, "must have finite means [Hq, D] and lengths [Hq, F] of layers"),
        ({"centers.0.mean": LINE}, "got 'centers.0.mean' of the shape [2]"),
        ({"centers.0.mean": TABLE / 0}, "must have finite means"),
        ({"centers.0.length": TABLE}, "got 'centers.0.length'"),
        (MEAN, "a mean and lengths of every query head of a layer, got {'mean'"),
        (MEAN | {"centers.0.lengths": torch.zeros(3, 2)}, "'lengths': [3, 2]"),
    ],
    "gate": [
        ({"gates.0.weight": LINE}, "got 'gates.0.weight' of the shape [2]"),
        ({"gates.x.bias": LINE}, "got 'gates.x.bias' of the shape [2]"),
        ({"0.bias": LINE}, "got '0.bias' of the shape [2]"),
        ({"gates.0.norm": LINE}, "got 'gates.0.norm' of the shape [2]"),
        ({"gates.0.bias": LINE / 0}, "must have finite weights and biases of layers"),
        ({"gates.0.bias": LINE}, "got {'bias': [2]} in layer 0"),
        ({"gates.0.weight": TABLE, "gates.0.bias": LINE[:1]}, "'bias': [1]} in layer 0"),
        (INNER, "an inner weight [n, hidden] and an inner bias [n], got"),
        (INNER | {"gates.0.inner_weight": TABLE.clone()}, "'inner_weight': [2, 8]"),
    ],
}
KINDS = {"filter": FILTER_FILES, "center": CENTER_FILES, "gate": GATE_FILES}
MALFORMED = [(kind, *case) for kind, cases in CONTENTS.items() for case in cases]


def refusal(kind: Any, path: Path) -> str:
    with pytest.raises(kvpolicy.KVPolicyError) as raised:
        kind.load(str(path))
    message = str(raised.value)
    assert "\n" not in message and len(message) < 500 and str(path)[-10:] in message and kind.command in message
    return message


@pytest.mark.parametrize(("kind", "tensors", "message"), MALFORMED, ids=[message for _, _, message in MALFORMED])
def test_tensors_that_are_none(kind: str, tensors: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    """In a file whose hash fits."""
    path = tmp_path / "f.safetensors"
    facts: dict[str, Any] = {"format": 1, "kvpolicy": "0", "model": None, "made": None}
    save_file(tensors, path, {KINDS[kind].key: json.dumps(facts | {"sha256": digest(facts, tensors)})})
    told = refusal(KINDS[kind], path)
    assert message in told and told.startswith(f"The {kind} file ")


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_others(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    for metadata in ({}, {"kvpolicy_another": "{}"}, {KINDS[kind].key: "[" * 100_000}, {KINDS[kind].key: '"x"'}):
        save_file({"a": LINE}, path, metadata)
        assert "must be written by kvpolicy, got one that does not say so" in refusal(KINDS[kind], path)
    save_file({}, path, {KINDS[kind].key: "{}"})
    assert "must be as it was written, got an edited or damaged one" in refusal(KINDS[kind], path)


@pytest.mark.parametrize(
    ("kind", "content", "info", "message"),
    [
        ("filter", filters(layers=2), INFO, "filters for 2 KV heads of dimension 4, as the model has, got none in lay"),
        ("filter", filters(), INFO._replace(layers=2, evictable=(1, 5)), "got none in layer 5"),
        ("filter", filters(), INFO._replace(heads=4), "for 4 KV heads of dimension 4, as the model has, got [2, 4]"),
        ("filter", filters(), INFO._replace(head_dim=8), "dimension 8, as the model has, got [2, 4] in layer 0"),
        ("center", centers(layers=1), INFO, "have centers for the query heads of 2 KV heads of dimension 4, as the"),
        ("center", centers(layers=1), INFO, "got none in layer 1"),
        ("center", centers(heads=3), INFO, "got [3, 4] in layer 0"),
        ("center", centers(dim=6), INFO, "got [4, 6] in layer 0"),
        ("gate", gates(layers=2), INFO, "have gates of 2 KV heads and the hidden size 8, as the model has, got none"),
        ("gate", gates(), INFO._replace(heads=4), "got 2 KV heads and 8 in layer 0"),
        ("gate", gates(hidden=9), INFO, "got 2 KV heads and 9 in layer 0"),
        ("gate", gates(hidden=9, units=8), INFO, "got 2 KV heads and 9 in layer 0"),
    ],
)
def test_models_that_a_file_does_not_fit(kind: str, content: Any, info: ModelInfo, message: str) -> None:
    with pytest.raises(kvpolicy.KVPolicyError, match=rf"^The {kind} file 'f' must ") as raised:
        KINDS[kind].check(content, "f", info)
    assert message in str(raised.value)


def test_models_that_a_file_fits() -> None:
    """One vector may serve all heads, and a model whose hidden size is unknown takes any."""
    for heads in (2, 1):
        FILTER_FILES.check(filters(heads), "f", INFO)
        CENTER_FILES.check(centers(heads), "f", INFO)
        GATE_FILES.check(gates(heads, units=3), "f", INFO)
    GATE_FILES.check(gates(hidden=9), "f", INFO._replace(hidden=0))


FITTING = [
    ("qfilters", FILTER_FILES, filters(), filters(4, 8, 32), "filters for 4 KV heads of dimension 32"),
    ("kvzap", GATE_FILES, gates(4, 8, 64), gates(4, 8, 128), "gates of 4 KV heads and the hidden size 128"),
]


@pytest.mark.parametrize("wrapper", ["", "kvcrush/", "chunk/"])
@pytest.mark.parametrize(("name", "kind", "wrong", "right", "message"), FITTING, ids=["qfilters", "kvzap"])
def test_files_are_refused_when_a_policy_is_planned_or_attached(
    wrapper: str, name: str, kind: Any, wrong: Any, right: Any, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "f.safetensors"
    model = kvpolicy.tiny()[0]
    policy = f"{wrapper}{name}:file={path}@0.5"
    with pytest.raises(kvpolicy.KVPolicyError, match=r"must be a readable file or tiny or tiny-4k, got '.*' \(No such"):
        kvpolicy.attach(model, policy)
    kind.save(path, wrong)
    with pytest.raises(kvpolicy.KVPolicyError, match=f"must have {message}"):
        kvpolicy.plan("tiny", policy)
    kind.save(path, right)
    kvpolicy.attach(model, policy).detach()


@pytest.mark.parametrize("selector", [QFilters, KVzap, TriAttention])
def test_selectors_ask_for_a_file_of_the_model(selector: Any) -> None:
    info = ModelInfo(layers=8, heads=4, head_dim=32)
    for each in (selector(), KVCrush(base=selector(file="tiny-4k"))):
        assert isinstance(each, ChecksModel)
        each.check(info)
        with pytest.raises(kvpolicy.KVPolicyError, match="made for another model"):
            each.check(info._replace(heads=2))
    with pytest.raises(kvpolicy.KVPolicyError, match="must be a file or 'tiny', got an empty string"):
        selector(file="")
