"""Filter files: what is written comes back, and everything else is refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import kvpolicy
from kvpolicy.protocols import ModelInfo
from kvpolicy.selectors.filter_files import FILTER_FILES, FilterFile
from kvpolicy.text.model_file import digest

WEIGHTS = torch.linspace(-1, 1, 64)
MODEL = {"name": "m", "type": "llama", "layers": 3, "heads": 2, "head_dim": 4, "weights": WEIGHTS.tolist()}
KEY = FILTER_FILES.key
INFO = ModelInfo(layers=3, heads=2, head_dim=4, weights=WEIGHTS)


def some(heads: int = 2, layers: int = 3) -> dict[int, Tensor]:
    return {layer: torch.randn(heads, 4, generator=torch.Generator().manual_seed(layer)) for layer in range(layers)}


def sealed(path: Path, tensors: dict[str, Tensor], **fields: Any) -> None:
    """Write a file whose hash fits, whatever is in it."""
    facts = {"format": 1, "kvpolicy": "0", "model": None, "made": None, **fields}
    found = digest(facts, tensors)
    save_file(tensors, path, metadata={KEY: json.dumps(facts | {"sha256": found})})


def test_names_of_tensors(tmp_path: Path) -> None:
    path = tmp_path / "filters.safetensors"
    FILTER_FILES.save(path, FilterFile(some(), MODEL, {"tokens": 300}))
    with safe_open(path, framework="pt") as file:
        assert sorted(file.keys()) == ["filters.0", "filters.1", "filters.2"]
        assert json.loads(file.metadata()[KEY])["format"] == 1


def test_the_filters_of_the_embedded_models_are_means_of_unit_vectors() -> None:
    for name in ("tiny", "tiny-4k"):
        filters = FILTER_FILES.load(name).filters.values()
        assert all(bool((tensor.norm(dim=-1) <= 1 + 1e-6).all()) for tensor in filters)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: save_file({"a": WEIGHTS}, path), "must be written by kvpolicy, got one that does not say so"),
        (lambda path: save_file({}, path, {KEY: "[" * 100_000}), "got one that does not say so"),
        (lambda path: save_file({}, path, {KEY: '"x"'}), "got one that does not say so"),
        (lambda path: save_file({}, path, {KEY: "{}"}), "must be as it was written, got an edited or damaged one"),
        (lambda path: sealed(path, {"filters.0": WEIGHTS}), "got 'filters.0' of the shape [64]"),
        (lambda path: sealed(path, {"filters.x": WEIGHTS[None]}), "got 'filters.x' of the shape [1, 64]"),
        (lambda path: sealed(path, {"filters.0": WEIGHTS[None] / 0}), "must have finite filters [H, D] of layers"),
    ],
)
def test_malformed_files(write: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "filters.safetensors"
    write(path)
    with pytest.raises(kvpolicy.KVPolicyError) as raised:
        FILTER_FILES.load(str(path))
    assert message in str(raised.value) and "\n" not in str(raised.value) and len(str(raised.value)) < 500
    assert str(raised.value).startswith("The filter file ") and str(path)[-10:] in str(raised.value)


@pytest.mark.parametrize(
    ("content", "info", "message"),
    [
        (
            FilterFile(some(layers=2)),
            INFO,
            "for 2 KV heads of dimension 4, as the model has, got none in layer 2",
        ),
        (FilterFile(some()), INFO._replace(layers=2, evictable=(1, 5)), "got none in layer 5"),
        (FilterFile(some()), INFO._replace(heads=4), "for 4 KV heads of dimension 4, as the model has, got [2, 4]"),
        (FilterFile(some()), INFO._replace(head_dim=8), "of dimension 8, as the model has, got [2, 4] in layer 0"),
    ],
)
def test_other_models(content: FilterFile, info: ModelInfo, message: str) -> None:
    FILTER_FILES.check(FilterFile(some(), MODEL), "a.safetensors", INFO)
    FILTER_FILES.check(FilterFile(some(heads=1)), "a.safetensors", INFO._replace(heads=8))
    with pytest.raises(kvpolicy.KVPolicyError, match=r"^The filter file 'a.safetensors' must ") as raised:
        FILTER_FILES.check(content, "a.safetensors", info)
    assert message in str(raised.value)


@pytest.mark.parametrize("spec", ["qfilters:file={}@0.5", "kvcrush/qfilters:file={}@0.5", "chunk/qfilters:file={}@0.5"])
def test_files_are_refused_when_a_policy_is_planned_or_attached(spec: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "filters.safetensors"
    model = kvpolicy.tiny()[0]
    policy = spec.format(path)
    with pytest.raises(
        kvpolicy.KVPolicyError, match=r"must be a readable file or tiny or tiny-4k, got '.*' \(No such file"
    ):
        kvpolicy.attach(model, policy)
    FILTER_FILES.save(path, FilterFile(some()))
    with pytest.raises(kvpolicy.KVPolicyError, match="must have filters for 4 KV heads of dimension 32"):
        kvpolicy.plan("tiny", policy)
    FILTER_FILES.save(path, FilterFile({layer: torch.ones(4, 32) for layer in range(8)}))
    kvpolicy.attach(model, policy).detach()
