"""Center files: what is written comes back, and everything else is refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import kvpolicy
from kvpolicy.protocols import ModelInfo
from kvpolicy.selectors.center_files import CENTER_FILES, CenterFile, Centers
from kvpolicy.text.model_file import digest

KEY = CENTER_FILES.key
INFO = ModelInfo(layers=2, heads=2, head_dim=4)


def some(heads: int = 4, layers: int = 2, dim: int = 4) -> dict[int, Centers]:
    return {n: Centers(torch.randn(heads, dim), torch.rand(heads, dim // 2)) for n in range(layers)}


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (some(layers=1), "got none in layer 1"),
        (some(heads=3), r"got \[3, 4\] in layer 0"),
        (some(dim=6), r"got \[4, 6\] in layer 0"),
    ],
)
def test_another_model(content: dict[int, Centers], got: str) -> None:
    with pytest.raises(
        kvpolicy.KVPolicyError, match=rf"must have centers for the query heads of 2 KV heads.*{got}; try"
    ):
        CENTER_FILES.check(CenterFile(content), "f", INFO)
    CENTER_FILES.check(CenterFile(some(heads=1)), "f", INFO)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"centers.x.mean": torch.zeros(2, 4)}, r"must have finite means \[Hq, D\] and lengths \[Hq, F\] of layers"),
        ({"centers.0.mean": torch.zeros(4)}, r"got 'centers\.0\.mean' of the shape \[4\]"),
        ({"centers.0.mean": torch.full((2, 4), torch.nan)}, "must have finite means"),
        ({"centers.0.length": torch.zeros(2, 4)}, r"got 'centers\.0\.length'"),
        ({"centers.0.mean": torch.zeros(2, 4)}, r"a mean and lengths of every query head of a layer, got \{'mean'"),
        ({"centers.0.mean": torch.zeros(2, 4), "centers.0.lengths": torch.zeros(3, 2)}, r"'lengths': \[3, 2\]"),
    ],
)
def test_files_that_are_none(tensors: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    facts: dict[str, Any] = {"format": 1, "kvpolicy": "0", "model": None, "made": None}
    save_file(tensors, path, metadata={KEY: json.dumps(facts | {"sha256": digest(facts, tensors)})})
    with pytest.raises(kvpolicy.KVPolicyError, match=message):
        CENTER_FILES.load(str(path))


@pytest.mark.parametrize("name", ["tiny", "tiny-4k"])
def test_embedded_files_are_of_their_models(name: Any) -> None:
    found = CENTER_FILES.load(name)
    assert found.model is not None and found.model["name"] == name
    model, _ = kvpolicy.tiny(name=name)
    with kvpolicy.attach(model, f"triattention:file={name}@0.5"):
        pass
