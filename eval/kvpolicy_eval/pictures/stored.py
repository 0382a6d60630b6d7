"""Bits per element that a codec stores, by part: the bars below its picture."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from matplotlib.patches import Patch

import kvpolicy
from kvpolicy import Policy
from kvpolicy.engine.state import fields
from kvpolicy_eval.common.codecs import groups_layers, with_ranking
from kvpolicy_eval.common.synthetic import one_layer_config, with_random_calibration
from kvpolicy_eval.pictures.style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILION

HEADS = 8
DIM = 128
TOKENS = 4096
"""Length of the prompt; shape and length are those of the table of bits in the guide."""

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
"""Colors of the parts, in the order in which they are drawn."""

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
"""Part of a tensor, by the last component of its name; all others are codes."""

_VISIBLE = 0.005
"""Bits from which a part is visible, so that the legend names it."""


def stored(codec: str) -> dict[str, float]:
    """Bits per element of a cache of `TOKENS` tokens in bf16, by part; their sum is that of the plan."""
    policy = Policy.parse(with_ranking(codec))
    with TemporaryDirectory() as folder:
        policy = dataclasses.replace(policy, codec=with_random_calibration(policy.codec, Path(folder), HEADS, DIM))
        config = one_layer_config(HEADS, DIM, layers=2 if groups_layers(codec) else 1)
        plan = kvpolicy.plan(config, policy, prompt=TOKENS, dtype=torch.bfloat16)
        sizes = dict.fromkeys(COLORS, 0)
        for layer in plan.layers:
            stages = plan.policy.at(layer.layer_idx).codec.stages
            for stage, slots in zip(stages, layer.layout.coded, strict=True):
                codes: Any = stage.alloc(1, HEADS, slots, DIM, "meta")
                for name, tensor in fields(codes):
                    sizes[_PARTS.get(name.rsplit("_", 1)[-1], "codes")] += tensor.nbytes
    by_kind = plan.by_kind()
    sizes["exact tokens"] = by_kind["exact"]
    sizes["statistics"] = by_kind["statistics"]
    sizes["positions and counters"] = by_kind["positions"] + by_kind["counters"]
    elements = 2 * HEADS * DIM * TOKENS * len(plan.layers)
    return {part: 8 * size / elements for part, size in sizes.items() if size}


def bars(axes: Any, codecs: list[str]) -> None:
    """Draw one bar per codec."""
    by_codec = [stored(codec) for codec in codecs]
    for row, parts in enumerate(by_codec):
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
    drawn = [part for part in COLORS if any(parts.get(part, 0) >= _VISIBLE for parts in by_codec)]
    patches = [Patch(color=COLORS[part], label=part) for part in drawn]
    axes.legend(
        handles=patches,
        ncols=len(patches),
        loc="lower left",
        bbox_to_anchor=(0, 1.03),
        handlelength=1,
        columnspacing=1.2,
        handletextpad=0.4,
        borderaxespad=0,
    )
