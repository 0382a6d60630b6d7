"""Reads a sweep's folder: every policy at every budget, with scores, intervals, costs and probes."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvpolicy.reporting.plots.accuracy import pareto
from kvpolicy_eval.sweep import bootstrap
from kvpolicy_eval.sweep.cells import DONE, NOTES, Store, load_json
from kvpolicy_eval.sweep.modes import MODES, split_task
from kvpolicy_eval.sweep.tidy import Row, collect

NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Score:
    """A number and its interval.

    Attributes:
        value: The number.
        low: Lower end, NaN if the metric cannot be resampled.
        high: Upper end.
        examples: Number of examples.
    """

    value: float
    low: float
    high: float
    examples: int

    def __str__(self) -> str:
        """Such as `0.53 [0.41, 0.66]`."""
        interval = "" if np.isnan(self.low) else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.value:.2f}{interval}"


@dataclass(slots=True)
class Point:
    """One policy at one budget on one model.

    Attributes:
        model: Name of the model.
        method: Spec of the policy without a budget.
        budget: The budget, or empty.
        tasks: Score of each task.
        draws: Resamples of each task's score, if it can be resampled.
        costs: Row of the tidy table for each task.
        probes: Probes of each task.
        mean: Score of the mean over all tasks whose metric is better when higher; None if a score is missing or NaN.
        by_mode: The same over the tasks of one place of the question.
    """

    model: str
    method: str
    budget: str
    tasks: dict[str, Score] = field(default_factory=dict[str, Score])
    draws: dict[str, Any] = field(default_factory=dict[str, Any])
    costs: dict[str, Row] = field(default_factory=dict[str, Row])
    probes: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    mean: Score | None = None
    by_mode: dict[str, Score | None] = field(default_factory=dict[str, "Score | None"])

    @property
    def policy(self) -> str:
        """Spec of the policy."""
        return f"{self.method}@{self.budget}" if self.budget else self.method

    def score(self, mode: str | None = None) -> Score | None:
        """The mean over all tasks, or over those of one place of the question."""
        return self.mean if mode is None else self.by_mode.get(mode)

    def average(self, name: str, mode: str | None = None) -> float | None:
        """Mean of a cost over the tasks.

        Args:
            name: Field of the tidy table.
            mode: Place of the question of the tasks; None for all.
        """
        rows = [row for row in self.costs.values() if mode in (None, row.mode)]
        known = [float(value) for row in rows if (value := getattr(row, name)) is not None]
        return sum(known) / len(known) if known else None


@dataclass(slots=True)
class Findings:
    """The content of a report.

    Attributes:
        name: Name of the sweep.
        about: Its description.
        points: Every policy at every budget.
        metrics: The metric that is shown of each task.
        averaged: Tasks that means are over: their metric is better when higher.
        excluded: Tasks like these whose scores do not all lie between 0 and 1, so that no mean includes them.
        failed: Rows of failed cells.
        commands: Commands that ran the cells.
        versions: The different sets of versions.
        settings: Settings of the sweep.
    """

    name: str
    about: str
    points: list[Point]
    metrics: dict[str, str]
    averaged: list[str]
    excluded: list[str]
    failed: list[Row]
    commands: list[str]
    versions: list[dict[str, str]]
    settings: dict[str, Any]

    @property
    def models(self) -> list[str]:
        """Names of the models."""
        return list(dict.fromkeys(point.model for point in self.points))

    @property
    def methods(self) -> list[str]:
        """Specs of the policies without budgets."""
        return list(dict.fromkeys(point.method for point in self.points))

    @property
    def budgets(self) -> list[str]:
        """Budgets in descending order; shares before numbers of tokens before bytes."""
        budgets = {point.budget for point in self.points if point.budget}
        return sorted(budgets, key=lambda budget: (amount(budget)[0], -amount(budget)[1]))

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks."""
        return list(self.metrics)

    @property
    def modes(self) -> list[str]:
        """Places of the question of the tasks that means are over."""
        found = {split_task(task)[1] for task in self.averaged}
        return [mode for mode in MODES if mode in found]

    @property
    def facets(self) -> list[str | None]:
        """Groups that are shown apart: the places of the question, if there are several; else None, for all tasks."""
        return [*self.modes] if len(self.modes) > 1 else [None]

    @property
    def probed(self) -> list[str]:
        """Names of cells with probes: tasks, then groups of tasks."""
        probed = list(dict.fromkeys(task for point in self.points for task, probe in point.probes.items() if probe))
        return [task for task in self.tasks if task in probed] + [task for task in probed if task not in self.tasks]


def amount(budget: str) -> tuple[int, float]:
    """Kind of a budget, 0 for shares, 1 for tokens, 2 for bytes, and its size, of a share without its least tokens."""
    from kvpolicy.text.budget import Share, bytes_of, parse_budget

    value = parse_budget(budget)
    value = value.fraction if isinstance(value, Share) else value
    return (2, float(bytes_of(value))) if isinstance(value, str) else (int(isinstance(value, int)), float(value))


