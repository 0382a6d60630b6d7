"""The picture of the idea: allocator, selector and codec on the slots of one run."""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.figure import Figure

import kvpolicy
from kvpolicy.reporting.plots import _style
from kvpolicy_eval.pictures.scene import BUDGET, embedded, kept, scene
from kvpolicy_eval.pictures.selectors import image
from kvpolicy_eval.pictures.style import BLUE, GREY, INK, VERMILION, Draw, blank

ALLOCATOR = "squeeze"
SELECTOR = "snapkv"
CODEC = "tokenwise"
POLICY = f"{ALLOCATOR}+{SELECTOR}+{CODEC}@{BUDGET}"
STORED = {"exact": "full precision", "codes": "codes", "scales": "scales", "other": "positions, statistics"}
COLORS = {kind: _style.KINDS.get(kind, _style.KINDS["positions"]) for kind in STORED}


@torch.inference_mode()
def bytes_by_layer() -> tuple[list[dict[str, int]], list[int]]:
    """The bytes of each layer by kind after the prompt of the scene, and those of the same slots in full precision."""
    model, _ = embedded()
    with kvpolicy.attach(model, POLICY) as handle:
        model(scene().ids, logits_to_keep=1)
        layers = handle.report().layers
    head = 2 * model.config.head_dim * model.dtype.itemsize * model.config.num_key_value_heads
    found = [
        {
            **{kind: layer.nbytes[kind] for kind in ("exact", "codes", "scales")},
            "other": sum(layer.nbytes.values()) - sum(layer.nbytes[kind] for kind in ("exact", "codes", "scales")),
        }
        for layer in layers
    ]
    return found, [layer.kept[0] * head for layer in layers]


def idea() -> Figure:
    """Slots of each layer, the tokens that they hold, and how these are stored."""
    figure = blank(3.1)
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.08)
    budget, tokens, stored = figure.subplots(1, 3, sharey=True, width_ratios=[1, 1.7, 1])
    result = kept(POLICY)
    _budgets(budget, result.budgets)
    _tokens(tokens, result)
    _bytes(stored)
    budget.set(yticks=range(len(result.budgets)), ylim=(len(result.budgets) - 0.5, -0.5), ylabel="layer")
    figure.suptitle(POLICY, family="monospace", fontsize=9, color=INK)
    return figure


def _budgets(axes: Any, budgets: list[int]) -> None:
    axes.barh(range(len(budgets)), budgets, color=BLUE, height=0.7)
    for layer, tokens in enumerate(budgets):
        axes.annotate(str(tokens), (tokens, layer), (2, 0), textcoords="offset points", va="center", fontsize=8)
    axes.axvline(sum(budgets) / len(budgets), color=GREY, linestyle="--", linewidth=1)
    axes.set(xlabel="slots (dashed: an even share)", xlim=(0, max(budgets) * 1.25))
    axes.set_title(f"allocator {ALLOCATOR}\nhow many slots per layer?")


def _tokens(axes: Any, result: Any) -> None:
    prompt = scene()
    count = len(result.budgets)
    extent = (-0.5, prompt.length - 0.5, count - 0.5, -0.5)
    axes.imshow(image(result), aspect="auto", interpolation="none", extent=extent)
    for position in (prompt.fact[0] - 0.5, prompt.fact[1] + 0.5):
        axes.axvline(position, color=VERMILION, linewidth=1)
    axes.set(xlabel="position in the prompt (between red lines: the answer)")
    axes.set_title(f"selector {SELECTOR}\nwhich tokens do they hold?")
    axes.spines[:].set_visible(False)


def _bytes(axes: Any) -> None:
    found, exact = bytes_by_layer()
    left = [0.0] * len(found)
    for kind, label in STORED.items():
        width = [layer[kind] / 1024 for layer in found]
        axes.barh(range(len(found)), width, left=left, color=COLORS[kind], height=0.7, label=label)
        left = [start + more for start, more in zip(left, width, strict=True)]
    outline = [size / 1024 for size in exact]
    axes.barh(range(len(found)), outline, color="none", edgecolor=GREY, linewidth=0.8, height=0.7, label="uncoded")
    axes.set(xlabel="KiB")
    axes.set_title(f"codec {CODEC}\nhow is each slot stored?")
    axes.legend(loc="lower right", fontsize=7, handlelength=1)


PICTURES: dict[str, Draw] = {"idea": idea}
