"""Calibration folders; tests/files/test_model_files.py has the rules of all files about models."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpolicy.codecs._files import FACTS, TENSORS, CalibrationFile, check_model, load, save
from kvpolicy.protocols import ModelInfo
from kvpolicy.text.model_file import digest

META: dict[str, Any] = {"model": None, "head_dim": 4, "loss": 0.1, "groups": {"keys.pre": [[0], [1, 2]]}}
WEIGHTS = torch.linspace(-1, 1, 64)
INFO = ModelInfo(layers=3, heads=2, head_dim=4, weights=WEIGHTS)
MODEL = {"name": "m", "type": "llama", "layers": 3, "heads": 2, "head_dim": 4, "weights": WEIGHTS.tolist()}


def sealed(folder: Path, **fields: Any) -> None:
    """Change fields so that the hash fits."""
    facts = json.loads((folder / FACTS).read_text()) | fields
    facts.pop("sha256")
    (folder / FACTS).write_text(json.dumps(facts | {"sha256": digest(facts)}))


def replace_tensors(folder: Path) -> None:
    """By bytes that are none, but have their hash."""
    (folder / TENSORS).write_bytes(b"nonsense")
    sealed(folder, tensors_sha256=hashlib.sha256(b"nonsense").hexdigest())


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda f: (f / TENSORS).write_bytes((f / TENSORS).read_bytes()[:-3]), "truncated"),
        (lambda f: (f / TENSORS).unlink(), "must contain the file tensors.safetensors, got none"),
        (lambda f: (f / FACTS).unlink(), "must contain the file calibration.json, got none"),
        (lambda f: (f / FACTS).write_text("{"), "must be JSON, got one that cannot be parsed"),
        (lambda f: (f / FACTS).write_text("{}"), "must be written by kvpolicy, got one without its fields"),
        (lambda f: sealed(f, method="kvquant"), "must be for csr, got one for kvquant"),
        (replace_tensors, "must be a safetensors file, got one that cannot be parsed"),
    ],
)
def test_damage_is_told(tmp_path: Path, harm: Any, words: str) -> None:
    save(tmp_path, "csr", META, {"keys.pre.0": torch.randn(4, 8).half(), "values.sn1.0": torch.randn(8, 4).half().T})
    harm(tmp_path)
    with pytest.raises(ValueError, match=rf"{words}.*kvpolicy calibrate csr.*\.$"):
        load(str(tmp_path), "csr")


@pytest.mark.parametrize(
    ("name", "method", "words"),
    [
        ("missing", "csr", "must be a folder or tiny or tiny-4k, got '.*missing'"),
        ("file", "csr", "must be a folder or tiny or tiny-4k, got '.*file'"),
        ("tiny", "no-such-method", "must be a folder, got '.*tiny'"),  # the embedded model's own is found by its name
    ],
)
def test_no_folder(tmp_path: Path, name: str, method: str, words: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=words):
        load(name if name == "tiny" else str(tmp_path / name), method)


def test_a_calibration_that_fits() -> None:
    """Without a model, only the head dimension counts; a tuned model is its own."""
    check_model(CalibrationFile(META, {}), "f", INFO._replace(layers=9, weights=None))
    with pytest.raises(ValueError, match="must be for a head dimension of 8, got 4"):
        check_model(CalibrationFile(META, {}), "f", INFO._replace(head_dim=8))
    tuned = WEIGHTS + 0.03 * torch.randn(64, generator=torch.Generator().manual_seed(0))
    for weights in (WEIGHTS, None, tuned):
        check_model(CalibrationFile({"model": MODEL}, {}), "f", INFO._replace(weights=weights))
    check_model(CalibrationFile({"model": MODEL | {"weights": None}}, {}), "f", INFO)


@pytest.mark.parametrize("weights", [WEIGHTS.flip(0), torch.ones(3), torch.full((64,), torch.nan)])
def test_another_model_is_refused(weights: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"'f' must be for this model, .* made for another model .*weights differ"):
        check_model(CalibrationFile({"model": MODEL}, {}), "f", INFO._replace(weights=weights))
