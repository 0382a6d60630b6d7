"""Pictures of codecs that differ in how each token is stored: plain, staircase, mikv, zipcache."""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from kvpolicy.engine.state import tensors
from kvpolicy_eval.pictures.panels import canvas
from kvpolicy_eval.pictures.style import BLUE, GREY, ORANGE, SKY, VERMILION
from kvpolicy_eval.pictures.tensors import (
    HEAD,
    PROMPT,
    after,
    by_position,
    originals,
    read,
    relative_error_of_each,
    stage_of,
)

PLAIN = "h2o:recent=0.25@96"
PLAIN_STEPS = 40
STAIRCASE = "staircase:tokens_8bit=64:tokens_4bit=128:group_size=16:residual_length=16"
STAIRCASE_STEPS = 64
MIKV = "h2o+mikv:residual_length=8:block_size=8"
ZIPCACHE = "probe+zipcache:recode_every=50"
ZIPCACHE_STEPS = 50
"""Policies, and the decode steps after the prompt."""
WIDTHS = {"exact": "#b0b0b0", "8 bits": BLUE, "4 bits": SKY, "2 bits": ORANGE}
"""Colors by the width of a token."""


def plain_slots() -> tuple[Tensor, Tensor]:
    """Position of the token in each slot, after the prompt and after further steps."""
    before, later = (after(PLAIN, steps, PLAIN_STEPS).tensors.positions[0, HEAD] for steps in (0, PLAIN_STEPS))
    return before, later


def plain() -> Figure:
    """Slots before and after decode steps."""
    figure, (axes,) = canvas(1, ["plain"])
    before, later = plain_slots()
    slots = torch.arange(len(later))
    new = later >= PROMPT
    axes.scatter(slots[: len(before)], before, s=16, facecolors="none", edgecolors=GREY, label="after the prompt")
    axes.scatter(slots[~new], later[~new], s=5, color=BLUE, label=f"still there after {PLAIN_STEPS} more tokens")
    axes.scatter(slots[new], later[new], s=9, color=VERMILION, marker="s", label="new, in a slot that became free")
    axes.axhline(PROMPT - 0.5, color=GREY, linewidth=0.8, linestyle=":")
    axes.set_ylim(-20, 640)
    axes.set_xlabel("slot of the cache (one KV head of one layer)")
    axes.set_ylabel("position of its token")
    axes.set_title(f"{PLAIN}: a new token overwrites the slot of the one that leaves; nothing is moved")
    axes.legend(ncols=3, loc="upper left")
    return figure


def staircase_moments() -> list[tuple[str, Tensor, Tensor]]:
    """Stage of each token and error of its key, after the prompt and after further steps."""
    moments: list[tuple[str, Tensor, Tensor]] = []
    keys = originals().keys[HEAD]
    for steps in (0, STAIRCASE_STEPS):
        layer = after(STAIRCASE, steps, STAIRCASE_STEPS)
        name = f"after {steps} more tokens" if steps else "after the prompt"
        moments.append((name, stage_of(layer), relative_error_of_each(read(layer)[0][:PROMPT], keys)))
    return moments


def staircase() -> Figure:
    """Stages of the tokens, and errors of their keys."""
    figure, (axes,) = canvas(1, ["staircase", "kivi:bits=2", "kivi:bits=4"], 2.9)
    moments = staircase_moments()
    colors = list(WIDTHS.values())
    for (name, stages, error), (marker, size) in zip(moments, ((".", 22), ("x", 14)), strict=True):
        for stage, color in enumerate(colors):
            positions = (stages[:PROMPT] == stage).nonzero().flatten()
            positions = positions[positions % 3 == 0]  # with all of them, markers would overlap
            if stage and len(positions):
                axes.scatter(positions, error[positions], s=size, marker=marker, color=color, linewidths=0.8)
        axes.plot([], [], marker, color=GREY, label=name)
    axes.set_yscale("log")
    axes.set_xlim(-2, PROMPT + STAIRCASE_STEPS)
    axes.set_ylabel("squared error of a key\nover its squared norm")
    axes.set_title("a mark: the key of every third prompt token; the strips: how all tokens are stored")
    lines = axes.get_lines()[: len(moments)]
    axes.legend(handles=[*lines, *_legend()], ncols=3, loc="lower left")
    _strips(axes, [stages for _, stages, _ in moments], ["prompt", f"+{STAIRCASE_STEPS}"])
    return figure


