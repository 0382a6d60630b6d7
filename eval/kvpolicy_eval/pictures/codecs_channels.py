"""The picture of think, a codec that stores fewer channels of keys."""

from __future__ import annotations

import torch
from matplotlib.figure import Figure
from torch import Tensor

from kvpolicy_eval.pictures.panels import canvas
from kvpolicy_eval.pictures.style import BLUE, GREY, VERMILION
from kvpolicy_eval.pictures.tensors import HEAD, after, originals

THINK = "think:residual_length=8:block_size=8"
RATIO = 0.4
"""The default fraction of the channels that is not stored."""


def think_scores() -> Tensor:
    """The score of each key channel of each KV head, in descending order, [H, D]; their sum in a head is 1."""
    limits = after(THINK).tensors.limits
    assert limits is not None
    scores = limits.query_square[0] * originals().keys.square().mean(1)
    return (scores / scores.sum(-1, keepdim=True)).sort(-1, descending=True).values


def think_lost() -> Tensor:
    """The share of the scores of a head in its n lowest channels, for n from 0 to D, [H, D + 1]."""
    lowest = think_scores().flip(-1).cumsum(-1)
    return torch.cat([torch.zeros_like(lowest[:, :1]), lowest], -1)


def think() -> Figure:
    """Scores of channels, and how much of them is in the channels that are not stored."""
    figure, (first, second) = canvas(2, ["think", "think/tokenwise", "think/kivi"])
    scores = think_scores()[HEAD]
    dim = len(scores)
    stored = torch.arange(dim) < dim - int(RATIO * dim)
    for mask, color, label in ((stored, BLUE, "stored"), (~stored, VERMILION, "not stored")):
        first.bar(torch.arange(dim)[mask], scores[mask], width=0.8, color=color, label=label)
    first.set_yscale("log")
    first.set_xlabel("channels of keys, by their score")
    first.set_ylabel("share of all scores")
    first.set_title("score of each channel of a head")
    first.legend(loc="upper right")
    fractions = torch.linspace(0, 1, dim + 1)
    for head, lost in enumerate(think_lost()):
        if head != HEAD:
            second.plot(fractions, lost, color=GREY, linewidth=0.8)
    second.plot(fractions, think_lost()[HEAD], color=BLUE, label="the head on the left")
    second.axvline(RATIO, color=VERMILION, linewidth=1, label="default")
    second.axline((0, 0), slope=1, color=GREY, linewidth=0.8, linestyle=":", label="any channels")
    second.set_xlim(0, 1)
    second.set_ylim(0, 1)
    second.set_xlabel("fraction of channels not stored")
    second.set_ylabel("share of all scores in them")
    second.set_title("heads of the layer")
    second.legend(loc="upper left")
    return figure
