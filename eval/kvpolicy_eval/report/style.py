"""How the page's figures look: as those of `kvpolicy.plots`, but SVG that takes the page's text colour."""

from __future__ import annotations

import io
import re
from html import escape
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from kvpolicy.reporting.plots._style import GREY

INK = "#010203"
"""Stands for the page's text colour."""

RC: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.parse_math": False,  # a name may have two dollars
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
"""Settings of matplotlib, under which figures are to be drawn."""


class Drawing:
    """A figure, and what is shown where the pointer rests.

    Args:
        name: Of the figure, for its ids.
        rows: Of panels.
        columns: Of panels.
        size: Of one panel, in inches.
    """

    def __init__(self, name: str, rows: int = 1, columns: int = 1, size: tuple[float, float] = (7.0, 4.0)) -> None:
        """Make empty panels."""
        self.name, self.tips = name, dict[str, str]()
        inches = (columns * size[0], rows * size[1])
        self.figure = Figure(figsize=inches, layout="constrained")
        self.axes: list[Any] = list(self.figure.subplots(rows, columns, squeeze=False).flat)

    def tip(self, artist: Any, text: str) -> None:
        """Show `text` where the pointer rests on a line, a marker or a patch."""
        key = f"tip-{self.name}-{len(self.tips)}"
        artist.set_gid(key)
        self.tips[key] = text

    def svg(self, label: str) -> str:
        """The figure as an element of an HTML page, which refers to nothing outside it.

        Args:
            label: What it shows, for those who cannot see it.
        """
        out = io.StringIO()
        with matplotlib.rc_context({"svg.hashsalt": self.name}):
            self.figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        text = out.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text).replace(INK, "currentColor")
        used = set(re.findall(r'#([^"\')]+)', text)) | set(self.tips)  # the other ids come again in the next figure
        text = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", text)
        for key, tip in self.tips.items():
            text = text.replace(f'<g id="{key}">', f'<g id="{key}"><title>{escape(tip)}</title>', 1)
        size = re.search(r'width="([\d.]+)pt"', text)
        most = f"{float(size[1]) * 4 / 3:.0f}px" if size else "100%"
        text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)  # as wide as the page, by the view box
        head = f'<svg role="img" aria-label="{escape(label, quote=True)}" style="max-width:{most}"'
        return text.replace("<svg", head, 1)
