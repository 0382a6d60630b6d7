"""The tidy table of a sweep: one row per cell, task and metric, with its bootstrap interval and its costs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from kvpolicy.text.formats import stamp
from kvpolicy_eval.sweep import bootstrap
from kvpolicy_eval.sweep.cells import DONE, FAILED, FORMAT, Store, write
from kvpolicy_eval.sweep.modes import split_task


@dataclass(kw_only=True, slots=True)
class Row:
    """A row of the table.

    Attributes:
        model: Of the cell.
        method: Of the cell.
        budget: Of the cell.
        task: Name of the task; for a group of tasks, one of them.
        mode: Place of the question: `inside`, `after` or `second`, from the name of the task.
        metric: Name of the metric.
        filter: lm-eval's filter of the answers.
        value: lm-eval's value over all examples.
        low: Lower end of the bootstrap interval, if the metric can be resampled.
        high: Upper end of the interval.
        examples: Number of examples.
        higher_is_better: Of the metric.
        kv_bytes: Bytes held per sequence, on average.
        full_kv_bytes: Bytes of the full cache for the same tokens.
        kv_share: `kv_bytes` over `full_kv_bytes`.
        tokens_per_second: Prompt and new tokens.
        new_tokens_per_second: Tokens of generation or scoring.
        seconds: Of the cell.
        peak_bytes: Peak memory of the GPU, if there is one.
        status: `done` or `failed`.
        error: Type and message of the error.
        file: Path relative to the sweep's folder.
    """

    model: str
    method: str
    budget: str
    task: str
    mode: str = field(init=False)
    metric: str = ""
    filter: str = ""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    examples: int = 0
    higher_is_better: bool = True
    kv_bytes: int | None = None
    full_kv_bytes: int | None = None
    kv_share: float | None = None
    tokens_per_second: float | None = None
    new_tokens_per_second: float | None = None
    seconds: float | None = None
    peak_bytes: int | None = None
    status: str = "done"
    error: str = ""
    file: str = ""

    def __post_init__(self) -> None:
        """Derive the mode."""
        self.mode = split_task(self.task)[1]


def collect(folder: Path) -> list[Row]:
    """All rows of a sweep's folder.

    Raises:
        ValueError: If the folder holds no sweep.
    """
    store = Store(folder)
    rows = [row for results in store.read(DONE) for row in rows_of(results)]
    done = {(row.model, row.method, row.budget, row.task) for row in rows}
    for failure in store.read(FAILED):
        row = Row(**failure["cell"], seconds=failure["seconds"], status="failed", file=failure["file"])
        row.error = f"{failure['type']}: {failure['error']}"
        if (row.model, row.method, row.budget, row.task) not in done:
            rows.append(row)
    if not rows:
        raise ValueError(f"{folder} holds no results of a sweep; run kvpolicy-eval sweep with --out {folder} first.")
    return rows


def rows_of(results: dict[str, Any]) -> list[Row]:
    """The rows of one cell."""
    record = results["kvpolicy_sweep"]
    cell = record["cell"]
    rows: list[Row] = []
    for task, scores in record["scores"].items():
        cost = _cost(results["config"]["kvpolicy"]["tasks"], task)
        for name, value in results["results"].get(task, {}).items():
            metric, _, filter_name = name.partition(",")
            if not filter_name or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            values = bootstrap.measured(scores.get(name, []), float(value))
            if values and all(value == -1 for value in values):
                continue  # RULER reports -1 for lengths without examples
            row = Row(**cell | {"task": task}, metric=metric, filter=filter_name, value=float(value), **cost)
            row.examples = len(values)
            row.seconds = record["seconds"]
            row.peak_bytes = record["peak_bytes"]
            row.higher_is_better = bool((results.get("higher_is_better", {}).get(task) or {}).get(metric, True))
            row.file = results.get("file", "")
            statistic = bootstrap.statistic_of(values, float(value))
            if statistic:
                row.low, row.high = bootstrap.interval(bootstrap.draws(values, task, statistic))
            rows.append(row)
    return rows


def write_tables(folder: Path, rows: Sequence[Row]) -> None:
    """Write `table.csv` and `table.jsonl`."""
    lines = [asdict(row) for row in rows]
    text = io.StringIO()
    table = csv.DictWriter(text, [one.name for one in fields(Row)], lineterminator="\n")
    table.writeheader()
    table.writerows(lines)
    write(folder / "table.csv", text.getvalue())
    stamped = (line | stamp(FORMAT) for line in lines)
    write(folder / "table.jsonl", "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in stamped))


def _cost(costs: dict[str, dict[str, Any]], task: str) -> dict[str, Any]:
    """Costs of a task; those of several tasks together if they were counted together."""
    names = ("kv_bytes", "full_kv_bytes", "kv_share", "tokens_per_second", "new_tokens_per_second")
    for key, cost in costs.items():
        if task in key.rpartition("/")[0].split("+"):
            return {name: cost[name] for name in names}
    return {}
