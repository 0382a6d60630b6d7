"""Accuracy against bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpolicy.reporting.plots._style import INK, canvas, figure_of
from kvpolicy.reporting.plots.points import FRONT, STAR, dot, front_line, legend_below, looks, percent_axis
from kvpolicy.reporting.plots.results import Results, pareto, read_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
