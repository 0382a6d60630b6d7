"""Pictures of head allocators: how each divides a layer's budget among its heads."""

from __future__ import annotations

from functools import partial

from matplotlib.figure import Figure

from kvpolicy import registry
from kvpolicy_eval.pictures.scene import BUDGET, heads_of, scene
from kvpolicy_eval.pictures.style import BLUE, GREY, Draw, blank

SELECTOR = "snapkv"
"""Selector whose ranking is divided."""


def picture(name: str) -> Figure:
    """Tokens of each KV head of every layer."""
    layers = heads_of(f"uniform/{name}+{SELECTOR}@{BUDGET}")
    figure = blank(2.4)
    axes = figure.subplots()
    count = len(layers[0])
    width = 0.8 / count
    for layer, heads in enumerate(layers):
        places = [layer + (head - (count - 1) / 2) * width for head in range(count)]
        axes.bar(places, heads, color=BLUE, width=width * 0.85)
    mean = sum(map(sum, layers)) / (len(layers) * count)
    axes.axhline(mean, color=GREY, linestyle="--", linewidth=1)
    axes.set(xlabel="layer, one bar for each KV head", xticks=range(len(layers)), ylabel=f"tokens, of {scene().length}")
    axes.set_title(f"{name}: {sum(map(sum, layers))} tokens in all heads; dashed: even share")
    return figure


PICTURES: dict[str, Draw] = {name: partial(picture, name) for name in registry.HEAD_ALLOCATORS}
"""Pictures by the name of the head allocator."""
