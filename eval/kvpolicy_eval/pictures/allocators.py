"""Pictures of allocators: how each divides the same budget among the layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure

from kvpolicy import registry
from kvpolicy.allocators.squeeze import top_group
from kvpolicy_eval.pictures.scene import BUDGET, cosines, kept, scene
from kvpolicy_eval.pictures.style import BLUE, GREY, ORANGE, Draw, blank

SELECTOR = "snapkv"
"""Selector of the tokens, on which the division does not depend."""


def picture(name: str) -> Figure:
    """Tokens that an allocator gives each layer with its defaults."""
    figure = blank(2.4)
    bars(figure.subplots(), name)
    return figure


def pyramid() -> Figure:
    """Tokens of each layer at two slopes."""
    figure = blank(2.4)
    left, right = figure.subplots(1, 2, sharey=True)
    bars(right, "pyramid:beta=2", labeled=False)
    bars(left, "pyramid")  # the steeper one is drawn last, so that the shared axis has its limits
    return figure


def squeeze() -> Figure:
    """Cosine of each layer, and the tokens that the layer gets because of it."""
    figure = blank(4.4)
    above, below = figure.subplots(2, 1, sharex=True)
    by_layer = cosines()
    reduced = top_group(torch.tensor(by_layer), 3).tolist()
    colors = [ORANGE if is_reduced else BLUE for is_reduced in reduced]
    above.vlines(range(len(by_layer)), 0, by_layer, colors=colors, linewidth=1.2)
    above.scatter(range(len(by_layer)), by_layer, c=colors, s=28)
    for layer, cosine in enumerate(by_layer):
        above.annotate(f"{cosine:.2f}", (layer, cosine), (0, 5), textcoords="offset points", ha="center", fontsize=8)
    above.set(ylabel="cosine of before\nand after attention", ylim=(min(by_layer) - 0.12, 1.08))
    above.set_title("attention changes the input little where the cosine is high")
    bars(below, "squeeze", colors)
    labels = [("the highest group: gives budget away", ORANGE), ("the other groups: share it evenly", BLUE)]
    for label, color in labels:
        above.scatter([], [], c=color, s=28, label=label)
    above.legend(loc="center right", handletextpad=0.2, frameon=True, facecolor="white", edgecolor="none", framealpha=1)
    return figure


def bars(axes: Any, allocator: str, colors: list[str] | None = None, *, labeled: bool = True) -> None:
    """Tokens of each layer, and their mean as a line.

    Args:
        axes: Of matplotlib.
        allocator: Spec of the allocator.
        colors: Color of each layer; blue by default.
        labeled: Whether the y axis has a label.
    """
    budgets = kept(f"{allocator}+{SELECTOR}@{BUDGET}").budgets
    axes.bar(range(len(budgets)), budgets, color=colors or BLUE, width=0.7)
    for layer, tokens in enumerate(budgets):
        axes.annotate(str(tokens), (layer, tokens), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    axes.axhline(sum(budgets) / len(budgets), color=GREY, linestyle="--", linewidth=1)
    axes.set(xlabel="layer", xticks=range(len(budgets)), ylim=(0, max(budgets) * 1.2))
    axes.set_title(f"{allocator}: {sum(budgets)} tokens; dashed: even share")
    if labeled:
        axes.set_ylabel(f"tokens, of {scene().length}")


_OWN: dict[str, Draw] = {
    "pyramid": pyramid,
    "squeeze": squeeze,
    "simlayer": partial(picture, "simlayer:recent=16:threshold=0.5"),
}

PICTURES: dict[str, Draw] = {name: _OWN.get(name, partial(picture, name)) for name in registry.ALLOCATORS}
"""Pictures by the name of the allocator."""
