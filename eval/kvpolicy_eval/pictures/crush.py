"""What decides in `kvcrush`: how far each token's signature is from the anchor."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvpolicy.selectors._crush import anchor_bits, signatures
from kvpolicy_eval.pictures.common import BLUE, INK, LIGHT, ORANGE
from kvpolicy_eval.pictures.scene import RETRIEVES, Kept, embedded, scene

SEED = RETRIEVES
"""Of the anchor of that layer, under the default seed of 0."""


@torch.inference_mode()
def crush_distances(window: int) -> Tensor:
    """Hamming distance of each token's signature to the anchor, [P], in the layer that looks up records.

    Computed from the whole matrix of attention, which the engine never makes.

    Args:
        window: Queries whose attention signs.
    """
    model, _ = embedded()
    model.set_attn_implementation("eager")
    attention = model(scene().ids, output_attentions=True).attentions[RETRIEVES]  # [1, Hq, P, P]
    model.set_attn_implementation("sdpa")
    statistic = attention[:, :, -window:].sum(2)
    valid = torch.ones_like(statistic, dtype=torch.bool)
    bits = signatures(statistic, valid, 0.5)
    return (bits ^ anchor_bits("random", bits, valid, SEED)[..., None]).sum(1)[0]


def draw_distances(axes: Any, found: Kept) -> None:
    """A dot for each token: its distance, and whether the base keeps it, it stands in for others, or it goes."""
    distance = crush_distances(23).numpy()
    share, mark = found.share[RETRIEVES].numpy(), found.mark[RETRIEVES].numpy()
    at = np.arange(len(distance))
    kinds = [
        (share == 0, LIGHT, "dropped by every KV head"),
        ((mark == 0) & (share > 0), BLUE, "kept by the base"),
        (mark > 0, ORANGE, "representative in some KV head"),
    ]
    for which, color, label in kinds:
        axes.scatter(at[which], distance[which], s=9, color=color, label=label, linewidth=0)
    axes.set(ylabel="distance to\nthe anchor, bits", ylim=(-0.5, 8.5), yticks=[0, 2, 4, 6, 8])
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.3), ncols=3, handletextpad=0.2)
    axes.text(1, 0.98, f"layer {RETRIEVES}", transform=axes.transAxes, ha="right", va="top", fontsize=8, color=INK)
