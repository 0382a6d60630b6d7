"""Read a sweep's folder: every policy at every budget, its scores with intervals, its costs and what was probed."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvpolicy.reporting.plots.results import pareto
from kvpolicy_eval.sweep import bootstrap
from kvpolicy_eval.sweep.cells import DONE, Store, load_json
from kvpolicy_eval.sweep.command import NOTES
from kvpolicy_eval.sweep.tidy import Row, collect


@dataclass(frozen=True, slots=True)
class Score:
    """A number and its interval.

    Attributes:
        value: The number.
        low: Lower end, NaN where the metric cannot be resampled.
        high: Upper end.
        examples: How many stand behind it.
    """

    value: float
    low: float
    high: float
    examples: int

    def __str__(self) -> str:
        """Such as `0.53 [0.41, 0.66]`."""
        ends = "" if np.isnan(self.low) else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.value:.2f}{ends}"


@dataclass(slots=True)
class Point:
    """One policy at one budget on one model.

    Attributes:
        model: Name of the model.
        method: The policy's words without a budget.
        budget: Its words, or nothing.
        tasks: Score of each task.
        draws: Resamples of each task's score, where it has any.
        costs: The tidy table's row of each task.
        probes: What was probed on each task.
        mean: Score of the mean over all tasks where higher is better; None where one is missing or not a number.
    """

    model: str
    method: str
    budget: str
    tasks: dict[str, Score] = field(default_factory=dict[str, Score])
    draws: dict[str, Any] = field(default_factory=dict[str, Any])
    costs: dict[str, Row] = field(default_factory=dict[str, Row])
    probes: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    mean: Score | None = None

    @property
    def policy(self) -> str:
        """The whole policy's words."""
        return f"{self.method}@{self.budget}" if self.budget else self.method

    def average(self, name: str) -> float | None:
        """Mean of a cost over the tasks."""
        known = [float(value) for row in self.costs.values() if (value := getattr(row, name)) is not None]
        return sum(known) / len(known) if known else None


@dataclass(slots=True)
class Findings:
    """All that a report is made of.

    Attributes:
        name: Of the sweep.
        about: Its sentence.
        points: Every policy at every budget.
        metrics: The metric shown of each task.
        averaged: Tasks whose metric is better when higher; means are over these.
        apart: Such tasks too, but in no mean, since not all of their scores lie between 0 and 1.
        failed: Rows of cells that failed.
        commands: With which the cells were run.
        versions: Each set of versions found.
        settings: Of the sweep.
    """

    name: str
    about: str
    points: list[Point]
    metrics: dict[str, str]
    averaged: list[str]
    apart: list[str]
    failed: list[Row]
    commands: list[str]
    versions: list[dict[str, str]]
    settings: dict[str, Any]

    @property
    def models(self) -> list[str]:
        """Names of models."""
        return list(dict.fromkeys(point.model for point in self.points))

    @property
    def methods(self) -> list[str]:
        """Words of policies without budgets."""
        return list(dict.fromkeys(point.method for point in self.points))

    @property
    def budgets(self) -> list[str]:
        """Budgets, the largest first; shares before numbers of tokens before bytes."""
        found = {point.budget for point in self.points if point.budget}
        return sorted(found, key=lambda budget: (amount(budget)[0], -amount(budget)[1]))

    @property
    def tasks(self) -> list[str]:
        """Names of tasks."""
        return list(self.metrics)

    @property
    def probed(self) -> list[str]:
        """What cells were of and was probed: tasks, then groups of tasks."""
        found = list(dict.fromkeys(task for point in self.points for task, probe in point.probes.items() if probe))
        return [task for task in self.tasks if task in found] + [task for task in found if task not in self.tasks]


def amount(budget: str) -> tuple[int, float]:
    """The kind of a budget, 0 for shares, 1 for tokens, 2 for bytes, and its size."""
    from kvpolicy.spec.budget import bytes_of, parse_budget

    value = parse_budget(budget)
    return (2, float(bytes_of(value))) if isinstance(value, str) else (int(isinstance(value, int)), float(value))


