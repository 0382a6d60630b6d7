"""How each allocator divides one budget among the layers."""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.figure import Figure

from kvpolicy.allocators.kmeans import top_group
from kvpolicy_eval.pictures import common
from kvpolicy_eval.pictures.common import BLUE, GREY, ORANGE, Draw
from kvpolicy_eval.pictures.scene import BUDGET, cosines, kept, scene

SELECTOR = "snapkv"
"""Who chooses the tokens; the division does not depend on it."""


def uniform() -> Figure:
    """Tokens of each layer, all alike."""
    drawn = common.blank(2.4)
    bars(drawn.subplots(), "uniform")
    return drawn


def pyramid() -> Figure:
    """Tokens of each layer at two slopes, beside each other."""
    drawn = common.blank(2.4)
    left, right = drawn.subplots(1, 2, sharey=True)
    bars(right, "pyramid:beta=2", told=False)
    bars(left, "pyramid")  # the steeper one last: the axis is its
    return drawn


def squeeze() -> Figure:
    """Cosine of each layer, and the tokens that it gets for that."""
    drawn = common.blank(4.4)
    above, below = drawn.subplots(2, 1, sharex=True)
    found = cosines()
    idle = top_group(torch.tensor(found), 3).tolist()
    colors = [ORANGE if gives else BLUE for gives in idle]
    above.vlines(range(len(found)), 0, found, colors=colors, linewidth=1.2)
    above.scatter(range(len(found)), found, c=colors, s=28)
    for layer, cosine in enumerate(found):
        above.annotate(f"{cosine:.2f}", (layer, cosine), (0, 5), textcoords="offset points", ha="center", fontsize=8)
    low = min(found)
    above.set(ylabel="cosine of before\nand after attention", ylim=(low - 0.12, 1.08))
    above.set_title("attention changes the input little where the cosine is high")
    bars(below, "squeeze", colors)
    names = [("the highest group: gives budget away", ORANGE), ("the other groups: share it evenly", BLUE)]
    for label, color in names:
        above.scatter([], [], c=color, s=28, label=label)
    above.legend(loc="center right", handletextpad=0.2, frameon=True, facecolor="white", edgecolor="none", framealpha=1)
    return drawn


def bars(axes: Any, allocator: str, colors: list[str] | None = None, *, told: bool = True) -> None:
    """Tokens per layer, the even share as a line."""
    found = kept(f"{allocator}+{SELECTOR}@{BUDGET}").budgets
    axes.bar(range(len(found)), found, color=colors or BLUE, width=0.7)
    for layer, tokens in enumerate(found):
        axes.annotate(str(tokens), (layer, tokens), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    axes.axhline(sum(found) / len(found), color=GREY, linestyle="--", linewidth=1)
    axes.set(xlabel="layer", xticks=range(len(found)), ylim=(0, max(found) * 1.2))
    axes.set_title(f"{allocator}: {sum(found)} tokens; dashed: even share")
    if told:
        axes.set_ylabel(f"tokens, of {scene().length}")


PICTURES: dict[str, Draw] = {"uniform": uniform, "pyramid": pyramid, "squeeze": squeeze}
"""By the allocator's name."""
