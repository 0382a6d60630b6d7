"""What a codec stores, part by part, as bits per number: bars under its picture."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from matplotlib.patches import Patch

import kvpolicy
from kvpolicy import Policy
from kvpolicy_eval.bits import shape
from kvpolicy_eval.codecs import with_ranking
from kvpolicy_eval.pictures.common import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILION
from kvpolicy_eval.standins import stand_in

HEADS, DIM, TOKENS = 8, 128, 4096
"""The shape and the length that the bars stand for; those of the guide's table of bits."""

COLORS = {
    "codes": BLUE,
    "atoms": BLUE,
    "coefficients": SKY,
    "scales and zeros": ORANGE,
    "outliers": VERMILION,
    "low rank": GREEN,
    "exact tokens": "#c4c4c4",
    "positions and counters": PURPLE,
    "statistics": GREY,
}
"""Parts, in the order in which they are drawn."""

_PARTS = {
    "scale": "scales and zeros",
    "zero": "scales and zeros",
    "order": "scales and zeros",
    "place": "scales and zeros",
    "places": "outliers",
    "outliers": "outliers",
    "left": "low rank",
    "right": "low rank",
    "index": "atoms",
    "coef": "coefficients",
}
"""The last word of a tensor's name, and the part that it is; all others are codes."""

_SEEN = 0.005
"""Bits below which a part is too thin to be seen, and is not named."""


def stored(codec: str) -> dict[str, float]:
    """Bits per number of a cache of `TOKENS` tokens in bf16, by part; together those of its plan."""
    policy = Policy.parse(with_ranking(codec))
    with TemporaryDirectory() as folder:
        policy = dataclasses.replace(policy, codec=stand_in(policy.codec, Path(folder), HEADS, DIM))
        plan = kvpolicy.plan(shape(HEADS, DIM), policy, prompt=TOKENS, dtype=torch.bfloat16)
        layer, sizes = plan.layers[0], dict.fromkeys(COLORS, 0)
        for stage, slots in zip(policy.codec.stages, layer.layout.coded, strict=True):
            codes: Any = stage.alloc(1, HEADS, slots, DIM, "meta")
            for name, tensor in zip(codes._fields, codes, strict=True):
                sizes[_PARTS.get(name.rsplit("_", 1)[-1], "codes")] += tensor.nbytes
    kinds = layer.nbytes
    sizes["exact tokens"], sizes["statistics"] = kinds["exact"], kinds["statistics"]
    sizes["positions and counters"] = kinds["positions"] + kinds["counters"]
    return {part: 8 * size / (2 * HEADS * DIM * TOKENS) for part, size in sizes.items() if size}


def bars(axes: Any, codecs: list[str]) -> None:
    """One bar of each codec."""
    found = [stored(codec) for codec in codecs]
    for row, parts in enumerate(found):
        start = 0.0
        for part, size in parts.items():
            axes.barh(row, size, left=start, height=0.62, color=COLORS[part])
            start += size
        axes.annotate(f"{start:.2f}", (start, row), (4, 0), textcoords="offset points", va="center", color=INK)
    axes.set_yticks(range(len(codecs)), codecs)
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"stored bits per number: {TOKENS:,} tokens, {HEADS} KV heads of {DIM}, bf16 (uncoded: 16)")
    drawn = [part for part in COLORS if any(parts.get(part, 0) >= _SEEN for parts in found)]
    patches = [Patch(color=COLORS[part], label=part) for part in drawn]
    how: Any = {"handlelength": 1, "columnspacing": 1.2, "handletextpad": 0.4, "borderaxespad": 0}
    axes.legend(handles=patches, ncols=len(patches), loc="lower left", bbox_to_anchor=(0, 1.03), **how)
