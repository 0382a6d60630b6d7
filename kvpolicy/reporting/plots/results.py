"""A table of results: accuracy and bytes of policies, read from rows or from a sweep's files."""

from __future__ import annotations

import csv
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

from kvpolicy.spec.errors import KVPolicyError

Results = str | os.PathLike[str] | Iterable[Mapping[str, Any]]
"""Rows, or a file that has them."""

T = TypeVar("T")
_Row = Mapping[str, Any]


class Point(NamedTuple):
    """One policy's result.

    Attributes:
        method: Its words without a budget.
        policy: Its words.
        share: Bytes held, as a share of the full cache.
        accuracy: Mean over tasks.
        low: Lower end of its interval, NaN where there is none.
        high: Upper end.
    """

    method: str
    policy: str
    share: float
    accuracy: float
    low: float
    high: float


def pareto(items: Iterable[T], cost: Callable[[T], float], worth: Callable[[T], float]) -> list[T]:
    """Find what nothing else beats in cost and worth both, from the cheapest on; of equals, all.

    Args:
        items: Among which.
        cost: What is better when lower.
        worth: What is better when higher.

    Returns:
        The front.

    Examples:
        >>> pareto([(0.1, 0.5), (0.2, 0.4), (0.4, 0.9)], cost=lambda one: one[0], worth=lambda one: one[1])
        [(0.1, 0.5), (0.4, 0.9)]
    """
    chosen = list[T]()
    for item in sorted(items, key=lambda item: (cost(item), -worth(item))):
        last = chosen[-1] if chosen else item
        if item is last or worth(item) > worth(last) or (cost(item), worth(item)) == (cost(last), worth(last)):
            chosen.append(item)
    return chosen


def read_points(results: Results, model: str | None = None) -> list[Point]:
    """Read each policy's mean accuracy over all tasks, and its share of bytes.

    Args:
        results: See `accuracy_against_bytes`.
        model: Whose rows, where there are several models.

    Returns:
        The policies, in the table's order. One that lacks a task of the others is left out; of several rows of one
        policy and task it is their mean.

    Raises:
        KVPolicyError: Where columns or results are missing, or nobody said which model.
    """
    rows = _read(results)
    if not all(isinstance(row, Mapping) for row in rows):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise KVPolicyError("The results have a row that is no mapping: give rows with policy, accuracy and share.")
    rows = [row for row in rows if row.get("status", "done") == "done"]
    if not rows:
        raise KVPolicyError(
            "The results have no row: give rows with policy, accuracy and share, or a sweep's table.csv."
        )
    found = defaultdict[tuple[str, str], dict[str, list[_Row]]](dict)
    tasks = _by_task(_of_model(rows, model))
    for task, of_task in tasks.items():
        for row in of_task:
            found[_policy(row)].setdefault(task, []).append(row)
    points = [_point(*key, list(of.values())) for key, of in found.items() if len(of) == len(tasks)]
    if not points:
        raise KVPolicyError(
            f"The results have no policy with all of the tasks {', '.join(tasks)}: give rows for each task."
        )
    return points


def _read(results: Results) -> list[_Row]:
    if not isinstance(results, (str, os.PathLike)):
        return list(results)
    path = Path(results)
    path = path / "table.csv" if path.is_dir() else path
    if not path.is_file():
        raise KVPolicyError(f"There is no file {path}: give a table in CSV or JSON lines, such as a sweep's table.csv.")
    try:
        text = path.read_text(encoding="utf-8-sig")  # Excel writes a mark first
        if path.suffix == ".csv":
            return list(csv.DictReader(text.splitlines()))
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise KVPolicyError(f"{path} is no table in CSV (.csv) or JSON lines (any other ending): {error}.") from error


def _of_model(rows: list[_Row], model: str | None) -> list[_Row]:
    models = list(dict.fromkeys(str(row.get("model", "")) for row in rows))
    if model is None and len(models) > 1:
        raise KVPolicyError(f"The results are of several models: say model={models[0]!r}, or another of {models[1:]}.")
    if model is not None and model not in models:
        raise KVPolicyError(f"The results have no model {model!r}: choose from {', '.join(models)}.")
    return [row for row in rows if model is None or str(row.get("model", "")) == model]


def _by_task(rows: list[_Row]) -> dict[str, list[_Row]]:
    """The rows of each task's best metric: better when higher, and if possible with an interval."""
    tasks = defaultdict[str, list[_Row]](list)
    for row in rows:
        tasks[str(row.get("task", ""))].append(row)
    chosen: dict[str, list[_Row]] = {}
    for task, of_task in tasks.items():
        best = max(of_task, key=lambda row: (_higher(row) and _measured(row), not math.isnan(_number(row, "low"))))
        if _higher(best) and _measured(best):
            chosen[task] = [row for row in of_task if _metric(row) == _metric(best)]
    if not chosen:
        raise KVPolicyError("No measured metric of the results is better when higher: there is no accuracy to draw.")
    return chosen


def _higher(row: _Row) -> bool:
    return str(row.get("higher_is_better", True)) == "True"


def _measured(row: _Row) -> bool:
    """Whether a row is none of a length that RULER marks as not measured, with -1."""
    return -1 not in (_number(row, "accuracy"), _number(row, "value"))


def _metric(row: _Row) -> tuple[str, str]:
    return str(row.get("metric", "")), str(row.get("filter", ""))


def _policy(row: _Row) -> tuple[str, str]:
    """The words of a row's policy, without its budget and with it."""
    if "policy" in row:
        return str(row["policy"]).partition("@")[0], str(row["policy"])
    if "method" not in row:
        raise _lacks("policy")
    method, budget = str(row["method"]), str(row.get("budget") or "")
    return method, f"{method}@{budget}" if budget else method


def _point(method: str, policy: str, tasks: list[list[_Row]]) -> Point:
    """The mean of a policy's tasks; their examples are independent, so that widths add as squares.

    Rows of one task may share examples: their widths do not shrink.
    """
    values = [fmean(_needed(row, "accuracy", "value") for row in rows) for rows in tasks]
    share = fmean(fmean(_needed(row, "share", "kv_share") for row in rows) for rows in tasks)
    mean = fmean(values)
    lows, highs = ([fmean(_number(row, end) for row in rows) for rows in tasks] for end in ("low", "high"))
    low, high = (math.dist(values, ends) / len(tasks) for ends in (lows, highs))
    return Point(method, policy, share, mean, mean - low, mean + high)


def _needed(row: _Row, *names: str) -> float:
    value = next((number for name in names if not math.isnan(number := _number(row, name))), None)
    if value is None:
        raise _lacks(" or ".join(names))
    return value


def _number(row: _Row, name: str) -> float:
    """A cell as a number, NaN where it is empty."""
    value = row.get(name)
    try:
        return float("nan") if value is None or value == "" else float(value)
    except ValueError:
        raise KVPolicyError(f"The results have {value!r} under {name}: give a number, or nothing.") from None


def _lacks(name: str) -> KVPolicyError:
    return KVPolicyError(
        f"The results lack {name}: give every row policy, accuracy and share of the full cache's bytes."
    )
