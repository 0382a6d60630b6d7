"""Calibrations come back as they were written, and damaged or foreign ones are refused in one sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy.codecs._files import FACTS, TENSORS, CalibrationFile, check_model, load, save
from kvpolicy.protocols import ModelInfo
from kvpolicy.text.model_file import digest

META: dict[str, Any] = {"model": None, "head_dim": 4, "loss": 0.1, "groups": {"keys.pre": [[0], [1, 2]]}}
INFO = ModelInfo(layers=3, heads=2, head_dim=4, weights=torch.linspace(-1, 1, 64))


def some() -> dict[str, Tensor]:
    return {"keys.pre.0": torch.randn(4, 8).half(), "values.sn1.0": torch.randn(8, 4).half().T}


def written(folder: Path, meta: dict[str, Any] | None = None) -> dict[str, Tensor]:
    tensors = some()
    save(folder, "csr", META if meta is None else meta, tensors)
    return tensors


def edit(folder: Path, **fields: Any) -> None:
    facts = json.loads((folder / FACTS).read_text()) | fields
    (folder / FACTS).write_text(json.dumps(facts))


def sealed(folder: Path, **fields: Any) -> None:
    """Change fields so that the hash fits."""
    facts = json.loads((folder / FACTS).read_text()) | fields
    facts.pop("sha256")
    (folder / FACTS).write_text(json.dumps(facts | {"sha256": digest(facts)}))


def model(**fields: Any) -> dict[str, Any]:
    assert INFO.weights is not None
    own = {"name": "m", "type": "llama", "layers": 3, "heads": 2, "head_dim": 4, "weights": INFO.weights.tolist()}
    return own | fields


def test_read_once_until_it_changes(tmp_path: Path) -> None:
    written(tmp_path)
    found = load(str(tmp_path), "csr")
    assert load(os.path.relpath(tmp_path), "csr") is found
    written(tmp_path, META | {"loss": 0.2})
    assert load(str(tmp_path), "csr").meta["loss"] == 0.2


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda f: (f / TENSORS).write_bytes((f / TENSORS).read_bytes()[:-3]), "truncated"),
        (lambda f: (f / TENSORS).unlink(), "must contain the file tensors.safetensors, got none"),
        (lambda f: (f / FACTS).unlink(), "must contain the file calibration.json, got none"),
        (lambda f: (f / FACTS).write_text("{"), "must be JSON, got one that cannot be parsed"),
        (lambda f: (f / FACTS).write_text("[1]"), "must be written by kvpolicy, got one without its fields"),
        (lambda f: (f / FACTS).write_text("{}"), "must be written by kvpolicy, got one without its fields"),
        (lambda f: edit(f, meta={"head_dim": 8}), "got an edited or damaged one"),
        (lambda f: edit(f, method="kvquant"), "got an edited or damaged one"),
        (lambda f: edit(f, format=2, kvpolicy="9.0"), "format 1 or older, got format 2 of kvpolicy 9.0"),
        (lambda f: sealed(f, method="kvquant"), "must be for csr, got one for kvquant"),
    ],
)
def test_damage_is_told(tmp_path: Path, harm: Any, words: str) -> None:
    written(tmp_path)
    harm(tmp_path)
    with pytest.raises(ValueError, match=words) as caught:
        load(str(tmp_path), "csr")
    assert str(caught.value).endswith(".")
    assert "kvpolicy calibrate csr" in str(caught.value)


def test_tensors_that_are_none_but_have_their_hash(tmp_path: Path) -> None:
    import hashlib

    written(tmp_path)
    (tmp_path / TENSORS).write_bytes(b"nonsense")
    sealed(tmp_path, tensors_sha256=hashlib.sha256(b"nonsense").hexdigest())
    with pytest.raises(ValueError, match="must be a safetensors file, got one that cannot be parsed"):
        load(str(tmp_path), "csr")


@pytest.mark.parametrize("name", ["missing", "file"])
def test_no_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=rf"must be a folder or tiny or tiny-4k, got '.*{name}'"):
        load(str(tmp_path / name), "csr")


def test_the_embedded_models_own_is_found_by_its_name() -> None:
    with pytest.raises(ValueError, match="must be a folder, got 'tiny'"):
        load("tiny", "no-such-method")


def test_without_a_model_only_the_head_dimension_counts() -> None:
    found = CalibrationFile(META, {})
    check_model(found, "f", INFO._replace(layers=9, weights=None))
    with pytest.raises(ValueError, match="must be for a head dimension of 8, got 4"):
        check_model(found, "f", INFO._replace(head_dim=8))


def test_its_own_model_fits() -> None:
    found = CalibrationFile({"model": model()}, {})
    check_model(found, "f", INFO)
    check_model(found, "f", INFO._replace(weights=None))
    check_model(CalibrationFile({"model": model(weights=None)}, {}), "f", INFO)
    assert INFO.weights is not None
    tuned = INFO.weights + 0.03 * torch.randn(64, generator=torch.Generator().manual_seed(0))
    check_model(found, "f", INFO._replace(weights=tuned))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"weights": torch.linspace(1, -1, 64)}, "weights differ"),
        ({"weights": torch.ones(3)}, "weights differ"),
        ({"weights": torch.full((64,), torch.nan)}, "weights differ"),
    ],
)
def test_another_model_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(
        ValueError, match="'f' must be for this model, got one that was made for another model .*" + words
    ):
        check_model(CalibrationFile({"model": model()}, {}), "f", INFO._replace(**fields))
