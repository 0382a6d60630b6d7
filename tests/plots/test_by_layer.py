"""Pictures of policies by layer."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

import torch

import kvpolicy
from kvpolicy.planning.curves import save_layers
from kvpolicy.reporting import plots
from kvpolicy.reporting.plots.accuracy import looks


def test_of_caches_and_plans(tmp_path: Path) -> None:
    save_layers(tmp_path / "plan.json", ["snapkv@0.5", "h2o+tokenwise@0.25"] * 4)
    model, _ = kvpolicy.tiny()
    with torch.no_grad(), kvpolicy.attach(model, f"tuned:file={tmp_path}/plan.json@0.5") as handle:
        model(torch.arange(5, 105)[None])
        for draw in (plots.budgets, plots.bytes_by_kind, plots.kept):
            assert draw(handle).axes
        assert handle.plan is not None and plots.budgets(handle.plan).axes
        assert plots.bytes_by_kind(handle.report()).axes
        with pytest.raises(kvpolicy.KVPolicyError, match="must measure layers, got tuned:file="):
            plots.layer_similarity(handle)


def test_a_method_in_a_chart() -> None:
    """Its color is its own, since its parts are not known without a model."""
    found = looks(["snapkv", "tuned:file=a.json", "h2o", "tuned:file=b.json"])
    assert len({(look.color, look.marker) for look in found.values()}) == 4
