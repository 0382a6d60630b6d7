"""Pictures of mergers: which positions a layer keeps, and for how many tokens each of them stands."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from kvpolicy import registry
from kvpolicy_eval.pictures.scene import BUDGET, RETRIEVES, cache_under, scene
from kvpolicy_eval.pictures.selectors import AXIS, figure
from kvpolicy_eval.pictures.style import BLUE, GREY, ORANGE, Draw

SELECTOR = "snapkv"
"""Selector over which mergers are drawn."""


@functools.cache
@torch.inference_mode()
def changes(policy: str) -> tuple[Tensor, Tensor]:
    """How many tokens each kept position stands for in the retrieval layer, and how far its value moved, [H, P].

    A value's change is relative to its norm; both are 0 where a head does not keep a position.
    """
    length = scene().length
    caches = (cache_under(f"{SELECTOR}@1.0"), cache_under(policy))
    full, merged = (cache.policy_layers[RETRIEVES].store.tensors for cache in caches)
    positions = merged.positions[0].long()
    counts = torch.zeros_like(positions, dtype=torch.float32) if merged.log_counts is None else merged.log_counts[0]
    index = positions.clamp_min(0)
    before = full.values[0].gather(1, index[..., None].expand(-1, -1, full.values.shape[-1]))
    change = (merged.values[0] - before).norm(dim=-1) / before.norm(dim=-1).clamp_min(1e-9)
    occupied = positions >= 0
    found = (counts.exp(), change)
    empty = torch.zeros(len(positions), length)
    tokens, moved = (empty.scatter(1, index, t.where(occupied, 0)) for t in found)
    return tokens, moved


def draw_changes(axes: Any, result: object, *, policy: str) -> None:
    """Draw the most tokens that any head's slot of a position stands for, or how far its value moved."""
    tokens, moved = changes(policy)
    counted = bool((tokens > 1).any())
    height = (tokens if counted or not bool(moved.any()) else moved).amax(0)
    changed = (moved > 0).any(0)
    colors = [ORANGE if flag else BLUE for flag in changed.tolist()]
    axes.vlines(range(len(height)), 0, height.numpy(), color=colors, linewidth=1.6)
    axes.set(ylabel="tokens of a slot" if counted or not bool(moved.any()) else "change of value", xlabel=AXIS)
    axes.text(1, 0.98, f"layer {RETRIEVES}", transform=axes.transAxes, ha="right", va="top", fontsize=8, color=GREY)


def picture(name: str) -> Figure:
    """Positions that a policy with a merger keeps, and what merging changed in them."""
    policy = f"{SELECTOR}+{name}@{BUDGET}"
    return figure(policy, score=partial(draw_changes, policy=policy))


PICTURES: dict[str, Draw] = {name: partial(picture, name) for name in registry.MERGERS}
"""Pictures by the name of the merger."""
