"""Points of policies in one color per method, and their Pareto front."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpolicy.reporting.plots._style import GREY, INK, MARKERS, PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
