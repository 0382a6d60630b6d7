"""Pictures of readers: what the step after the prompt reads in each layer."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from kvpolicy import registry
from kvpolicy.engine.layer_index import StepReads
from kvpolicy.protocols import Read
from kvpolicy_eval.common.conversation import run
from kvpolicy_eval.pictures.scene import Kept, embedded, scene
from kvpolicy_eval.pictures.selectors import AXIS, layers, parts
from kvpolicy_eval.pictures.style import VERMILION, Draw, blank

READ = 0.1
"""Fraction of the slots that is read."""

_OWN = {"all": "full", "exact": f"exact:read={READ}", "reuse": f"reuse:every=3/exact:read={READ}"}
"""Policies of the pictures; others read this fraction, and everything in as many layers as by default."""


@functools.cache
@torch.inference_mode()
def read(policy: str) -> tuple[Tensor, int]:
    """Slots that the step of the last token of the prompt reads.

    Returns:
        The share of the KV heads that read each position, [L, P], and the bytes that the step moves of 100 that reading
        everything would move.
    """
    model, _ = embedded()
    ids = scene().ids
    chosen: dict[int, Read] = {}
    find = StepReads._read  # pyright: ignore[reportPrivateUsage]

    def note(self: Any, *given: Any) -> tuple[Read | None, Tensor | None]:
        found = find(self, *given)
        if found[0] is not None:
            chosen[self._spec.layer_idx] = found[0]
        return found

    watched: Any = StepReads
    watched._read = note
    try:
        cache = run(model, policy, [ids[:, :-1], ids[:, -1:]], new=1).cache
    finally:
        watched._read = find
    share = torch.ones(len(cache.layers), ids.shape[1])
    for layer in cache.policy_layers:
        if layer.layer_idx in chosen:
            share[layer.layer_idx] = _share(layer.positions[0], chosen[layer.layer_idx], ids.shape[1])
    report = cache.report()
    return share, round(100 * report.moved / report.all_moved)


def _share(positions: Tensor, found: Read, length: int) -> Tensor:
    """The share of the heads that read each position."""
    total = torch.zeros(length)
    for head, slots in enumerate(found.slots[0]):
        held = positions[head][slots[found.chosen[0, head]]].long()
        total[held[held >= 0]] += 1
    return total / len(positions)


def picture(name: str) -> Figure:
    """The positions that a reader reads with its defaults."""
    policy = _OWN.get(name, f"{name}:read={READ}")
    share, moved = read(policy)
    drawing = blank(2.4)
    axes: list[Any] = list(drawing.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [0.55, 1.9]}))
    parts(axes[0], 0, 0)
    axes[0].set_title(f"{policy}:  the step after the prompt moves {moved} % of the bytes", pad=8)
    layers(axes[1], Kept(share, torch.zeros_like(share), [], "", share))
    axes[1].set_xlabel(f"{AXIS}   (the deeper the color, the more of the 4 KV heads read the token)")
    for edge in (scene().fact[0] - 0.5, scene().fact[1] + 0.5):
        axes[1].axvline(edge, color=VERMILION, linewidth=0.8)
    return drawing


PICTURES: dict[str, Draw] = {name: partial(picture, name) for name in registry.READERS}
"""Pictures by the name of the reader."""
