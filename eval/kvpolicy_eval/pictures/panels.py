"""What pictures of codecs share: panels above bars of bits, and heat maps of channels over positions."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from kvpolicy_eval.pictures.common import blank
from kvpolicy_eval.pictures.stored import bars


def canvas(panels: int, codecs: list[str], height: float = 2.5, **layout: Any) -> tuple[Figure, list[Any]]:
    """A figure with `panels` axes in a row, and under them a bar of what each of `codecs` stores."""
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
    """Numbers [positions, channels] as colours, nan left white; with a colour bar where `bar` names them."""
    colors, least = ("PuOr", -limit) if signed else ("viridis", 0.0)
    how: Any = {"aspect": "auto", "interpolation": "none", "origin": "lower"}
    image = axes.imshow(x.T.numpy(), cmap=colors, vmin=least, vmax=limit, **how)
    axes.set_title(title)
    axes.set_xlabel("position (tokens)")
    axes.set_ylabel("channel")
    if bar:
        axes.figure.colorbar(image, ax=axes, label=bar, pad=0.02)
