"""Pictures of codecs that differ in which elements share a scale: tokenwise, kivi, gear, bfp."""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from kvpolicy import BFP
from kvpolicy.distortion import coded_store
from kvpolicy_eval.pictures.panels import canvas, heat
from kvpolicy_eval.pictures.style import BLUE, GREY, ORANGE, VERMILION
from kvpolicy_eval.pictures.tensors import HEAD, after, originals, read, relative_error

SHOWN = slice(128, 256)
"""Positions shown by heat maps."""
TOKENWISE = "tokenwise:bits={}:normalize={}:residual_length=8:block_size=8"
KIVI = "kivi:bits=2:group_size=32:residual_length=32"
GEARS = {"Q alone": ":rank=0:sparse=0", "Q and L": ":sparse=0", "Q, L and S": ""}
"""Parts of GEAR, and the options that disable the others."""
BLOCKS = BFP(mantissa=4, block_channels=8)
TOKEN = 200
"""Position of the key whose blocks are drawn."""


def normalized_keys() -> Tensor:
    """Keys normalized per channel by the mean and deviation that tokenwise fitted, [positions, D]."""
    codes = after(TOKENWISE.format(4, "true")).tensors.codes[0]
    return (originals().keys[HEAD] - codes.channel_zero[0, HEAD].float()) / codes.channel_scale[0, HEAD].float()


def tokenwise_errors() -> dict[bool, list[float]]:
    """Error of keys in 4, 3 and 2 bits, with and without normalization."""
    keys = originals().keys[HEAD]
    return {
        normalize: [
            relative_error(read(after(TOKENWISE.format(bits, str(normalize).lower())))[0], keys) for bits in (4, 3, 2)
        ]
        for normalize in (False, True)
    }


def tokenwise() -> Figure:
    """Channels before and after normalization, and the errors with and without it."""
    figure, (first, second, third) = canvas(
        3, ["tokenwise:bits=2", "tokenwise", "tokenwise:bits=8"], width_ratios=[1.1, 1.1, 1]
    )
    keys = originals().keys[HEAD]
    heat(first, keys[SHOWN], "keys as they are", float(keys.abs().max()), bar="number of a key")
    heat(second, normalized_keys()[SHOWN], "keys, normalized", 4, bar="deviations from mean")
    for axes in (first, second):
        _label_positions(axes)
    for normalize, errors in tokenwise_errors().items():
        xs = [at + (0.2 if normalize else -0.2) for at in range(3)]
        color, label = (BLUE, "normalized") if normalize else (GREY, "as they are")
        bars = third.bar(xs, errors, width=0.36, color=color, label=label)
        third.bar_label(bars, fmt="%.3f", fontsize=7)
    third.set_xticks(range(3), ["4", "3", "2"])
    third.set_xlabel("bits per code")
    third.set_ylabel("relative squared error")
    third.set_title("error of keys")
    third.legend()
    return figure


def kivi_errors() -> dict[str, Tensor]:
    """Errors of keys in 2 bits with one scale per 32 tokens of a channel, and per 32 channels of a token."""
    keys = originals().keys[HEAD]
    return {
        "by channel": read(after(KIVI))[0] - keys,
        "by token": read(after(TOKENWISE.format(2, "false")))[0] - keys,
    }


def kivi() -> Figure:
    """Keys, and the errors of two ways to group them."""
    figure, axes = canvas(3, ["kivi:bits=2", "kivi:bits=4"])
    keys = originals().keys[HEAD]
    heat(axes[0], keys[SHOWN], "keys; a box is a group", float(keys.abs().max()), bar="number of a key")
    for channel in (4, 12, 20):
        axes[0].add_patch(_box(31.5, channel - 0.5, 32, 1))
    for panel, (name, error) in zip(axes[1:], kivi_errors().items(), strict=True):
        size = relative_error(error + keys, keys)
        heat(panel, error[SHOWN], f"error {name}: {size:.3f}", 2, bar="error" if panel is axes[2] else "")
    for panel in axes:
        _label_positions(panel)
    return figure


def gear_errors() -> dict[str, Tensor]:
    """Errors of keys, with one part of GEAR after another enabled."""
    keys = originals().keys[HEAD]
    spec = "gear:group_size=32:residual_length=32"
    return {name: read(after(spec + disabled))[0] - keys for name, disabled in GEARS.items()}


def gear() -> Figure:
    """Errors with one part after another enabled."""
    figure, axes = canvas(3, [f"gear{disabled}" for disabled in GEARS.values()])
    keys = originals().keys[HEAD]
    errors = gear_errors()
    limit = float(errors["Q alone"][SHOWN].abs().max())
    for panel, (name, error) in zip(axes, errors.items(), strict=True):
        bar = "|error|, in the keys' own unit" if panel is axes[2] else ""
        title = f"{name}: error {relative_error(error + keys, keys):.3f}"
        heat(panel, error[SHOWN].abs(), title, limit, signed=False, bar=bar)
        _label_positions(panel)
    return figure


def bfp_blocks() -> dict[str, tuple[Tensor, Tensor, float]]:
    """Blocks of one key with and without sorted channels.

    The codec sorts the channels of keys and not those of values, so keys that are passed as values show the difference.

    Returns:
        By name: absolute elements in stored order, size of a quantization step at each, and the error of all keys.
    """
    keys = originals().keys
    layer = coded_store(BLOCKS, keys[None], keys[None])
    codes = layer.tensors.codes[0]
    slot = int((layer.tensors.positions[0, HEAD] == TOKEN).nonzero()) - layer.layout.exact
    result: dict[str, tuple[Tensor, Tensor, float]] = {}
    exponents = {"as they are": codes.value_scale, "sorted": codes.key_scale}
    for (name, biased), decoded in zip(exponents.items(), reversed(read(layer)), strict=True):
        size = keys[HEAD, TOKEN].abs()
        size = size[codes.order[0, HEAD, 0].long()] if name == "sorted" else size
        # Exponents are stored with a bias of 127, and the mantissa has a sign and an integer bit.
        step = torch.exp2(biased[0, HEAD, slot].float() - 127 - (BLOCKS.mantissa - 2))
        result[name] = size, step.repeat_interleave(BLOCKS.block_channels), relative_error(decoded, keys[HEAD])
    return result


def bfp() -> Figure:
    """Blocks of one key before and after sorting."""
    figure, axes = canvas(2, ["bfp:mantissa=3", "bfp", "bfp:exact_values=true"], sharey=True)
    for panel, (name, (size, step, error)) in zip(axes, bfp_blocks().items(), strict=True):
        panel.bar(range(len(size)), size.tolist(), color=BLUE, label="|number| of one key")
        panel.step(range(len(size)), step / 2, where="mid", color=VERMILION, label="half a step of its block")
        for edge in range(BLOCKS.block_channels, len(size), BLOCKS.block_channels):
            panel.axvline(edge - 0.5, color=ORANGE, linewidth=0.8, linestyle=":")
        panel.set_title(f"channels {name}: error of all keys {error:.4f}")
        panel.set_xlabel("place of the channel; dotted lines part blocks")
    axes[0].set_ylabel("|number| of the key")
    axes[0].set_ylim(0, 8)
    axes[1].legend(loc="upper right")
    return figure


def _box(x: float, y: float, width: float, height: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, fill=False, edgecolor="black", linewidth=1.2)


def _label_positions(axes: Any) -> None:
    """Label the columns of a heat map with positions."""
    columns = range(0, SHOWN.stop - SHOWN.start, 32)
    axes.set_xticks(list(columns), [str(SHOWN.start + column) for column in columns])
