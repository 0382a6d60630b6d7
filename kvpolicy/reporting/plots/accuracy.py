"""Accuracy against bytes: what a policy costs in answers, and what it saves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpolicy.reporting.plots._style import INK, canvas, figure_of
from kvpolicy.reporting.plots.points import FRONT, STAR, dot, front_line, legend_below, looks, percent_axis
from kvpolicy.reporting.plots.results import Results, pareto, read_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def accuracy_against_bytes(results: Results, *, model: str | None = None, axes: Axes | None = None) -> Figure:
    """Draw accuracy against the share of the full cache's bytes, with intervals and the Pareto front.

    A point is a policy, its colour the method; one whose layers have budgets of their own is hollow. Over several
    tasks it is their mean, and widths of intervals add as squares, since tasks share no examples. A policy that lacks
    a task of the others is left out. No other policy answers as well as one on the front with fewer
    bytes, or better with as few.

    Args:
        results: Rows with `policy`, `accuracy`, `share` of the full cache's bytes, and if known `low` and `high`, the
            ends of accuracy's interval; or with a sweep's names of columns: `method`, `budget`, `value`, `kv_share`.
            Or a sweep's folder, or a file of such rows in CSV or JSON lines.
        model: Whose rows, where a table has several models.
        axes: To draw into, in place of a new figure; the legend is then the caller's.

    Returns:
        The figure.

    Raises:
        KVPolicyError: Where columns or results are missing, or nobody said which model.

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
