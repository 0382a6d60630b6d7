"""Which positions each selector keeps of one prompt, and the score that decided."""

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

from kvpolicy_eval.pictures import common
from kvpolicy_eval.pictures.common import BLUE, GREY, INK, LIGHT, ORANGE, PALE, VERMILION, Draw
from kvpolicy_eval.pictures.crush import draw_distances
from kvpolicy_eval.pictures.scene import BUDGET, RETRIEVES, Kept, kept, scene

Score = Callable[[Any, Kept], None]
AXIS = "position in the prompt, tokens"
DEPTH = "(the deeper the colour, the more of the 4 KV heads hold the token)"


def figure(policy: str, *, score: Score | None = None, sinks: int = 0, window: int = 0) -> Figure:
    """The prompt's parts, what every layer keeps of it, and beneath it what decided.

    Args:
        policy: Its words.
        score: Draws what decided; nothing is drawn without it.
        sinks: First tokens that are kept whatever they are.
        window: Newest tokens that are.
    """
    found = kept(policy)
    drawn = common.blank(3.9 if score else 2.4)
    ratios = [0.55, 1.9, 1.5] if score else [0.55, 1.9]
    axes: list[Any] = list(drawn.subplots(len(ratios), 1, sharex=True, gridspec_kw={"height_ratios": ratios}))
    parts(axes[0], sinks, window)
    axes[0].set_title(headline(policy, found), pad=8)
    layers(axes[1], found)
    if score:
        score(axes[2], found)
    axes[-1].set_xlabel(f"{AXIS}   {DEPTH}" if score else AXIS)
    for each in axes[1:]:
        for edge in (scene().fact[0] - 0.5, scene().fact[1] + 0.5):
            each.axvline(edge, color=VERMILION, linewidth=0.8)
    return drawn


def headline(policy: str, found: Kept) -> str:
    """The policy, how much it keeps, and what becomes of the answer."""
    right = scene().answer
    said = "right" if found.answer == right else f"wrong (it is {right})"
    held = f"{found.budgets[RETRIEVES]} of {scene().length} tokens per layer and KV head"
    return f"{policy}:  {held}; the model then answers {found.answer}, {said}"


def parts(axes: Any, sinks: int, window: int) -> None:
    """A strip that names what stands where in the prompt."""
    now = scene()
    begin, end = now.fact
    dark = "#a04f7c"
    strips = [(0, now.question, PALE), (begin, end + 1, VERMILION), (now.question, now.length, dark)]
    words: list[tuple[float, str, str, str]] = [
        (now.question * 0.3, "records, key=value", GREY, "center"),
        ((begin + end) / 2, "the record asked for", VERMILION, "center"),
        (now.length, "question", dark, "right"),
    ]
    if sinks:
        strips.append((0, sinks, BLUE))
        words.append((0, f"{sinks} sinks", BLUE, "left"))
    if window:
        axes.plot([now.length - window - 0.5, now.length - 0.5], [0.5, 0.5], color=BLUE, linewidth=2)
        words.append((now.length - window, f"newest {window}", BLUE, "right"))
    for first, last, color in strips:
        axes.axvspan(first - 0.5, last - 0.5, 0, 0.4, color=color, linewidth=0)
    for x, text, color, side in words:
        axes.text(x, 0.6, text, color=color, ha=side, va="bottom", fontsize=8)
    axes.set(ylim=(0, 1), yticks=[], xlim=(-0.5, now.length - 0.5))
    axes.spines[:].set_visible(False)
    axes.tick_params(bottom=False, labelbottom=False)


def layers(axes: Any, found: Kept) -> None:
    """Layers down, positions to the right; the deeper the colour, the more KV heads hold the token."""
    count, length = found.share.shape
    axes.imshow(image(found), aspect="auto", interpolation="none", extent=(-0.5, length - 0.5, count - 0.5, -0.5))
    axes.set(ylabel="layer", yticks=range(count))
    axes.tick_params(axis="y", labelsize=7)
    axes.spines[:].set_visible(False)


def image(found: Kept) -> Any:
    """Colours [L, P, 3]: blue as far as heads hold a token, orange as far as they hold it as a representative."""
    return (_mix(found.share, found.mark) * 255).round().astype(np.uint8)


def draw_scores(axes: Any, found: Kept, *, words: str, label: str) -> None:
    """What the selector thinks of every position in the layer that looks up records, its colour as in the map."""
    score = kept(f"{words}@1.0").score[RETRIEVES].numpy()
    colors = _mix(found.share[RETRIEVES], found.mark[RETRIEVES], empty=LIGHT)
    axes.vlines(np.arange(len(score)), 1e-6, score, color=colors, linewidth=1.6)
    axes.set(yscale="log", ylabel=label, ylim=(_floor(score), score.max() * 2.5))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.text(1, 0.98, f"layer {RETRIEVES}", transform=axes.transAxes, ha="right", va="top", fontsize=8, color=INK)


def _floor(score: Any) -> float:
    """Below all but the smallest scores, which would take up most of a logarithmic axis."""
    return float(max(np.quantile(score, 0.05) / 2, score.max() * 1e-5))


def _mix(share: Tensor, mark: Tensor, empty: str = PALE) -> Any:
    base, stand_in = (share - mark)[..., None], mark[..., None]
    blue, orange, blank = (torch.tensor(to_rgb(color)) for color in (BLUE, ORANGE, empty))
    return (base * blue + stand_in * orange + (1 - base - stand_in) * blank).clamp(0, 1).numpy()


def _scored(words: str, label: str, window: int = 0, at_full: str = "") -> Draw:
    score = partial(draw_scores, words=at_full or words, label=label)
    return lambda: figure(f"{words}@{BUDGET}", score=score, window=window)


HALF = 31
"""Half of the budget of 62 tokens."""

PICTURES: dict[str, Draw] = {
    "full": lambda: figure("full"),
    "window": lambda: figure(f"window@{BUDGET}", window=2 * HALF),
    "streaming": lambda: figure(f"streaming@{BUDGET}", sinks=4, window=2 * HALF - 4),
    "h2o": _scored("h2o", "attention, sum\nover all queries", HALF),
    "snapkv": _scored("snapkv", "attention of the\nnewest 31, pooled", HALF, f"snapkv:window={HALF}"),
    "tova": _scored("tova", "attention of the\nnewest query"),
    "probe": _scored("probe", "attention, mean\nover probes"),
    "kvcrush": lambda: figure(f"kvcrush@{BUDGET}", score=draw_distances, window=23),
}
"""By the selector's name."""
