"""Figures with points, lines and bars: accuracy against bytes and budgets, differences, and costs."""

from __future__ import annotations

import math
from typing import Any

from kvpolicy.reporting.plots._style import GREY, PALETTE
from kvpolicy.reporting.plots.accuracy import FRONT, STAR, Look, dot, front_line, legend_below, looks, percent_axis
from kvpolicy_eval.report.gather import Findings, Point, Score, amount, front
from kvpolicy_eval.report.parts import Difference
from kvpolicy_eval.report.style import INK, Drawing
from kvpolicy_eval.sweep.modes import split_task


def accuracy_by_bytes(findings: Findings) -> str:
    """Mean accuracy of every point against its share of the full cache's bytes, and the Pareto front.

    There is a panel for each model and, if there are several, for each place of the question.
    """
    panels = [(model, mode) for model in findings.models for mode in findings.facets]
    styles = looks(findings.methods)
    drawing = Drawing("bytes", len(panels), 1, (9.6, 4.6))
    for axes, (model, mode) in zip(drawing.axes, panels, strict=True):
        points = [point for point in findings.points if point.model == model and point.score(mode)]
        for point in points:
            share = point.average("kv_share", mode)
            score = point.score(mode)
            if share is not None and score is not None:
                tip = f"{point.policy}: {score}, {share:.1%} of the bytes"
                _dot(drawing, axes, 100 * share, score, styles.get(point.method), tip)
        best = [(point.average("kv_share", mode), point.score(mode)) for point in front(points, mode)]
        front_line(axes, [100 * (share or 0) for share, _ in best], [score.value for _, score in best if score])
        percent_axis(axes, [100 * (point.average("kv_share", mode) or 1) for point in points])
        title = model if mode is None else f"{model}, question {mode}"
        axes.set(xlabel="bytes held, % of the full cache", ylabel=_mean_of(findings, mode), title=title)
    last = {"full": STAR | {"color": INK}, "Pareto front": FRONT}
    legend_below(drawing.figure, findings.methods, styles, last)
    return drawing.svg("Accuracy against bytes held, with the Pareto front")


def accuracy_by_budget(findings: Findings, model: str) -> str:
    """Score of every task against the budget, with a line per method."""
    styles = looks(findings.methods)
    tasks = findings.tasks
    columns = min(2, len(tasks))
    rows = math.ceil(len(tasks) / columns)
    drawing = Drawing(f"budget-{findings.models.index(model)}", rows, columns, (4.9, 3.1))
    shown: list[str] = []
    for axes, task in zip(drawing.axes, tasks, strict=False):
        points = [point for point in findings.points if point.model == model and task in point.tasks]
        label, places = _x_positions(points, task)
        lines = [method for method in styles if any(point.method == method for _, point in places)]
        for number, method in enumerate(lines):
            offset = 1 + 0.012 * (number - len(lines) / 2)  # so that error bars at equal budgets do not overlap
            of_method = [place for place in places if place[1].method == method]
            _line(drawing, axes, of_method, task, styles[method], offset)
        for point in points:
            if point.method not in styles:
                axes.axhline(point.tasks[task].value, color=INK, linewidth=1, linestyle=":")
        shown += lines
        percent_axis(axes, [x for x, _ in places if "%" in label])
        metric = findings.metrics[task].removesuffix(",none")
        axes.set(title=task, xlabel=label, ylabel=metric)
        if all(0 <= point.tasks[task].value <= 1 for point in points):
            axes.set_ylim(-0.04, 1.05)
    for axes in drawing.axes[len(tasks) :]:
        axes.set_axis_off()
    if not shown:
        return ""
    legend_below(drawing.figure, shown, styles, {"full": {"color": INK, "linestyle": ":"}})
    return drawing.svg("Score against budget, task by task; the dotted line is the full cache")


def differences_plot(differences: list[Difference]) -> str:
    """Effect of each part, with its interval; an interval that contains zero shows no difference."""
    drawing = Drawing("differences", 1, 1, (9.6, 0.6 + 0.27 * len(differences)))
    axes = drawing.axes[0]
    parts = list(dict.fromkeys(one.part for one in differences))
    for place, one in enumerate(reversed(differences)):
        color = PALETTE[parts.index(one.part)]
        look = Look(color, "o", one.verdict not in ("better", "worse"))
        tip = f"{one.policy} minus {one.base}: {one.score}"
        _dot(drawing, axes, one.score.value, Score(place, math.nan, math.nan, 0), look, tip)
        if not math.isnan(one.score.low):
            axes.plot([one.score.low, one.score.high], [place, place], color=color, linewidth=1.6, zorder=2)
    axes.axvline(0, color=INK, linewidth=1)
    axes.set_yticks(range(len(differences)), [one.policy for one in reversed(differences)], fontsize=8)
    axes.set_ylim(-0.7, len(differences) - 0.3)
    axes.set_xlabel("change of mean accuracy; filled markers: shown to be better or worse")
    for part in parts:
        axes.plot([], [], "o-", color=PALETTE[parts.index(part)], label=part)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    return drawing.svg("Effect of one part of a policy")


