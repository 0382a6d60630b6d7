"""`kvpolicy tiny`: its facts are those of the embedded model and of the model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from tests.cli.conftest import Facts, Run


def test_facts_are_those_of_the_model(facts: Facts, run: Run) -> None:
    found = facts("tiny")
    model, _ = kvpolicy.tiny()
    config = model.config
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    assert (Path(found["path"]) / "config.json").exists()
    assert found["shape"]["kv_heads"] == config.num_key_value_heads
    assert [entry["codec"] for entry in found["calibrations"]] == ["csr", "kvquant", "lowrank", "oscar"]
    assert all((Path(entry["path"]) / "calibration.json").exists() for entry in found["calibrations"])
    files = [entry["method"] for entry in found["calibration_files"]]
    assert files == ["duo", "kvzap", "qfilters", "triattention"]
    assert all(name in run("tiny") for name in files)
    for name in files:  # the file is there, and the method takes it without an option
        kvpolicy.plan("tiny", f"uniform/{name}+streaming@0.5" if name == "duo" else f"{name}@0.5", prompt=99)
    scope: dict[str, Any] = {}
    exec(found["load"], scope)
    assert scope["model"].config.hidden_size == found["shape"]["hidden"]
    run(["tiny"])


def test_facts_are_those_of_the_model_card(facts: Facts) -> None:
    page = Path(__file__).parents[2] / "docs" / "model-card.md"
    if not page.exists():
        pytest.skip("the docs are not installed")
    text = page.read_text(encoding="utf-8")
    found = facts("tiny")
    assert found["card"] == "docs/model-card.md"
    assert f"{found['parameters'] / 1e6:.2f} M parameters" in text
    for number in (f"{found['shape']['layers']} layers", "7.2 M tokens", "1,024"):
        assert number in text
