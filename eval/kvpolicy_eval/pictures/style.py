"""Style of the pictures, and how they are written.

A module of pictures has a dictionary `PICTURES: dict[str, Draw]`, which is listed in `kvpolicy_eval.pictures.catalog`.
It maps the name of a picture, which is that of its file (`h2o` is `docs/pictures/h2o.svg`), to a function that draws
it. The function is called under the settings `RC`, creates a figure with `blank`, uses no pyplot state, and saves
nothing. Drawing a picture again must give the same bytes: no time, no unseeded randomness.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from kvpolicy.reporting.plots import _style
from kvpolicy.text.output import has_marker

BLUE, VERMILION, GREEN, PURPLE, SKY, ORANGE = _style.PALETTE[:6]
"""The palette of Okabe and Ito, which is safe for color-blind readers."""
INK = _style.INK
"""Text."""
GREY = "#767676"
"""Color of less important things."""
LIGHT = "#b8b8b8"
"""A mark of a token that is not kept."""
PALE = "#ececec"
"""Background of tokens that are not kept."""
WIDTH = 8.0
"""Width of a picture in inches, about that of a page of the documentation."""

RC: Any = {**_style.RC, "svg.fonttype": "none", "svg.hashsalt": "kvpolicy"}
"""Settings of matplotlib for all pictures."""

DARK = {
    INK: "#dedede",
    "#ffffff": "#1f2129",  # close to the background of the site's dark pages
    "#000000": "#ffffff",
    GREY: "#a0a0a0",
    LIGHT: "#6d6d6d",
    PALE: "#3a3d45",
    "#b0b0b0": "#7a7a7a",
    "#c4c4c4": "#5c5c5c",
    "#dfebf7": "#17324d",
    "#bcd7ee": "#1f4a73",
    "#8fbde0": "#2b6499",
    BLUE: "#2f9bd8",
}
"""Replacement of each color on a dark page. Other colors, and the pixels of maps, are the same on both."""

Draw = Callable[[], Figure]


def blank(height: float, width: float = WIDTH) -> Figure:
    """An empty figure that is not registered with pyplot; sizes are in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def svg(draw: Draw) -> bytes:
    """A picture as the bytes of its file."""
    out = io.BytesIO()
    with matplotlib.rc_context(RC):
        draw().savefig(out, format="svg", metadata={"Date": None}, pad_inches=0.1)
    lines = out.getvalue().decode().replace("</style>", f"{_dark_rules()}</style>", 1).splitlines()
    return ("\n".join(line.rstrip() for line in lines) + "\n").encode()


def is_own(path: str | Path) -> bool:
    """Whether a file is a picture that `svg` drew, in any version: it has our rules for dark pages."""
    return has_marker(path, 'text[style*="fill: #ffffff"]{fill: #ffffff !important}')


def _dark_rules() -> str:
    """Rules for a reader who prefers dark pages; `!important`, because matplotlib gives each element its own style.

    Inside a page, a picture sees the color scheme of that page, so that the site's switch applies to it.
    """
    rules = [
        f'[style*="{part}: {light.lower()}"]{{{part}: {dark} !important}}'
        for light, dark in DARK.items()
        for part in ("fill", "stroke")
    ]
    white = 'text[style*="fill: #ffffff"]{fill: #ffffff !important}'  # text on a color
    return "\n@media (prefers-color-scheme: dark) {\n" + "\n".join([*rules, white]) + "\n}\n"