def costs(findings: Findings, model: str) -> str:
    """Tokens per second and bytes of a sequence, for each method at its smallest budget."""
    points = smallest(findings, model)
    drawing = Drawing(f"costs-{findings.models.index(model)}", 1, 2, (4.9, 0.9 + 0.27 * len(points)))
    styles = looks(findings.methods)
    fields = (
        ("tokens_per_second", 1.0, "tokens per second, prompt and new"),
        ("kv_bytes", 2**20, "KV cache of a sequence, MiB"),
    )
    for axes, (name, unit, label) in zip(drawing.axes, fields, strict=True):
        for place, point in enumerate(reversed(points)):
            value = (point.average(name) or 0) / unit
            look = styles.get(point.method)
            bars = axes.barh(place, value, color=look.color if look else GREY, height=0.7)
            if look and look.dashed:
                bars[0].set(facecolor="none", edgecolor=look.color, linestyle="--", linewidth=1.4)
            drawing.tip(bars[0], f"{point.policy}: {value:,.2f} {label}")
            number = f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
            axes.annotate(number, (value, place), (3, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set_ylim(-0.7, len(points) - 0.3)
        axes.margins(x=0.15)
        axes.set_xlabel(label)
        axes.grid(visible=False, axis="y")
    drawing.axes[0].set_yticks(range(len(points)), [point.policy for point in reversed(points)], fontsize=8)
    drawing.axes[1].set_yticks([])
    return drawing.svg("Speed and memory of each method")


def smallest(findings: Findings, model: str) -> list[Point]:
    """The point of each method with the smallest share of bytes: budgets of different kinds cannot be compared."""
    result: dict[str, Point] = {}
    for point in findings.points:
        if point.model == model and point.costs:
            result[point.method] = min(point, result.get(point.method, point), key=_byte_share)
    return list(result.values())


def _dot(drawing: Drawing, axes: Any, x: float, score: Score, look: Look | None, tip: str) -> None:
    drawing.tip(dot(axes, x, score.value, score.low, score.high, look, INK), tip)


def _byte_share(point: Point) -> float:
    share = point.average("kv_share")
    return math.inf if share is None else share


def _line(drawing: Drawing, axes: Any, places: list[tuple[float, Point]], task: str, look: Look, offset: float) -> None:
    xs = [x * offset for x, _ in places]
    axes.plot(xs, [p.tasks[task].value for _, p in places], **look.drawn | {"marker": ""}, linewidth=1.4)
    for x, (_, point) in zip(xs, places, strict=True):
        _dot(drawing, axes, x, point.tasks[task], look, f"{point.policy}, {task}: {point.tasks[task]}")


def _mean_of(findings: Findings, mode: str | None) -> str:
    tasks = [task for task in findings.averaged if mode in (None, split_task(task)[1])]
    count = len(tasks)
    first = findings.metrics[tasks[0]].removesuffix(",none")
    return first if count == 1 else f"mean accuracy over {count} tasks"


def _x_positions(points: list[Point], task: str) -> tuple[str, list[tuple[float, Point]]]:
    """Label of a panel's x axis, and the x value of each point with a budget, in descending order.

    Budgets of different kinds have no common unit: if they are mixed, the axis shows the bytes held.
    """
    points = [point for point in points if point.budget]
    kinds = {amount(point.budget)[0] for point in points}
    if len(kinds) > 1:
        shares = [(point.costs[task].kv_share, point) for point in points]
        held = [(100 * share, point) for share, point in shares if share is not None]
        return "bytes held, % of the full cache", sorted(held, key=lambda place: -place[0])
    kind = min(kinds, default=0)
    names = ("budget, % of the prompt's tokens", "budget, tokens per layer", "budget, bytes")
    return names[kind], [((100, 1, 1)[kind] * amount(point.budget)[1], point) for point in points]
