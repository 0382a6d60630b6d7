"""Pictures of codecs that differ in their levels or atoms: kvquant, rotate, turboquant, csr."""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from kvpolicy.codecs.rotation import mix
from kvpolicy.codecs.turboquant import normal_levels
from kvpolicy_eval.pictures.panels import canvas, heat
from kvpolicy_eval.pictures.style import BLUE, GREEN, GREY, INK, ORANGE, VERMILION
from kvpolicy_eval.pictures.tensors import HEAD, after, originals, read, relative_error

KVQUANT = "kvquant:bits=3:residual_length=8:block_size=8"
CHANNEL = 4
"""A channel of keys that the rotary embedding rotates visibly within the prompt."""
UNEVEN_LAYER = 0
UNEVEN_HEAD = 2
"""KV head whose channels differ most in size, and its layer."""
BITS = 3
"""Bits of the levels in the picture of turboquant."""
SEED = 0
"""Seed of its random signs."""
CSR = "csr:nnz={}:prompt_atoms=16:block_size=8"
TOKEN = 200
"""Position of the key that is written as a sum of atoms."""
PAIRS = (2, 4, 6, 8)
"""Numbers of pairs of an atom and its coefficient, the `nnz` of CSR."""
WHITE: dict[str, Any] = {"frameon": True, "facecolor": "white", "edgecolor": "white", "framealpha": 1}
"""Style of a legend that covers lines."""


def kvquant_channel() -> tuple[Tensor, Tensor, float, float]:
    """One channel over positions, rotated and unrotated, and the center and half width of its calibrated range."""
    calibration = after(KVQUANT).contents.calibrations[0]
    center, half = (float(t[0, HEAD, 0, CHANNEL]) for t in (calibration.key_offset, calibration.key_range))
    tensors = originals()
    return tensors.keys[HEAD, :, CHANNEL], tensors.unrotated[HEAD, :, CHANNEL], center, half


def kvquant_normalized() -> tuple[Tensor, Tensor]:
    """Unrotated keys of the layer in units of their calibrated ranges, and the levels that they are rounded to."""
    calibration = after(KVQUANT).contents.calibrations[0]
    normalized = (originals().unrotated - calibration.key_offset[0]) / calibration.key_range[0]
    return normalized.flatten(), calibration.key_levels


def kvquant() -> Figure:
    """Rotated and unrotated keys, and the calibrated levels."""
    figure, (first, second) = canvas(2, ["kvquant:bits=2", "kvquant", "kvquant:bits=4"])
    rotated, unrotated, center, half = kvquant_channel()
    first.plot(rotated, color=GREY, linewidth=0.8, label="as attention sees it")
    first.plot(unrotated, color=BLUE, linewidth=0.8, label="unrotated")
    first.axhspan(center - half, center + half, color=ORANGE, alpha=0.25, linewidth=0, label="calibrated range")
    first.set_xlabel("position (tokens)")
    first.set_ylabel("number")
    first.set_title(f"channel {CHANNEL} of the keys")
    first.legend(ncols=3, loc="lower left", columnspacing=1)
    first.margins(x=0)
    first.set_ylim(bottom=min(float(rotated.min()), center - half) - 2)
    x, levels = kvquant_normalized()
    second.hist(x.clamp(-1.5, 1.5), bins=90, color=BLUE, density=True)
    for number, level in enumerate(levels.tolist()):
        second.axvline(level, color=VERMILION, linewidth=1.2, label=None if number else "calibrated levels")
    even = torch.linspace(-1, 1, len(levels))
    second.plot(even, torch.zeros(len(even)), "|", color=INK, markersize=14, label="evenly spaced ones", clip_on=False)
    second.set_xlabel("number, in half widths of its channel's range")
    second.set_ylabel("share per half width")
    second.set_title("normalized keys of the layer, and 8 levels")
    second.set_ylim(0, 1.6)
    second.legend(loc="upper right", **WHITE)
    return figure


def peak(x: Tensor) -> Tensor:
    """Largest absolute element of each vector over its root mean square."""
    return x.abs().amax(-1) / x.square().mean(-1).sqrt()


def rotate_peaks() -> tuple[Tensor, Tensor]:
    """Mean of `peak` over the keys of each KV head, ordered by layer, before and after mixing."""
    model_layers = range(8)
    keys = torch.stack([originals(layer_idx).unrotated for layer_idx in model_layers])
    return peak(keys).mean(-1).flatten(), peak(mix(keys)).mean(-1).flatten()


def rotate() -> Figure:
    """Unrotated keys before and after mixing."""
    figure, (first, second, third) = canvas(
        3, ["rotate", "rotate:bits=3", "rotate:bits=4"], width_ratios=[1, 1.15, 0.95]
    )
    keys = originals(UNEVEN_LAYER).unrotated[UNEVEN_HEAD]
    limit = float(keys.abs().max())
    heat(first, keys[:128], "keys without rotary embedding", limit)
    heat(second, mix(keys)[:128], "the same, mixed", limit, bar="number")
    before, mixed = rotate_peaks()
    third.scatter(before, mixed, s=12, color=BLUE, label="a KV head")
    index = UNEVEN_LAYER * originals().keys.shape[0] + UNEVEN_HEAD
    third.scatter(
        before[index : index + 1], mixed[index : index + 1], s=24, color=VERMILION, label="the one on the left"
    )
    third.axline((2.2, 2.2), slope=1, color=GREY, linewidth=0.8, linestyle=":")
    third.set_xlim(2, 3.2)
    third.set_ylim(2, 3.2)
    third.set_xlabel("largest / root mean square")
    third.set_ylabel("the same, mixed")
    third.set_title("peak, mean of a head")
    third.legend(loc="upper left")
    return figure


