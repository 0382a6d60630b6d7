"""Bytes of a cache by kind, next to the full cache."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvpolicy.reporting.plots._sources import UNMANAGED, Source, by_kind, named
from kvpolicy.reporting.plots._style import GREY, KINDS, canvas, figure_of, legend_above
from kvpolicy.text.tables import byte_unit, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvpolicy.planning.result import CachePlan
    from kvpolicy.reporting.report import Report

FULL = "full cache"


def bytes_by_kind(source: Source | Mapping[str, Source], *, axes: Axes | None = None) -> Figure:
    """Plot the bytes of a cache by kind, next to those of the full cache.

    The kinds are keys and values in full precision (`exact`), the `codes` and `scales` of the codec, and the
    bookkeeping: `positions`, `statistics`, `index` and `counters`. The weights of a plan are not included.

    Args:
        source: A handle, a cache, a report or a plan; or a dictionary of these by name, with a bar for each.
        axes: Axes to draw into, instead of a new figure.

    Returns:
        The figure.

    Raises:
        KVPolicyError: If a cache has seen no prompt yet.

    Examples:
        >>> from kvpolicy import plan
        >>> from kvpolicy.hf.embedded import config_of
        >>> policies, config = ["h2o@0.2", "kivi:bits=4", "h2o+kivi:bits=4@0.2"], config_of("llama-3-70b")
        >>> figure = bytes_by_kind({spec: plan(config, spec, prompt=4096, new=512) for spec in policies})
        >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
        ['full cache', 'h2o@0.2', 'kivi:bits=4', 'h2o+kivi:bits=4@0.2']
        >>> figure.axes[0].get_xlabel()
        'bytes, GiB'
    """
    bars = _bars(named(source))
    most = max(sum(kinds.values()) for _, kinds in bars)
    size, unit = byte_unit(most)
    with canvas(axes, (8.0, 1.1 + 0.32 * len(bars))) as own:
        _draw(own, [kinds for _, kinds in bars], size)
        for place, (_, kinds) in enumerate(bars):
            total = sum(kinds.values())
            own.annotate(
                format_bytes(total), (total / size, place), (3, 0), textcoords="offset points", va="center", size=8
            )
        own.set(xlabel=f"bytes, {unit}", xlim=(0, (most or 1) / size * 1.14), ylim=(len(bars) - 0.4, -0.6))
        own.set_yticks(range(len(bars)), [_fold(name) for name, _ in bars])
        legend_above(own, axes is None, 9)
    return figure_of(own)


def _bars(found: dict[str, Report | CachePlan]) -> list[tuple[str, dict[str, int]]]:
    """Name and bytes by kind of each bar; a full cache that is the same for all comes first, once."""
    fulls = {one.full_nbytes for one in found.values()}
    bars = [(FULL, {FULL: size}) for size in fulls if len(fulls) == 1]
    for name, one in found.items():
        if len(fulls) > 1:
            bars.append((f"{name}, {FULL}", {FULL: one.full_nbytes}))
        bars.append((name, by_kind(one)))
    return bars


def _draw(axes: Axes, bars: list[dict[str, int]], size: int) -> None:
    left = [0.0] * len(bars)
    present = {kind for kinds in bars for kind in kinds}
    for kind in [*KINDS, *sorted(present - KINDS.keys())]:
        if kind not in present:
            continue
        widths = [kinds.get(kind, 0) / size for kinds in bars]
        look: Any = {"color": KINDS.get(kind, GREY), "edgecolor": GREY, "linewidth": 0}
        axes.barh(range(len(bars)), widths, 0.7, left, label=kind, hatch="//" if kind == UNMANAGED else None, **look)
        left = [start + width for start, width in zip(left, widths, strict=True)]


def _fold(name: str, width: int = 32) -> str:
    """A long spec on several lines, broken before a part or a parameter."""
    lines = [""]
    for piece in re.split(r"(?=[+/:@,])", name):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)
