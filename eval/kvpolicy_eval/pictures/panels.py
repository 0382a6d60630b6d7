"""Layout of the pictures of codecs: panels above bars of bits, and heat maps of channels over positions."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from kvpolicy_eval.pictures.stored import bars
from kvpolicy_eval.pictures.style import blank


def canvas(panels: int, codecs: list[str], height: float = 2.5, **layout: Any) -> tuple[Figure, list[Any]]:
    """A figure with a row of panels, and below it a bar for what each codec stores.

    Args:
        panels: Number of panels.
        codecs: Specs of codecs.
        height: Height of the panels in inches.
        **layout: Arguments of `subplots`.
    """
    below = 0.95 + 0.27 * len(codecs)
    figure = blank(height + below)
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.1, h_pad=0.08)
    halves: Any = figure.subfigures(2, 1, height_ratios=[height, below], hspace=0.04)
    top, bottom = halves
    axes: Any = top.subplots(1, panels, squeeze=False, **layout)
    bars(bottom.subplots(), codecs)
    return figure, list(axes.flat)


def heat(axes: Any, x: Tensor, title: str, limit: float, signed: bool = True, bar: str = "") -> None:
    """Draw elements [positions, channels] as colors; NaN is white.

    Args:
        axes: Of matplotlib.
        x: The elements.
        title: Title of the panel.
        limit: Largest absolute element.
        signed: Whether elements may be negative.
        bar: Label of the color bar; there is none without a label.
    """
    image = axes.imshow(
        x.T.numpy(),
        cmap="PuOr" if signed else "viridis",
        vmin=-limit if signed else 0.0,
        vmax=limit,
        aspect="auto",
        interpolation="none",
        origin="lower",
    )
    axes.set_title(title)
    axes.set_xlabel("position (tokens)")
    axes.set_ylabel("channel")
    if bar:
        axes.figure.colorbar(image, ax=axes, label=bar, pad=0.02)
