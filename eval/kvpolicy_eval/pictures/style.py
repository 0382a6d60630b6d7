"""Style of the pictures, and how they are written.

A module of pictures has a dictionary `PICTURES: dict[str, Draw]`, which is listed in `kvpolicy_eval.pictures.catalog`.
It maps the name of a picture, which is that of its file (`h2o` is `docs/pictures/h2o.svg`), to a function that draws
it. The function is called under the settings `RC`, creates a figure with `blank`, uses no pyplot state, and saves
nothing. Drawing a picture again must give the same bytes: no time, no unseeded randomness.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from kvpolicy.reporting.plots import _style

BLUE, VERMILION, GREEN, PURPLE, SKY, ORANGE = _style.PALETTE[:6]
"""The palette of Okabe and Ito, which is safe for colour-blind readers."""
INK = _style.INK
"""Text."""
GREY = "#767676"
"""What is less important."""
LIGHT = "#b8b8b8"
"""A mark of a token that is not kept."""
PALE = "#ececec"
"""Background of tokens that are not kept."""
WIDTH = 8.0
"""Width of a picture in inches, about that of a page of the documentation."""

RC: Any = {**_style.RC, "svg.fonttype": "none", "svg.hashsalt": "kvpolicy"}
"""Settings of matplotlib for all pictures."""

Draw = Callable[[], Figure]


def blank(height: float, width: float = WIDTH) -> Figure:
    """An empty figure that is not registered with pyplot; sizes are in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def svg(draw: Draw) -> bytes:
    """A picture as the bytes of its file."""
    out = io.BytesIO()
    with matplotlib.rc_context(RC):
        draw().savefig(out, format="svg", metadata={"Date": None}, pad_inches=0.1)
    lines = out.getvalue().decode().splitlines()
    return ("\n".join(line.rstrip() for line in lines) + "\n").encode()
