"""Pictures of selectors: the positions that each keeps of a prompt, and the scores that it ranks them by."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from torch import Tensor

from kvpolicy import registry
from kvpolicy_eval.pictures.crush import draw_distances
from kvpolicy_eval.pictures.scene import BUDGET, RETRIEVES, Kept, kept, scene
from kvpolicy_eval.pictures.style import BLUE, GREY, INK, LIGHT, ORANGE, PALE, VERMILION, Draw, blank

DrawScore = Callable[[Any, Kept], None]
"""Draws the ranking of a selector into axes of matplotlib."""
AXIS = "position in the prompt, tokens"
DEPTH = "(the deeper the color, the more of the 4 KV heads hold the token)"


def figure(policy: str, *, score: DrawScore | None = None, sinks: int = 0, window: int = 0) -> Figure:
    """The parts of the prompt, the positions that each layer keeps, and the ranking of the selector.

    Args:
        policy: Spec of the policy.
        score: Draws the ranking; without it there is no panel for it.
        sinks: First tokens that are always kept.
        window: Newest tokens that are always kept.
    """
    result = kept(policy)
    drawing = blank(3.9 if score else 2.4)
    ratios = [0.55, 1.9, 1.5] if score else [0.55, 1.9]
    axes: list[Any] = list(drawing.subplots(len(ratios), 1, sharex=True, gridspec_kw={"height_ratios": ratios}))
    parts(axes[0], sinks, window)
    axes[0].set_title(headline(policy, result), pad=8)
    layers(axes[1], result)
    if score:
        score(axes[2], result)
    axes[-1].set_xlabel(f"{AXIS}   {DEPTH}" if score else AXIS)
    for each in axes[1:]:
        for edge in (scene().fact[0] - 0.5, scene().fact[1] + 0.5):
            each.axvline(edge, color=VERMILION, linewidth=0.8)
    return drawing


def headline(policy: str, result: Kept) -> str:
    """The policy, how many tokens it keeps, and the answer of the model."""
    right = scene().answer
    verdict = "right" if result.answer == right else f"wrong (it is {right})"
    tokens = f"{result.budgets[RETRIEVES]} of {scene().length} tokens per layer and KV head"
    return f"{policy}:  {tokens}; the model then answers {result.answer}, {verdict}"


def parts(axes: Any, sinks: int, window: int) -> None:
    """Draw a strip that names the parts of the prompt."""
    prompt = scene()
    first, last = prompt.fact
    dark = "#a04f7c"
    strips = [(0, prompt.question, PALE), (first, last + 1, VERMILION), (prompt.question, prompt.length, dark)]
    labels: list[tuple[float, str, str, str]] = [
        (prompt.question * 0.3, "records, key=value", GREY, "center"),
        ((first + last) / 2, "the record asked for", VERMILION, "center"),
        (prompt.length, "question", dark, "right"),
    ]
    if sinks:
        strips.append((0, sinks, BLUE))
        labels.append((0, f"{sinks} sinks", BLUE, "left"))
    if window:
        axes.plot([prompt.length - window - 0.5, prompt.length - 0.5], [0.5, 0.5], color=BLUE, linewidth=2)
        labels.append((prompt.length - window, f"newest {window}", BLUE, "right"))
    for start, stop, color in strips:
        axes.axvspan(start - 0.5, stop - 0.5, 0, 0.4, color=color, linewidth=0)
    for x, text, color, side in labels:
        axes.text(x, 0.6, text, color=color, ha=side, va="bottom", fontsize=8)
    axes.set(ylim=(0, 1), yticks=[], xlim=(-0.5, prompt.length - 0.5))
    axes.spines[:].set_visible(False)
    axes.tick_params(bottom=False, labelbottom=False)


def layers(axes: Any, result: Kept) -> None:
    """Draw layers by positions; the deeper the color, the more KV heads keep the token."""
    count, length = result.share.shape
    axes.imshow(image(result), aspect="auto", interpolation="none", extent=(-0.5, length - 0.5, count - 0.5, -0.5))
    axes.set(ylabel="layer", yticks=range(count))
    axes.tick_params(axis="y", labelsize=7)
    axes.spines[:].set_visible(False)


def image(result: Kept) -> Any:
    """Colors [L, P, 3]: blue by the share of heads that keep a token, orange if it is a representative."""
    return (_mix(result.share, result.mark) * 255).round().astype(np.uint8)


def draw_scores(axes: Any, result: Kept, *, selector: str, label: str) -> None:
    """Draw the score of every position in the retrieval layer, in the colors of the map.

    Args:
        axes: Of matplotlib.
        result: Positions kept at the budget of the picture.
        selector: Spec of the selector, which is run at the full budget to score all positions.
        label: Label of the axis.
    """
    score = kept(f"{selector}@1.0").score[RETRIEVES].numpy()
    colors = _mix(result.share[RETRIEVES], result.mark[RETRIEVES], empty=LIGHT)
    axes.vlines(np.arange(len(score)), 1e-6, score, color=colors, linewidth=1.6)
    axes.set(yscale="log", ylabel=label, ylim=(_lower_limit(score), score.max() * 2.5))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.text(1, 0.98, f"layer {RETRIEVES}", transform=axes.transAxes, ha="right", va="top", fontsize=8, color=INK)


def _lower_limit(score: Any) -> float:
    """Lower limit of a logarithmic axis, of which the smallest scores would otherwise take up most."""
    return float(max(np.quantile(score, 0.05) / 2, score.max() * 1e-5))


def _mix(share: Tensor, mark: Tensor, empty: str = PALE) -> Any:
    """Colors for shares of heads, with `empty` for the heads that do not keep a token."""
    base = (share - mark)[..., None]
    representative = mark[..., None]
    blue, orange, background = (torch.tensor(to_rgb(color)) for color in (BLUE, ORANGE, empty))
    mixed = base * blue + representative * orange + (1 - base - representative) * background
    return mixed.clamp(0, 1).numpy()


def _scored(selector: str, label: str, window: int = 0, at_full_budget: str = "") -> Draw:
    """A picture with scores; `at_full_budget` is the selector's spec at the full budget, if it differs."""
    score = partial(draw_scores, selector=at_full_budget or selector, label=label)
    return lambda: figure(f"{selector}@{BUDGET}", score=score, window=window)


HALF = 31
"""Half of the budget of 62 tokens."""

_OWN: dict[str, Draw] = {
    "full": lambda: figure("full"),
    "window": lambda: figure(f"window@{BUDGET}", window=2 * HALF),
    "streaming": lambda: figure(f"streaming@{BUDGET}", sinks=4, window=2 * HALF - 4),
    "h2o": _scored("h2o", "attention, sum\nover all queries", HALF),
    "snapkv": _scored("snapkv", "attention of the\nnewest 31, pooled", HALF, f"snapkv:window={HALF}"),
    "tova": _scored("tova", "attention of the\nnewest query"),
    "probe": _scored("probe", "attention, mean\nover probes"),
    "kvzip": lambda: figure(f"kvzip@{BUDGET}", sinks=4),
    "kvcrush": lambda: figure(f"kvcrush@{BUDGET}", score=draw_distances, window=23),
}
"""Pictures that show the scores, or the tokens that are always kept."""


def picture(name: str) -> Figure:
    """Positions that a selector keeps with its defaults."""
    return figure(f"{name}@{BUDGET}")


PICTURES: dict[str, Draw] = {name: _OWN.get(name, partial(picture, name)) for name in registry.SELECTORS}
"""Pictures by the name of the selector."""
