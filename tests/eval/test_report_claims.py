"""What a report claims of sweeps that are not like ours: lengths, scales, kinds of budgets, few examples, ties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("yaml")

from kvpolicy_eval.report.gather import Findings, gather
from kvpolicy_eval.sweep import tidy
from kvpolicy_eval.sweep.cells import Cell, Store

COIN = [0.0, 1.0] * 10


def cell(folder: Path, policy: str, task: str, share: float = 0.5, higher: bool = True, **metrics: Any) -> None:
    """Write a cell: each metric has its examples, and, where lm-eval would not take their mean, what it found."""
    method, _, budget = policy.partition("@")
    words = {"model": "m", "task": task, "method": method, "budget": budget}
    found = {name: one if isinstance(one, tuple) else (one, sum(one) / len(one)) for name, one in metrics.items()}
    cost = {"kv_bytes": int(1e6 * share), "full_kv_bytes": 10**6, "kv_share": share}
    cost |= {"tokens_per_second": 9.0, "new_tokens_per_second": 9.0}
    own = {"cell": words, "seconds": 1.0, "peak_bytes": None, "probe": {}, "versions": {}}
    own["scores"] = {task: {f"{name},none": values for name, (values, _) in found.items()}}
    results = {
        "results": {task: {f"{name},none": value for name, (_, value) in found.items()}},
        "higher_is_better": {task: dict.fromkeys(metrics, higher)},
        "config": {"kvpolicy": {"tasks": {f"{task}/generate_until": cost}}},
        "kvpolicy_sweep": own,
    }
    Store(folder).finish(Cell(**words), results, {})


def accuracies(findings: Findings) -> dict[str, Any]:
    return {point.policy: point.mean and point.mean.value for point in findings.points}


# RULER's lengths


def test_a_length_that_was_not_measured_is_never_chosen(tmp_path: Path) -> None:
    """RULER writes -1 for an example of another length, and its mean leaves those out."""
    mixed = [-1.0, 1.0] * 10 + [-1.0, 0.0] * 10
    for policy in ("full", "h2o@0.2"):
        cell(tmp_path, policy, "niah", **{"16384": [-1.0] * 40, "4096": (mixed, 0.5)})
    assert {row.metric for row in tidy.collect(tmp_path)} == {"4096"}
    findings = gather(tmp_path)
    assert findings.metrics == {"niah": "4096,none"}
    assert accuracies(findings) == {"full": 0.5, "h2o@0.2": 0.5}
    for point in findings.points:
        assert point.tasks["niah"].examples == 20
        assert 0.2 < point.tasks["niah"].low < 0.5 < point.tasks["niah"].high < 0.8


def test_values_that_are_minus_one_stay_where_they_are_measured(tmp_path: Path) -> None:
    cell(tmp_path, "full", "signs", score=[-1.0, 1.0, 1.0, 1.0])
    (row,) = tidy.collect(tmp_path)
    assert (row.value, row.examples, row.high) == (0.5, 4, 1.0)
