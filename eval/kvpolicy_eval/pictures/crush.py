"""The ranking of `kvcrush`: the distance of each token's signature from the anchor."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvpolicy.selectors.crush import anchor_bits, signatures
from kvpolicy_eval.pictures.scene import RETRIEVES, Kept, embedded, scene
from kvpolicy_eval.pictures.style import BLUE, INK, LIGHT, ORANGE

SEED = RETRIEVES
"""Seed of the anchor in that layer, if the seed of the policy is 0."""


@torch.inference_mode()
def crush_distances(window: int) -> Tensor:
    """Hamming distance between each token's signature and the anchor in the retrieval layer, [P].

    It is computed from the complete attention matrix, which the engine never materializes.

    Args:
        window: Queries whose attention makes the signatures.
    """
    model, _ = embedded()
    model.set_attn_implementation("eager")
    attention = model(scene().ids, output_attentions=True).attentions[RETRIEVES]  # [1, Hq, P, P]
    model.set_attn_implementation("sdpa")
    statistic = attention[:, :, -window:].sum(2)
    valid = torch.ones_like(statistic, dtype=torch.bool)
    bits = signatures(statistic, valid, 0.5)
    return (bits ^ anchor_bits("random", bits, valid, SEED)[..., None]).sum(1)[0]


def draw_distances(axes: Any, result: Kept) -> None:
    """Draw a dot per token: its distance, and whether it is kept by the base, a representative, or dropped."""
    distance = crush_distances(23).numpy()
    share = result.share[RETRIEVES].numpy()
    mark = result.mark[RETRIEVES].numpy()
    positions = np.arange(len(distance))
    kinds = [
        (share == 0, LIGHT, "dropped by every KV head"),
        ((mark == 0) & (share > 0), BLUE, "kept by the base"),
        (mark > 0, ORANGE, "representative in some KV head"),
    ]
    for which, color, label in kinds:
        axes.scatter(positions[which], distance[which], s=9, color=color, label=label, linewidth=0)
    axes.set(ylabel="distance to\nthe anchor, bits", ylim=(-0.5, 8.5), yticks=[0, 2, 4, 6, 8])
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.3), ncols=3, handletextpad=0.2)
    axes.text(1, 0.98, f"layer {RETRIEVES}", transform=axes.transAxes, ha="right", va="top", fontsize=8, color=INK)
