"""Tables of results: accuracy and bytes of policies, from rows or from the files of a sweep."""

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

from kvpolicy.text.errors import KVPolicyError

Results = str | os.PathLike[str] | Iterable[Mapping[str, Any]]
"""Rows of results, or a file of them."""

T = TypeVar("T")
_Row = Mapping[str, Any]


class Point(NamedTuple):
    """The result of a policy.

    Attributes:
        method: Its spec without the budget.
        policy: Its spec.
        share: Bytes held, as a fraction of the full cache.
        accuracy: Mean over tasks.
        low: Lower end of the interval; NaN if there is none.
        high: Upper end of the interval.
    """

    method: str
    policy: str
    share: float
    accuracy: float
    low: float
    high: float


def pareto(items: Iterable[T], cost: Callable[[T], float], worth: Callable[[T], float]) -> list[T]:
    """The Pareto front, in ascending order of cost; equal items are all included.

    Args:
        items: The items.
        cost: A value of which less is better.
        worth: A value of which more is better.

    Returns:
        The items that no other one dominates.

    Examples:
        >>> pareto([(0.1, 0.5), (0.2, 0.4), (0.4, 0.9)], cost=lambda one: one[0], worth=lambda one: one[1])
        [(0.1, 0.5), (0.4, 0.9)]
    """
    # In this order an item is dominated if and only if the last one on the front has at least its worth.
    chosen = list[T]()
    for item in sorted(items, key=lambda item: (cost(item), -worth(item))):
        last = chosen[-1] if chosen else item
        if item is last or worth(item) > worth(last) or (cost(item), worth(item)) == (cost(last), worth(last)):
            chosen.append(item)
    return chosen


def read_points(results: Results, model: str | None = None) -> list[Point]:
    """Read the mean accuracy of each policy over all tasks, and its fraction of bytes.

    Args:
        results: See `accuracy_against_bytes`.
        model: The model, if the table has several.

    Returns:
        The policies in the order of the table, without those that lack a task of the others. Several rows of the same
        policy and task are averaged.

    Raises:
        KVPolicyError: If columns or results are missing, or a table of several models was given without `model`.
    """
    rows = _read(results)
    if not all(isinstance(row, Mapping) for row in rows):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise KVPolicyError("Every row of the results must be a mapping with policy, accuracy and share.")
    rows = [row for row in rows if row.get("status", "done") == "done"]
    if not rows:
        raise KVPolicyError(
            "The results must have at least one row; give rows with policy, accuracy and share, or a sweep's table.csv."
        )
    found = defaultdict[tuple[str, str], dict[str, list[_Row]]](dict)
    tasks = _by_task(_of_model(rows, model))
    for task, of_task in tasks.items():
        for row in of_task:
            found[_policy(row)].setdefault(task, []).append(row)
    points = [_point(*key, list(of.values())) for key, of in found.items() if len(of) == len(tasks)]
    if not points:
        raise KVPolicyError(f"The results must have a policy with a row for each of the tasks {', '.join(tasks)}.")
    return points


def _read(results: Results) -> list[_Row]:
    if not isinstance(results, (str, os.PathLike)):
        return list(results)
    path = Path(results)
    path = path / "table.csv" if path.is_dir() else path
    if not path.is_file():
        raise KVPolicyError(f"The results must be a CSV or JSON lines file, such as a sweep's table.csv, got {path}.")
    try:
        text = path.read_text(encoding="utf-8-sig")  # Excel writes a byte order mark
        if path.suffix == ".csv":
            return list(csv.DictReader(text.splitlines()))
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise KVPolicyError(
            f"The results must be CSV (.csv) or JSON lines (any other ending), got {path}: {error}."
        ) from error


def _of_model(rows: list[_Row], model: str | None) -> list[_Row]:
    models = list(dict.fromkeys(str(row.get("model", "")) for row in rows))
    if model is None and len(models) > 1:
        raise KVPolicyError(f"model must be given for results of several models; try one of {models}.")
    if model is not None and model not in models:
        raise KVPolicyError(f"model must be one of {', '.join(models)}, got {model!r}.")
    return [row for row in rows if model is None or str(row.get("model", "")) == model]


def _by_task(rows: list[_Row]) -> dict[str, list[_Row]]:
    """The rows of one metric per task: one of which more is better, and with an interval if possible."""
    tasks = defaultdict[str, list[_Row]](list)
    for row in rows:
        tasks[str(row.get("task", ""))].append(row)
    chosen: dict[str, list[_Row]] = {}
    for task, of_task in tasks.items():
        best = max(of_task, key=lambda row: (_higher(row) and _measured(row), not math.isnan(_number(row, "low"))))
        if _higher(best) and _measured(best):
            chosen[task] = [row for row in of_task if _metric(row) == _metric(best)]
    if not chosen:
        raise KVPolicyError("The results must have a measured metric of which more is better.")
    return chosen


def _higher(row: _Row) -> bool:
    return str(row.get("higher_is_better", True)) == "True"


def _measured(row: _Row) -> bool:
    """Whether a row was measured; RULER marks lengths that were not with -1."""
    return -1 not in (_number(row, "accuracy"), _number(row, "value"))


def _metric(row: _Row) -> tuple[str, str]:
    return str(row.get("metric", "")), str(row.get("filter", ""))


def _policy(row: _Row) -> tuple[str, str]:
    """The spec of a row's policy, without and with its budget."""
    if "policy" in row:
        return str(row["policy"]).partition("@")[0], str(row["policy"])
    if "method" not in row:
        raise _lacks("policy")
    method = str(row["method"])
    budget = str(row.get("budget") or "")
    return method, f"{method}@{budget}" if budget else method


def _point(method: str, policy: str, tasks: list[list[_Row]]) -> Point:
    """The mean over the tasks of a policy.

    Tasks have independent examples, so the squares of their intervals' widths are added. The rows of one task may share
    examples, so their intervals are averaged.
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
    """A cell as a number, or NaN if it is empty."""
    value = row.get(name)
    try:
        return float("nan") if value is None or value == "" else float(value)
    except ValueError:
        raise KVPolicyError(f"The results must have numbers under {name}, got {value!r}.") from None


def _lacks(name: str) -> KVPolicyError:
    return KVPolicyError(
        f"The results must have {name} in every row; give policy, accuracy and share of the full cache's bytes."
    )
