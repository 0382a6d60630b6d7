"""Cells of sweeps that nothing was measured for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpolicy_eval.sweep.cells import Cell, Store


def cell(
    folder: Path,
    policy: str,
    task: str,
    share: float = 0.5,
    higher: bool = True,
    model: str = "m",
    probe: dict[str, Any] | None = None,
    **metrics: Any,
) -> None:
    """Write a cell: each metric has its examples, and, where lm-eval would not take their mean, what it found."""
    method, _, budget = policy.partition("@")
    fields = {"model": model, "task": task, "method": method, "budget": budget}
    found = {name: one if isinstance(one, tuple) else (one, sum(one) / len(one)) for name, one in metrics.items()}
    cost = {"kv_bytes": int(4e6 * share), "full_kv_bytes": 4 * 10**6, "kv_share": share}
    cost |= {"tokens_per_second": 1000 / share, "new_tokens_per_second": 50.0}
    record: dict[str, Any] = {"cell": fields, "seconds": 1.0, "peak_bytes": None, "probe": probe or {}}
    record["scores"] = {task: {f"{name},none": values for name, (values, _) in found.items()}}
    values = {f"{name},none": value for name, (_, value) in found.items()}
    results = {
        "results": {task: {"alias": task, **values, **{f"{name}_stderr,none": "N/A" for name in found}}},
        "higher_is_better": {task: dict.fromkeys(metrics, higher)},
        "config": {"kvpolicy": {"tasks": {f"{task}/generate_until": cost}}},
        "kvpolicy_sweep": record | {"versions": {"torch": "2.13.0", "kvpolicy": "0.1.0"}},
    }
    Store(folder).finish(Cell(**fields), results, {})
