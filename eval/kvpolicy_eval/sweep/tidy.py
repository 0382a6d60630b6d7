"""The tidy table of a sweep: one line for each cell, task and metric, with its bootstrap interval and its cost."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kvpolicy.spec.formats import stamp
from kvpolicy_eval.sweep import bootstrap
from kvpolicy_eval.sweep.cells import DONE, FAILED, FORMAT, Store, write


@dataclass(kw_only=True, slots=True)
class Row:
    """A line of the table.

    Attributes:
        model: The cell's.
        method: The cell's.
        budget: The cell's.
        task: A task; of a group, one of its tasks.
        metric: Its name.
        filter: What lm-eval did to the answers before.
        value: What lm-eval made of all examples.
        low: Lower end of the bootstrap interval, where the metric is one that can be resampled.
        high: Upper end.
        examples: How many.
        higher_is_better: Of the metric.
        kv_bytes: Bytes held, mean of a sequence.
        full_kv_bytes: Bytes of the stock cache for the same tokens.
        kv_share: The one divided by the other.
        tokens_per_second: Prompt and new tokens.
        new_tokens_per_second: Of generation or scoring.
        seconds: Of the cell.
        peak_bytes: The accelerator's most memory, where there is one.
        status: `done` or `failed`.
        error: Why it failed.
        file: Below the sweep's folder.
    """

    model: str
    method: str
    budget: str
    task: str
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


def collect(folder: Path) -> list[Row]:
    """Every line of a sweep's folder.

    Raises:
        ValueError: Where the folder holds no sweep.
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
        raise ValueError(f"{folder} holds no results of a sweep: run kvpolicy-eval sweep with --out {folder} first.")
    return rows


def rows_of(results: dict[str, Any]) -> list[Row]:
    """The lines of one cell."""
    own, rows = results["kvpolicy_sweep"], list[Row]()
    cell = own["cell"]
    for task, scores in own["scores"].items():
        cost = _cost(results["config"]["kvpolicy"]["tasks"], task)
        for name, value in results["results"].get(task, {}).items():
            metric, _, how = name.partition(",")
            if not how or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            values = bootstrap.measured(scores.get(name, []), float(value))
            if values and all(value == -1 for value in values):
                continue  # RULER's mark: no example is of this length
            row = Row(**cell | {"task": task}, metric=metric, filter=how, value=float(value), **cost)
            row.examples, row.seconds, row.peak_bytes = len(values), own["seconds"], own["peak_bytes"]
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
    table = csv.DictWriter(text, [field.name for field in fields(Row)], lineterminator="\n")
    table.writeheader()
    table.writerows(lines)
    write(folder / "table.csv", text.getvalue())
    stamped = (line | stamp(FORMAT) for line in lines)
    write(folder / "table.jsonl", "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in stamped))


def _cost(costs: dict[str, dict[str, Any]], task: str) -> dict[str, Any]:
    """What a task cost: its own counts, or those of all tasks where processes counted them together."""
    names = ("kv_bytes", "full_kv_bytes", "kv_share", "tokens_per_second", "new_tokens_per_second")
    for name, cost in costs.items():
        if task in name.rpartition("/")[0].split("+"):
            return {name: cost[name] for name in names}
    return {}
