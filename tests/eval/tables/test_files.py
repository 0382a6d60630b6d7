"""The table of cache files: what is exact diverges nowhere, and fewer bytes diverge more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvpolicy_eval.tables import files
from tests.files.kvtc import calibrated, spec


def test_forms_are_compared_with_the_cache_that_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PROMPT", 48)
    model = calibrated(tmp_path / "calibration")
    rows = [row[None] for row in torch.randint(3, 40, (2, 56), generator=torch.Generator().manual_seed(2))]
    wanted = {
        "none": None,
        "zlib": "zlib",
        "many": spec(tmp_path / "calibration", 1),
        "few": spec(tmp_path / "calibration", 4),
    }
    for policy in ("full", "h2o@0.8"):
        found = files.measured(model, rows, policy, wanted)
        assert found["none"] == found["zlib"] and found["none"].divergence == 0 and found["none"].same == 1
        assert found["none"].nbytes > found["many"].nbytes > found["few"].nbytes
        assert 0 < found["many"].divergence < found["few"].divergence
        assert found["few"].same <= 1


def test_layers_have_components_together_only_where_they_hold_the_same_tokens() -> None:
    found = {1: Path("one"), 8: Path("all")}
    assert "kvtc of 8 layers, ratio=4" in files.forms(found, "full")
    assert [*files.forms(found, "h2o@0.5")] == ["none", "zlib", "kvtc, ratio=4", "kvtc, ratio=16"]