def gather(folder: Path) -> Findings:
    """Read a folder.

    Raises:
        ValueError: Where it holds no finished cell of a sweep.
    """
    rows = collect(folder)
    notes = load_json(folder / NOTES) if (folder / NOTES).is_file() else {}
    config = notes.get("config", {})
    metrics, higher = _choose(rows, config.get("tasks", []))
    points: dict[tuple[str, str, str], Point] = {}
    versions: list[dict[str, str]] = []
    scores: dict[str, dict[str, Any]] = {}
    for results in Store(folder).read(DONE):
        own, cell = results["kvpolicy_sweep"], results["kvpolicy_sweep"]["cell"]
        scores[results["file"]] = own["scores"]
        point = _point(points, cell)
        point.probes[cell["task"]] = own["probe"]
        if own["versions"] not in versions:
            versions.append(own["versions"])
    shown = [row for row in rows if row.status == "done" and _name(row) == metrics.get(row.task)]
    for row in shown:
        _add(_point(points, dataclasses.asdict(row)), row, scores[row.file])
    if not points:
        raise ValueError(f"{folder} holds no finished cell: every cell of the sweep failed, see table.csv there.")
    ordered = _ordered(points.values(), config.get("policies", []))
    averaged = _averaged(higher, shown, scores)
    for point in ordered:
        point.mean = _mean(point, averaged)
    return Findings(
        name=config.get("name", folder.name), about=config.get("about", ""), points=ordered, metrics=metrics,
        averaged=averaged, apart=[task for task in higher if task not in averaged], versions=versions,
        failed=[row for row in rows if row.status == "failed"], commands=notes.get("commands", []),
        settings=notes.get("settings", {}),
    )  # fmt: skip


def front(points: Iterable[Point]) -> list[Point]:
    """The points that no other beats in bytes and accuracy both, from few bytes to many."""
    rest = [point for point in points if point.mean is not None and point.average("kv_share") is not None]
    return pareto(rest, lambda point: point.average("kv_share") or 0, _value)


def _value(point: Point) -> float:
    return point.mean.value if point.mean else float("-inf")


def _point(points: dict[tuple[str, str, str], Point], cell: dict[str, Any]) -> Point:
    key = (cell["model"], cell["method"], cell["budget"])
    return points.setdefault(key, Point(*key))


def _add(point: Point, row: Row, scores: dict[str, Any]) -> None:
    """Take over one task's number."""
    nan = float("nan")
    low, high = (nan if end is None else end for end in (row.low, row.high))
    point.tasks[row.task] = Score(row.value if row.value is not None else nan, low, high, row.examples)
    point.costs[row.task] = row
    value = point.tasks[row.task].value
    values = bootstrap.measured(scores[row.task].get(_name(row), []), value)
    statistic = bootstrap.statistic_of(values, value)
    if statistic:
        point.draws[row.task] = bootstrap.draws(values, row.task, statistic)


def _name(row: Row) -> str:
    return f"{row.metric},{row.filter}"


def _choose(rows: Iterable[Row], order: list[str]) -> tuple[dict[str, str], list[str]]:
    """One metric of each task: the first that is better when higher and can be resampled, else the first."""
    metrics: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.status == "done" and row.value != -1:  # RULER's mark of a length that was not measured
            metrics[row.task].append(row)
    chosen = {
        task: max(of_task, key=lambda row: (row.higher_is_better, row.low is not None))
        for task, of_task in metrics.items()
    }
    names = sorted(chosen, key=lambda task: (order.index(task) if task in order else len(order), task))
    higher = [task for task in names if chosen[task].higher_is_better]
    return {task: _name(chosen[task]) for task in names}, higher


def _averaged(higher: list[str], shown: list[Row], scores: dict[str, dict[str, Any]]) -> list[str]:
    """Tasks that a mean may have: those whose scores all lie between 0 and 1, or the only one, whatever its scale."""
    if len(higher) == 1:
        return higher
    outside: set[str] = set()
    for row in shown:
        value = float("nan") if row.value is None else row.value
        values = bootstrap.measured(scores[row.file][row.task].get(_name(row), []), value)
        if not all(isinstance(one, (int, float)) and not (one < 0 or one > 1) for one in values or [value]):
            outside.add(row.task)
    return [task for task in higher if task not in outside]


def _ordered(points: Iterable[Point], policies: list[str]) -> list[Point]:
    """As in the config, the largest budget first."""
    methods = list(dict.fromkeys(words.partition("@")[0] for words in policies))

    def place(point: Point) -> tuple[Any, ...]:
        known = methods.index(point.method) if point.method in methods else len(methods)
        kind, size = amount(point.budget) if point.budget else (-1, 0.0)
        return point.model, known, point.method, kind, -size

    return sorted(points, key=place)


def _mean(point: Point, averaged: list[str]) -> Score | None:
    if not averaged or any(task not in point.tasks or np.isnan(point.tasks[task].value) for task in averaged):
        return None
    value = sum(point.tasks[task].value for task in averaged) / len(averaged)
    resampled = drawn(point, averaged)
    low, high = (float("nan"),) * 2 if resampled is None else bootstrap.interval(resampled)
    return Score(value, low, high, sum(point.tasks[task].examples for task in averaged))


def drawn(point: Point, averaged: list[str]) -> Any:
    """Resamples of the mean over tasks; None where a task has none."""
    if not averaged or any(task not in point.draws for task in averaged):
        return None
    return sum(point.draws[task] for task in averaged) / len(averaged)
