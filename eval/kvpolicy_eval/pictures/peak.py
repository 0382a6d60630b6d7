"""The picture of the front page: memory of a long prompt, with the stock cache and under policies."""

from __future__ import annotations

from matplotlib.figure import Figure

from kvpolicy.reporting.plots import _style
from kvpolicy_eval.common.long_prompt import CARD, PROMPT, peaks
from kvpolicy_eval.pictures.style import BLUE, GREY, VERMILION, Draw, blank

GIB = 2**30


def peak() -> Figure:
    """One bar for each way to read the prompt: weights, cache and activations, beside the memory of a card."""
    figure = blank(2.4)
    axes = figure.subplots()
    found = peaks()
    places = range(len(found))
    start = [0.0] * len(found)
    parts = {
        "weights": (GREY, [each.weights for each in found]),
        "cache": (BLUE, [each.cache for each in found]),
        "activations, uncompressed layers": (
            _style.KINDS["positions"],
            [each.nbytes - each.weights - each.cache for each in found],
        ),
    }
    for name, (color, sizes) in parts.items():
        widths = [size / GIB for size in sizes]
        axes.barh(places, widths, left=start, color=color, label=name, height=0.62)
        start = [left + width for left, width in zip(start, widths, strict=True)]
    for place, end in zip(places, start, strict=True):
        axes.text(end - 0.3, place, f"{end:.1f}", va="center", ha="right", color="#ffffff")
    axes.axvline(CARD, color=VERMILION, linestyle="--", linewidth=1.2)
    axes.text(CARD + 0.3, -0.62, f"a card of {CARD} GiB", color=VERMILION, va="bottom")
    axes.set(
        yticks=places,
        yticklabels=[each.name.replace("`", "") for each in found],
        ylim=(len(found) - 0.5, -0.5),
        xlabel=f"GiB at the peak, for a prompt of {PROMPT:,} tokens on Llama-3.1-8B in bf16",
    )
    axes.legend(loc="lower right")
    return figure


PICTURES: dict[str, Draw] = {"peak": peak}
