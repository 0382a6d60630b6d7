"""Points that stand for policies: one colour for a method, and the front of the best."""

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
"""Of the full cache, in the colour of text."""
FRONT: dict[str, Any] = {"color": GREY, "linewidth": 5, "alpha": 0.3}
"""Of the line through the points that no other beats."""


@dataclass(frozen=True, slots=True)
class Look:
    """Of a method's points and line.

    Attributes:
        color: The same for a selector with and without layer budgets.
        marker: Changes where colours come round again.
        dashed: Whether layers differ in budget: a dashed line and a hollow marker.
    """

    color: str
    marker: str
    dashed: bool

    @property
    def drawn(self) -> dict[str, Any]:
        """Words for matplotlib."""
        fill = "none" if self.dashed else self.color
        style = "--" if self.dashed else "-"
        return {"color": self.color, "marker": self.marker, "markerfacecolor": fill, "linestyle": style}


def looks(methods: Iterable[str]) -> dict[str, Look]:
    """A look for each method; `full` has none.

    Args:
        methods: Words of policies without budgets; a name that is no policy counts as a method of its own.

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
        number = families.setdefault(family, len(families))
        at = number % len(PALETTE)
        found[method] = Look(PALETTE[at], MARKERS[(at + number // len(PALETTE)) % len(MARKERS)], layered)
    return found


def _family(method: str) -> tuple[str, bool]:
    """Selector and codec of a method, nothing for `full`, and whether it has layer budgets."""
    from kvpolicy.allocators.uniform import Uniform
    from kvpolicy.policy import Policy

    try:
        policy = Policy.parse(method)
    except ValueError:
        return method, False
    if policy == Policy():
        return "", False
    family = "+".join(part for part in (str(policy.selector), str(policy.codec)) if part)
    return family, policy.allocator != Uniform()


def dot(axes: Axes, x: float, y: float, low: float, high: float, look: Look | None, ink: str = INK) -> Any:
    """Draw a point with its interval, which is NaN where there is none.

    Args:
        axes: To draw into.
        x: Where.
        y: Where.
        low: Lower end of the interval.
        high: Upper end.
        look: Of its method, None for the full cache.
        ink: The colour of text.

    Returns:
        The marker.
    """
    words: Any = look.drawn if look else STAR | {"color": ink}
    if not math.isnan(low):
        axes.plot([x, x], [low, high], color=words["color"], linewidth=1, alpha=0.45, zorder=2)
    (mark,) = axes.plot([x], [y], **words | {"linestyle": "none"}, zorder=3)
    return mark


def front_line(axes: Axes, xs: Sequence[float], ys: Sequence[float]) -> None:
    """Draw the front through points that go from few bytes to many."""
    if len(xs) > 1:
        axes.step(xs, ys, where="post", **FRONT, zorder=1)


def percent_axis(axes: Axes, values: Sequence[float]) -> None:
    """Make the axis logarithmic, with plain numbers, where the percentages on it are far apart."""
    if values and max(values) > 3 * min(values) > 0:
        axes.set_xscale("log")
        ticks = [tick for tick in (0.5, 1, 2, 5, 10, 20, 40, 60, 100) if min(values) / 1.6 <= tick <= max(values) * 1.2]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()


def legend_below(figure: Figure, names: Iterable[str], styles: dict[str, Look], last: dict[str, Any]) -> None:
    """Write names below a figure, in as many columns as they are short, and make it so much higher.

    Args:
        figure: With a constrained layout.
        names: Of methods; one comes once, and one without a look not at all.
        styles: Their looks.
        last: Words for matplotlib of what else is named.
    """
    from matplotlib.lines import Line2D

    shown = list(dict.fromkeys(name for name in names if name in styles))
    handles = [Line2D([], [], **styles[name].drawn) for name in shown]
    handles += [Line2D([], [], **words) for words in last.values()]
    shown += last
    columns = max(1, min(4, 190 // (7 + max(map(len, shown)))))
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.17 * math.ceil(len(shown) / columns))
    figure.legend(handles, shown, loc="outside lower center", ncols=columns, fontsize=8)