def gather(folder: Path) -> Findings:
    """Read a folder.

    Raises:
        ValueError: If it holds no finished cell of a sweep.
    """
    rows = collect(folder)
    notes = load_json(folder / NOTES) if (folder / NOTES).is_file() else {}
    config = notes.get("config", {})
    metrics, higher_is_better = _choose_metrics(rows, config.get("tasks", []))
    points: dict[tuple[str, str, str], Point] = {}
    versions: list[dict[str, str]] = []
    scores: dict[str, dict[str, Any]] = {}
    for results in Store(folder).read(DONE):
        record = results["kvpolicy_sweep"]
        scores[results["file"]] = record["scores"]
        point = _point(points, record["cell"])
        point.probes[record["cell"]["task"]] = record["probe"]
        if record["versions"] not in versions:
            versions.append(record["versions"])
    shown = [row for row in rows if row.status == "done" and _metric(row) == metrics.get(row.task)]
    for row in shown:
        _add(_point(points, dataclasses.asdict(row)), row, scores[row.file])
    if not points:
        raise ValueError(f"{folder} holds no finished cell: every cell of the sweep failed, see its table.csv.")
    ordered = _ordered(points.values(), config.get("policies", []))
    averaged = _averaged(higher_is_better, shown, scores)
    for point in ordered:
        point.mean = _mean(point, averaged)
        for mode in MODES:
            point.by_mode[mode] = _mean(point, [task for task in averaged if split_task(task)[1] == mode])
    return Findings(
        name=config.get("name", folder.name),
        about=config.get("about", ""),
        points=ordered,
        metrics=metrics,
        averaged=averaged,
        excluded=[task for task in higher_is_better if task not in averaged],
        failed=[row for row in rows if row.status == "failed"],
        commands=notes.get("commands", []),
        versions=versions,
        settings=notes.get("settings", {}),
    )


def front(points: Iterable[Point], mode: str | None = None) -> list[Point]:
    """The Pareto front of bytes and accuracy, in ascending order of bytes.

    Args:
        points: Policies at budgets.
        mode: Place of the question; None for the means over all tasks.
    """
    known = [point for point in points if point.score(mode) and point.average("kv_share", mode) is not None]

    def value(point: Point) -> float:
        score = point.score(mode)
        return score.value if score else float("-inf")

    return pareto(known, lambda point: point.average("kv_share", mode) or 0, value)


def _point(points: dict[tuple[str, str, str], Point], cell: dict[str, Any]) -> Point:
    key = (cell["model"], cell["method"], cell["budget"])
    return points.setdefault(key, Point(*key))


def _add(point: Point, row: Row, scores: dict[str, Any]) -> None:
    """Add one task's score to a point."""
    low, high = (NAN if end is None else end for end in (row.low, row.high))
    value = NAN if row.value is None else row.value
    point.tasks[row.task] = Score(value, low, high, row.examples)
    point.costs[row.task] = row
    values = bootstrap.measured(scores[row.task].get(_metric(row), []), value)
    statistic = bootstrap.statistic_of(values, value)
    if statistic:
        point.draws[row.task] = bootstrap.draws(values, row.task, statistic)


def _metric(row: Row) -> str:
    return f"{row.metric},{row.filter}"


def _choose_metrics(rows: Iterable[Row], order: list[str]) -> tuple[dict[str, str], list[str]]:
    """One metric of each task: the first that is better when higher and can be resampled, else the first.

    Returns:
        Metric of each task, and the tasks whose metric is better when higher.
    """
    metrics: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.status == "done" and row.value != -1:  # RULER reports -1 for lengths without examples
            metrics[row.task].append(row)
    chosen = {
        task: max(of_task, key=lambda row: (row.higher_is_better, row.low is not None))
        for task, of_task in metrics.items()
    }
    names = sorted(chosen, key=lambda task: (order.index(task) if task in order else len(order), task))
    higher_is_better = [task for task in names if chosen[task].higher_is_better]
    return {task: _metric(chosen[task]) for task in names}, higher_is_better


def _averaged(tasks: list[str], shown: list[Row], scores: dict[str, dict[str, Any]]) -> list[str]:
    """Tasks that a mean may include: those whose scores all lie between 0 and 1, or a single task of any scale."""
    if len(tasks) == 1:
        return tasks
    outside: set[str] = set()
    for row in shown:
        value = NAN if row.value is None else row.value
        values = bootstrap.measured(scores[row.file][row.task].get(_metric(row), []), value)
        if not all(isinstance(one, (int, float)) and not (one < 0 or one > 1) for one in values or [value]):
            outside.add(row.task)
    return [task for task in tasks if task not in outside]


def _ordered(points: Iterable[Point], policies: list[str]) -> list[Point]:
    """Points in the order of the config, budgets in descending order."""
    methods = list(dict.fromkeys(spec.partition("@")[0] for spec in policies))

    def key(point: Point) -> tuple[Any, ...]:
        place = methods.index(point.method) if point.method in methods else len(methods)
        kind, size = amount(point.budget) if point.budget else (-1, 0.0)
        return point.model, place, point.method, kind, -size

    return sorted(points, key=key)


def _mean(point: Point, averaged: list[str]) -> Score | None:
    if not averaged or any(task not in point.tasks or np.isnan(point.tasks[task].value) for task in averaged):
        return None
    value = sum(point.tasks[task].value for task in averaged) / len(averaged)
    resampled = mean_draws(point, averaged)
    low, high = (NAN, NAN) if resampled is None else bootstrap.interval(resampled)
    return Score(value, low, high, sum(point.tasks[task].examples for task in averaged))


def mean_draws(point: Point, averaged: list[str]) -> Any:
    """Resamples of the mean over tasks; None if a task cannot be resampled."""
    if not averaged or any(task not in point.draws for task in averaged):
        return None
    return sum(point.draws[task] for task in averaged) / len(averaged)