def mikv_scores() -> tuple[Tensor, Tensor]:
    """Attention that h2o has accumulated for each token, and the token's stage."""
    layer = after(MIKV)
    return by_position(layer, next(iter(tensors(layer.tensors.state)))), stage_of(layer)


def mikv() -> Figure:
    """Accumulated attention of tokens, by their width."""
    figure, (axes,) = canvas(1, ["mikv", "mikv:high_bits=8"])
    scores, stages = mikv_scores()
    for stage, (name, color) in enumerate((("exact", BLUE), ("2 bits", ORANGE))):
        positions = (stages == stage).nonzero().flatten()
        axes.scatter(positions, scores[positions], s=10, color=color, label=f"{name}: {len(positions)} tokens")
    axes.set_yscale("log")
    axes.set_xlabel("position (tokens)")
    axes.set_ylabel("attention received,\nsummed over queries")
    axes.set_title(f"{MIKV}: the best and the newest tokens are exact")
    axes.legend(ncols=2, loc="lower left")
    return figure


def zipcache_moments() -> list[tuple[str, Tensor]]:
    """Stage of each token: after the prompt, just before all tokens are encoded again, and after that."""
    last = ZIPCACHE_STEPS - 1
    moments = {0: "prompt", last: f"+{last}", ZIPCACHE_STEPS: f"+{ZIPCACHE_STEPS}"}
    return [(name, stage_of(after(ZIPCACHE, steps, ZIPCACHE_STEPS))) for steps, name in moments.items()]


def zipcache() -> Figure:
    """Stages of the tokens before and after they are encoded again."""
    figure, (axes,) = canvas(1, ["zipcache", "zipcache:high_bits=8"], 2.0)
    moments = zipcache_moments()
    first = moments[0][1]
    last = moments[-1][1][:PROMPT]
    moved = int(((first > 0) & (last > 0) & (first != last)).sum())
    colors = ListedColormap(["white", WIDTHS["exact"], WIDTHS["4 bits"], WIDTHS["2 bits"]])
    grid = torch.full((len(moments), PROMPT + ZIPCACHE_STEPS), -1)
    for row, (_, stages) in enumerate(moments):
        grid[row, : len(stages)] = stages
    axes.imshow(grid.numpy() + 1, cmap=colors, vmin=0, vmax=3, aspect="auto", interpolation="none")
    axes.set_yticks(range(len(moments)), [name for name, _ in moments])
    axes.set_xlabel("position (tokens)")
    axes.set_ylabel("tokens read")
    axes.set_title(f"{ZIPCACHE}: {moved} of {PROMPT} prompt tokens change their width when coded anew")
    handles = [Patch(color=WIDTHS[name], label=name) for name in ("exact", "4 bits", "2 bits")]
    axes.legend(handles=handles, ncols=3, loc="upper left", bbox_to_anchor=(0, -0.22))
    return figure


def _legend() -> list[Patch]:
    return [Patch(color=color, label=name) for name, color in WIDTHS.items()]


def _strips(axes: Any, moments: list[Tensor], names: list[str]) -> None:
    """Draw one strip of colors for each moment below an axis of positions.

    Args:
        axes: Of matplotlib.
        moments: Stages by position.
        names: Labels of the moments.
    """
    colors = ListedColormap(["white", *WIDTHS.values()])
    for row, (stages, name) in enumerate(zip(moments, names, strict=True)):
        strip = axes.inset_axes((0, -0.13 - 0.1 * row, 1, 0.08))
        shown = torch.full((1, PROMPT + STAIRCASE_STEPS), -1)
        shown[0, : len(stages)] = stages
        strip.imshow(shown.numpy() + 1, cmap=colors, aspect="auto", interpolation="none", vmin=0, vmax=len(WIDTHS))
        strip.set_yticks([0], [name])
        strip.tick_params(length=0)
        last = row == len(moments) - 1
        strip.set_xticks(range(0, PROMPT + STAIRCASE_STEPS, 64) if last else [])
        if last:
            strip.set_xlabel("position (tokens)")
    axes.set_xticks([])
