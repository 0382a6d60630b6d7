"""Pictures of codecs, drawn from keys and values of the embedded model as the codec reconstructs them."""

from __future__ import annotations

from functools import partial

import torch
from matplotlib.figure import Figure

from kvpolicy import registry
from kvpolicy_eval.common.codecs import short_windows, with_ranking
from kvpolicy_eval.pictures.codecs_channels import lowrank, minicache, think
from kvpolicy_eval.pictures.codecs_grid import bfp, gear, kivi, tokenwise
from kvpolicy_eval.pictures.codecs_levels import csr, kvquant, rotate, turboquant
from kvpolicy_eval.pictures.codecs_tiers import mikv, plain, staircase, zipcache
from kvpolicy_eval.pictures.panels import canvas
from kvpolicy_eval.pictures.style import BLUE, ORANGE, Draw
from kvpolicy_eval.pictures.tensors import HEAD, after, originals, read, relative_error_of_each

_OWN: dict[str, Draw] = {
    "plain": plain,
    "tokenwise": tokenwise,
    "kivi": kivi,
    "gear": gear,
    "kvquant": kvquant,
    "rotate": rotate,
    "turboquant": turboquant,
    "bfp": bfp,
    "staircase": staircase,
    "csr": csr,
    "mikv": mikv,
    "zipcache": zipcache,
    "think": think,
    "lowrank": lowrank,
    "minicache": minicache,
}


def picture(name: str) -> Figure:
    """Errors of the keys and of the values by position, for a codec with its defaults."""
    policy = with_ranking(short_windows(name))
    layer = after(policy)
    held = originals()
    keys = held.unrotated if layer.spec.codec.traits.key_space == "unrotated" else held.keys
    figure, (axes,) = canvas(1, [name])
    sides = zip(("keys", "values"), (BLUE, ORANGE), read(layer), (keys, held.values), strict=True)
    for label, color, decoded, original in sides:
        error = relative_error_of_each(decoded, original[HEAD])
        shown = torch.arange(0, len(error), 3)  # with all of them, markers would overlap
        axes.scatter(shown, error[shown], s=10, color=color, label=label)
    axes.set_yscale("log")
    axes.set_xlabel("position (tokens)")
    axes.set_ylabel("squared error\nover squared norm")
    axes.set_title(f"{policy}: errors of every third encoded token")
    axes.legend(ncols=2)
    return figure


PICTURES: dict[str, Draw] = {name: _OWN.get(name, partial(picture, name)) for name in registry.CODECS}
"""Pictures by the name of the codec."""
