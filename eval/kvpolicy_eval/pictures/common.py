"""What the pictures of the docs share: how they look, and how they are written.

A module of pictures, beside this one and listed in `MODULES`, has one dictionary:

    PICTURES: dict[str, Callable[[], Figure]]

It maps a picture's name, which is its file's (`h2o` is `docs/pictures/h2o.svg`), to a function that draws it. That
function is called under the settings `RC`, makes its own `Figure` (see `blank`), keeps no state of pyplot, and saves
nothing. A picture must be the same to the last byte when drawn again: no time, no unseeded chance.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from kvpolicy.reporting.plots import _style

MODULES = ("allocators", "selectors", "codecs", "plots")
"""Modules of pictures; one that is not there has none."""

BLUE, VERMILION, GREEN, PURPLE, SKY, ORANGE = _style.PALETTE[:6]
"""Okabe and Ito's colours, which the colour-blind can tell apart."""
INK, GREY, LIGHT, PALE = _style.INK, "#767676", "#b8b8b8", "#ececec"
"""Text; what is less important; a mark of what is not kept; its background."""
WIDTH = 8.0
"""Inches; a page of the docs is about as wide."""

RC: Any = {**_style.RC, "svg.fonttype": "none", "svg.hashsalt": "kvpolicy"}
"""Settings of matplotlib under which pictures are drawn."""

Draw = Callable[[], Figure]


def blank(height: float, width: float = WIDTH) -> Figure:
    """An empty figure, in inches, which no pyplot knows of."""
    return Figure(figsize=(width, height), layout="constrained")


def pictures() -> dict[str, Draw]:
    """Every picture by name."""
    found: dict[str, Draw] = {}
    for module in MODULES:
        name = f"kvpolicy_eval.pictures.{module}"
        if importlib.util.find_spec(name):
            found |= importlib.import_module(name).PICTURES
    return found


def svg(draw: Draw) -> bytes:
    """A picture as a file's bytes, the same each time."""
    out = io.BytesIO()
    with matplotlib.rc_context(RC):
        draw().savefig(out, format="svg", metadata={"Date": None}, pad_inches=0.1)
    lines = out.getvalue().decode().splitlines()
    return ("\n".join(line.rstrip() for line in lines) + "\n").encode()
