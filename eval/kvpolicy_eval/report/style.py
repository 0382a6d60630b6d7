"""Style of the page's figures: that of `kvpolicy.plots`, as SVG that inherits the page's text color."""

from __future__ import annotations

import io
import re
from html import escape
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from kvpolicy.reporting.plots._style import GREY

INK = "#010203"
"""Placeholder for the page's text color, replaced by `currentColor` in the SVG."""

RC: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.parse_math": False,  # a name may contain two dollar signs
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "axes.titlecolor": INK,
}
"""Settings of matplotlib for all figures."""


class Drawing:
    """A figure with tooltips.

    Args:
        name: Name of the figure, which makes its ids unique.
        rows: Rows of panels.
        columns: Columns of panels.
        size: Size of one panel, in inches.
    """

    def __init__(self, name: str, rows: int = 1, columns: int = 1, size: tuple[float, float] = (7.0, 4.0)) -> None:
        """Create empty panels."""
        self.name = name
        self.tips: dict[str, str] = {}
        self.figure = Figure(figsize=(columns * size[0], rows * size[1]), layout="constrained")
        self.axes: list[Any] = list(self.figure.subplots(rows, columns, squeeze=False).flat)

    def tip(self, artist: Any, text: str) -> None:
        """Set the tooltip of a line, a marker or a patch."""
        key = f"tip-{self.name}-{len(self.tips)}"
        artist.set_gid(key)
        self.tips[key] = text

    def svg(self, label: str) -> str:
        """The figure as a self-contained element of an HTML page.

        Args:
            label: Description for screen readers.
        """
        out = io.StringIO()
        with matplotlib.rc_context({"svg.hashsalt": self.name}):
            self.figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        text = out.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text).replace(INK, "currentColor")
        # matplotlib repeats ids such as `axes_1` in every figure, so only ids that are referred to are kept.
        used = set(re.findall(r'#([^"\')]+)', text)) | set(self.tips)
        text = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", text)
        for key, tip in self.tips.items():
            text = text.replace(f'<g id="{key}">', f'<g id="{key}"><title>{escape(tip)}</title>', 1)
        # Without width and height the figure scales with the page, by its view box, up to its original width.
        size = re.search(r'width="([\d.]+)pt"', text)
        max_width = f"{float(size[1]) * 4 / 3:.0f}px" if size else "100%"
        text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
        head = f'<svg role="img" aria-label="{escape(label, quote=True)}" style="max-width:{max_width}"'
        return text.replace("<svg", head, 1)
