"""Accuracy against bytes: tables of results, their points in one color per method, and the Pareto front."""

from __future__ import annotations

import csv
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kvpolicy.reporting.plots._style import GREY, INK, MARKERS, PALETTE, canvas, figure_of
from kvpolicy.text.errors import KVPolicyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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


STAR: dict[str, Any] = {"marker": "*", "markersize": 11, "linestyle": "none"}
"""The style of the full cache."""
FRONT: dict[str, Any] = {"color": GREY, "linewidth": 5, "alpha": 0.3}
"""The style of the Pareto front."""


@dataclass(frozen=True, slots=True)
class Look:
    """The style of a method's points and line.

    Attributes:
        color: The color, which a selector has with and without layer budgets.
        marker: The marker, which changes when colors repeat.
        dashed: Whether the method has layer budgets: a dashed line and hollow markers.
    """

    color: str
    marker: str
    dashed: bool

    @property
    def drawn(self) -> dict[str, Any]:
        """Keyword arguments of `Axes.plot`."""
        fill = "none" if self.dashed else self.color
        style = "--" if self.dashed else "-"
        return {"color": self.color, "marker": self.marker, "markerfacecolor": fill, "linestyle": style}


def looks(methods: Iterable[str]) -> dict[str, Look]:
    """A style for each method; `full` has none.

    Args:
        methods: Policy specs without budgets; a name that is not a policy counts as a method of its own.

    Examples:
        >>> found = looks(["full", "h2o", "squeeze+h2o", "snapkv"])
        >>> found["h2o"].color == found["squeeze+h2o"].color != found["snapkv"].color
        True
    """
    found: dict[str, Look] = {}
    families: dict[str, int] = {}
    for method in methods:
        family, layered = _family(method)
        if not family:
            continue
        # A family keeps its color; when the colors repeat, the markers shift, so that no style occurs twice.
        number = families.setdefault(family, len(families))
        at = number % len(PALETTE)
        found[method] = Look(PALETTE[at], MARKERS[(at + number // len(PALETTE)) % len(MARKERS)], layered)
    return found


def _family(method: str) -> tuple[str, bool]:
    """Selector and codec of a method, empty for `full`, and whether it has layer budgets."""
    from kvpolicy.allocators.uniform import Uniform
    from kvpolicy.policy import Policy, TunedPolicy

    try:
        policy = Policy.parse(method)
    except ValueError:
        return method, False
    if policy == Policy():
        return "", False
    if isinstance(policy, TunedPolicy):
        return method.partition("@")[0], True
    family = "+".join(part for part in (str(policy.selector), str(policy.codec)) if part)
    return family, policy.allocator != Uniform()


def dot(axes: Axes, x: float, y: float, low: float, high: float, look: Look | None, ink: str = INK) -> Any:
    """Draw a point and its interval.

    Args:
        axes: The axes.
        x: Its horizontal coordinate.
        y: Its vertical coordinate.
        low: Lower end of the interval; NaN if there is none.
        high: Upper end of the interval.
        look: The style of its method; None for the full cache.
        ink: The color of the full cache.

    Returns:
        The marker.
    """
    style: Any = look.drawn if look else STAR | {"color": ink}
    if not math.isnan(low):
        axes.plot([x, x], [low, high], color=style["color"], linewidth=1, alpha=0.45, zorder=2)
    (mark,) = axes.plot([x], [y], **style | {"linestyle": "none"}, zorder=3)
    return mark


def front_line(axes: Axes, xs: Sequence[float], ys: Sequence[float]) -> None:
    """Draw the Pareto front through points in ascending order."""
    if len(xs) > 1:
        axes.step(xs, ys, where="post", **FRONT, zorder=1)


def percent_axis(axes: Axes, values: Sequence[float]) -> None:
    """Make the axis logarithmic, with plain tick labels, if its percentages differ by more than a factor of 3."""
    if values and max(values) > 3 * min(values) > 0:
        axes.set_xscale("log")
        ticks = [tick for tick in (0.5, 1, 2, 5, 10, 20, 40, 60, 100) if min(values) / 1.6 <= tick <= max(values) * 1.2]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()


def legend_below(figure: Figure, names: Iterable[str], styles: dict[str, Look], last: dict[str, Any]) -> None:
    """Add a legend below a figure, and make the figure taller by its height.

    Args:
        figure: A figure with a constrained layout.
        names: Names of methods; duplicates, and those without a style, are omitted.
        styles: The styles of the methods.
        last: Further entries: their names and keyword arguments of `Axes.plot`.
    """
    from matplotlib.lines import Line2D

    shown = list(dict.fromkeys(name for name in names if name in styles))
    handles = [Line2D([], [], **styles[name].drawn) for name in shown]
    handles += [Line2D([], [], **style) for style in last.values()]
    shown += last
    columns = max(1, min(4, 190 // (7 + max(map(len, shown)))))
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.17 * math.ceil(len(shown) / columns))
    figure.legend(handles, shown, loc="outside lower center", ncols=columns, fontsize=8)


def accuracy_against_bytes(results: Results, *, model: str | None = None, axes: Axes | None = None) -> Figure:
    """Plot accuracy against bytes as a fraction of the full cache, with intervals and the Pareto front.

    Each point is a policy, and its color is the method; hollow points have layer budgets. The accuracy over several
    tasks is their mean, and the squares of the intervals' widths are added, since tasks share no examples. A policy
    that lacks a task of the others is omitted. A policy is on the Pareto front if no other one has at least its
    accuracy with fewer bytes, or a higher accuracy with at most its bytes.

    Args:
        results: Rows with `policy`, `accuracy`, `share` (the fraction of the full cache's bytes), and optionally `low`
            and `high`, the ends of the interval of the accuracy. The column names of a sweep work too: `method`,
            `budget`, `value`, `kv_share`. Or a sweep's folder, or a file of such rows in CSV or JSON lines.
        model: The model, if the table has several.
        axes: Axes to draw into, instead of a new figure; they get no legend.

    Returns:
        The figure.

    Raises:
        KVPolicyError: If columns or results are missing, or a table of several models was given without `model`.

    Examples:
        >>> figure = accuracy_against_bytes(
        ...     [
        ...         {"policy": "full", "accuracy": 0.9, "share": 1.0},
        ...         {"policy": "h2o@0.2", "accuracy": 0.6, "share": 0.21, "low": 0.5, "high": 0.7},
        ...     ]
        ... )
        >>> figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()
        ('bytes held, % of the full cache', 'accuracy')
    """
    points = read_points(results, model)
    styles = looks(dict.fromkeys(point.method for point in points))
    best = pareto(points, lambda point: point.share, lambda point: point.accuracy)
    with canvas(axes, (8.0, 4.2)) as own:
        for point in points:
            place = (100 * point.share, point.accuracy, point.low, point.high)
            dot(own, *place, styles.get(point.method)).set_label(point.policy)
        front_line(own, [100 * point.share for point in best], [point.accuracy for point in best])
        percent_axis(own, [100 * point.share for point in points])
        own.set(xlabel="bytes held, % of the full cache", ylabel="accuracy")
        if axes is None:
            full = {"full": STAR | {"color": INK}} if any(point.method not in styles for point in points) else {}
            front = {"Pareto front": FRONT} if len(best) > 1 else {}
            own.grid(alpha=0.25)
            legend_below(figure_of(own), styles, styles, full | front)
    return figure_of(own)