def turboquant_channels() -> tuple[Tensor, Tensor]:
    """Channels of all keys over the key's root mean square, before and after random signs and mixing."""
    keys = originals(UNEVEN_LAYER).keys[UNEVEN_HEAD]
    scaled = keys / keys.square().mean(-1, keepdim=True).sqrt()
    return scaled, mix(scaled, SEED)


def turboquant() -> Figure:
    """Channels before and after mixing, and the levels of the normal distribution."""
    figure, (first, second) = canvas(2, ["turboquant:bits=2", "turboquant:bits=3", "turboquant"])
    plain, mixed = turboquant_channels()
    for x, color, label in ((plain, GREY, "as they are"), (mixed, BLUE, "after random signs and mixing")):
        first.step(range(x.shape[-1]), x.square().mean(0).sqrt(), where="mid", color=color, label=label)
    first.set_ylim(0, 3.2)
    first.set_xlabel("channel")
    first.set_ylabel("root mean square of a channel")
    first.set_title("channels of keys")
    first.legend(loc="upper right")
    second.hist(mixed.flatten().clamp(-4, 4), bins=80, color=BLUE, density=True)
    grid = torch.linspace(-4, 4, 161)
    normal = torch.exp(-grid.square() / 2) / (2 * torch.pi) ** 0.5
    second.plot(grid, normal, color=INK, linewidth=1, label="normal distribution")
    for number, level in enumerate(normal_levels(BITS)):
        second.axvline(level, color=VERMILION, linewidth=1, label=None if number else f"its {2**BITS} best levels")
    second.set_title("all channels after mixing, and what 3 bits can say")
    second.set_xlabel("number, in root mean squares of its key")
    second.set_ylabel("share per unit")
    second.set_ylim(0, 0.62)
    second.legend(loc="upper right", **WHITE)
    return figure


def csr_pairs() -> tuple[Tensor, Tensor]:
    """Atoms and coefficients of one key as stored, [s] each."""
    layer = after(CSR.format(PAIRS[-1]))
    slot = int((layer.tensors.positions[0, HEAD] == TOKEN).nonzero()) - layer.layout.exact
    codes = layer.tensors.codes[0]
    return codes.key_index[0, HEAD, slot].long(), codes.key_coef[0, HEAD, slot].float()


def csr_sums() -> dict[int, Tensor]:
    """The key as decoded from 2, 4, 6 and 8 pairs."""
    return {s: read(after(CSR.format(s)))[0][TOKEN] for s in PAIRS}


def csr_errors() -> tuple[list[float], list[float]]:
    """Errors of the head's keys and values by number of pairs."""
    tensors = originals()
    decoded = [read(after(CSR.format(s))) for s in PAIRS]
    key_errors = [relative_error(keys, tensors.unrotated[HEAD]) for keys, _ in decoded]
    value_errors = [relative_error(values, tensors.values[HEAD]) for _, values in decoded]
    return key_errors, value_errors


def csr() -> Figure:
    """One key, its pairs, and the error by number of pairs."""
    figure, (first, second, third) = canvas(
        3, ["csr:nnz=4", "csr:nnz=8:coef=fp8:index=packed", "csr"], width_ratios=[1.5, 1, 0.9]
    )
    first.plot(originals().unrotated[HEAD, TOKEN], color=INK, linewidth=2.4, alpha=0.35, label="the key")
    for (s, x), color in zip(csr_sums().items(), (VERMILION, "", "", BLUE), strict=True):
        if color:
            first.plot(x, color=color, linewidth=1, label=f"{s} pairs")
    first.set_xlabel("channel")
    first.set_ylabel("number")
    first.set_title(f"the key at position {TOKEN}, and as it is read back")
    first.set_ylim(-7, 8)
    first.legend(ncols=3, loc="upper left", columnspacing=1)
    atoms, coefficients = csr_pairs()
    second.barh(range(len(atoms)), coefficients.tolist(), color=BLUE)
    second.set_yticks(range(len(atoms)), [f"atom {atom}" for atom in atoms.tolist()])
    second.invert_yaxis()
    second.axvline(0, color=INK, linewidth=0.8)
    second.set_xlabel("coefficient")
    second.set_title("its pairs, as stored")
    for errors, color, label in zip(csr_errors(), (BLUE, GREEN), ("keys", "values"), strict=True):
        third.plot(PAIRS, errors, "o-", color=color, label=label)
    third.set_xticks(PAIRS)
    third.set_ylim(bottom=0)
    third.set_xlabel("pairs per vector, s")
    third.set_ylabel("relative squared error")
    third.set_title("error of the head")
    third.legend()
    return figure
