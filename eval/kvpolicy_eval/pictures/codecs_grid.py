"""Pictures of codecs whose point is which numbers share a scale: tokenwise, kivi, gear, bfp."""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from kvpolicy import BFP
from kvpolicy.distortion import coded_layer
from kvpolicy_eval.pictures.common import BLUE, GREY, ORANGE, VERMILION
from kvpolicy_eval.pictures.panels import canvas, heat
from kvpolicy_eval.pictures.tensors import HEAD, after, lost, originals, read

SHOWN = slice(128, 256)
"""Positions that heat maps show."""
TOKENWISE = "tokenwise:bits={}:normalize={}:residual_length=8:block_size=8"
KIVI = "kivi:bits=2:group_size=32:residual_length=32"
GEARS = {"Q alone": ":rank=0:sparse=0", "Q and L": ":sparse=0", "Q, L and S": ""}
"""Parts of GEAR, and the words that leave out the others."""
BLOCKS = BFP(mantissa=4, block_channels=8)
TOKEN = 200
"""The position of the key whose blocks are drawn."""


def normalised_keys() -> Tensor:
    """Keys less the mean of their channel, over its deviation, as tokenwise has fitted them, [positions, D]."""
    codes = after(TOKENWISE.format(4, "true")).codes[0]
    return (originals().keys[HEAD] - codes.channel_zero[0, HEAD].float()) / codes.channel_scale[0, HEAD].float()


def tokenwise_errors() -> dict[bool, list[float]]:
    """Error of keys in 4, 3 and 2 bits, with and without the normaliser."""
    keys = originals().keys[HEAD]
    return {
        normalize: [lost(read(after(TOKENWISE.format(bits, str(normalize).lower())))[0], keys) for bits in (4, 3, 2)]
        for normalize in (False, True)
    }


def tokenwise() -> Figure:
    """Channels before and after the normaliser, and what it saves."""
    figure, (first, second, third) = canvas(
        3, ["tokenwise:bits=2", "tokenwise", "tokenwise:bits=8"], width_ratios=[1.1, 1.1, 1]
    )
    keys = originals().keys[HEAD]
    heat(first, keys[SHOWN], "keys as they are", float(keys.abs().max()), bar="number of a key")
    heat(second, normalised_keys()[SHOWN], "keys, normalised", 4, bar="deviations from mean")
    for ticked in (first, second):
        _positions(ticked)
    for normalize, errors in tokenwise_errors().items():
        places = [at + (0.2 if normalize else -0.2) for at in range(3)]
        color, label = (BLUE, "normalised") if normalize else (GREY, "as they are")
        drawn = third.bar(places, errors, width=0.36, color=color, label=label)
        third.bar_label(drawn, fmt="%.3f", fontsize=7)
    third.set_xticks(range(3), ["4", "3", "2"])
    third.set_xlabel("bits per code")
    third.set_ylabel("relative squared error")
    third.set_title("error of keys")
    third.legend()
    return figure


def kivi_errors() -> dict[str, Tensor]:
    """What keys lose in 2 bits with one scale per 32 tokens of a channel, or per 32 channels of a token."""
    keys = originals().keys[HEAD]
    return {
        "by channel": read(after(KIVI))[0] - keys,
        "by token": read(after(TOKENWISE.format(2, "false")))[0] - keys,
    }


def kivi() -> Figure:
    """Keys, and what two ways to group them lose."""
    figure, axes = canvas(3, ["kivi:bits=2", "kivi:bits=4"])
    keys = originals().keys[HEAD]
    heat(axes[0], keys[SHOWN], "keys; a box is a group", float(keys.abs().max()), bar="number of a key")
    for channel in (4, 12, 20):
        axes[0].add_patch(_box(31.5, channel - 0.5, 32, 1))
    for panel, (name, error) in zip(axes[1:], kivi_errors().items(), strict=True):
        size = lost(error + keys, keys)
        heat(panel, error[SHOWN], f"error {name}: {size:.3f}", 2, bar="error" if panel is axes[2] else "")
    for panel in axes:
        _positions(panel)
    return figure


def gear_errors() -> dict[str, Tensor]:
    """What keys lose, with more and more parts of GEAR."""
    keys = originals().keys[HEAD]
    words = "gear:group_size=32:residual_length=32"
    return {name: read(after(words + left_out))[0] - keys for name, left_out in GEARS.items()}


def gear() -> Figure:
    """Errors with more and more parts."""
    figure, axes = canvas(3, [f"gear{left_out}" for left_out in GEARS.values()])
    keys = originals().keys[HEAD]
    errors = gear_errors()
    limit = float(errors["Q alone"][SHOWN].abs().max())
    for panel, (name, error) in zip(axes, errors.items(), strict=True):
        bar = "|error|, in the keys' own unit" if panel is axes[2] else ""
        title = f"{name}: error {lost(error + keys, keys):.3f}"
        heat(panel, error[SHOWN].abs(), title, limit, signed=False, bar=bar)
        _positions(panel)
    return figure


def bfp_blocks() -> dict[str, tuple[Tensor, Tensor, float]]:
    """One key's channels in the order that is stored, what a mantissa of 1 is worth at each, and the error of all keys.

    A codec of this kind sorts keys and does not sort values, so keys handed to it as values show what sorting does.
    """
    keys = originals().keys
    layer = coded_layer(BLOCKS, keys[None], keys[None])
    codes, slot = layer.codes[0], int((layer.positions[0, HEAD] == TOKEN).nonzero()) - layer.layout.exact
    found: dict[str, tuple[Tensor, Tensor, float]] = {}
    exponents = {"as they are": codes.value_scale, "sorted": codes.key_scale}
    for (name, biased), got in zip(exponents.items(), reversed(read(layer)), strict=True):
        size = keys[HEAD, TOKEN].abs()
        size = size[codes.order[0, HEAD, 0].long()] if name == "sorted" else size
        step = torch.exp2(biased[0, HEAD, slot].float() - 127 - (BLOCKS.mantissa - 2))
        found[name] = size, step.repeat_interleave(BLOCKS.block_channels), lost(got, keys[HEAD])
    return found


def bfp() -> Figure:
    """One key's blocks before and after sorting."""
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


def _positions(axes: Any) -> None:
    """Number a heat map's columns by position."""
    places = range(0, SHOWN.stop - SHOWN.start, 32)
    axes.set_xticks(list(places), [str(SHOWN.start + at) for at in places])
