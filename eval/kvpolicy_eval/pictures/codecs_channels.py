"""Pictures of codecs that store fewer numbers of a vector: think, lowrank and minicache."""

from __future__ import annotations

import torch
from matplotlib.figure import Figure
from torch import Tensor

from kvpolicy.calibration.qfilters import sample_queries
from kvpolicy.codecs import projection
from kvpolicy.codecs._files import load
from kvpolicy.codecs.projection import Basis
from kvpolicy.codecs.shared_directions import angle_between, interpolate, unit_vectors
from kvpolicy_eval.pictures.panels import canvas
from kvpolicy_eval.pictures.style import BLUE, GREY, VERMILION
from kvpolicy_eval.pictures.tensors import HEAD, LAYER, PROMPT, after, embedded, originals

THINK = "think:residual_length=8:block_size=8"
RATIO = 0.4
"""The default fraction of the channels that is not stored."""


def think_scores() -> Tensor:
    """The score of each key channel of each KV head, in descending order, [H, D]; their sum in a head is 1."""
    limits = after(THINK).tensors.limits
    assert limits is not None
    scores = limits.statistics[0][0] * originals().keys.square().mean(1)
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


def variance() -> dict[str, Tensor]:
    """The share of the variance of a head's keys and values in the first n directions, for n from 0 to D."""
    tensors = load("tiny", "lowrank").tensors
    parts = {"values": "values", "unrotated keys": "keys.pre", "rotated keys": "keys.post"}
    shares: dict[str, Tensor] = {}
    for name, part in parts.items():
        energy = tensors[f"{part}.energy.{LAYER}"][HEAD]
        shares[name] = torch.cat([torch.zeros(1), (energy / energy.sum()).cumsum(0)])
    return shares


def score_errors() -> dict[str, Tensor]:
    """The squared error of products of a head's queries and keys, over that of their mean over keys, by rank."""
    model, ids = embedded()
    of_heads = sample_queries(model, [ids[0, :PROMPT]], tokens=PROMPT)[LAYER].unflatten(0, (len(originals().keys), -1))
    queries = of_heads[HEAD].flatten(0, 1)
    keys = originals().keys[HEAD]
    scores = queries @ keys.mT
    size = (scores - scores.mean(-1, keepdim=True)).square().mean()
    errors: dict[str, Tensor] = {}
    for basis in ("keys", "scores"):
        found: list[Tensor] = []
        for rank in range(1, keys.shape[-1] + 1):
            of_keys = projection.of_keys(Basis("tiny", kind=basis), rank, LAYER, "cpu", slice(HEAD, HEAD + 1))
            decoded = of_keys.decoded(of_keys.latents(keys[None, None]))[0, 0]
            found.append((queries @ decoded.mT - scores).square().mean() / size)
        errors[basis] = torch.stack(found)
    return errors


def lowrank() -> Figure:
    """Variance in the first directions, and the error of scores by the number of directions."""
    figure, (first, second) = canvas(2, ["lowrank", "lowrank/tokenwise", "lowrank/kivi"])
    for (name, shares), color in zip(variance().items(), (GREY, BLUE, VERMILION), strict=True):
        first.plot(torch.arange(len(shares)), shares, color=color, label=name)
    first.set_xlabel("directions")
    first.set_ylabel("share of the variance")
    first.set_title("directions of a head")
    first.legend(loc="lower right")
    for (name, errors), color in zip(score_errors().items(), (BLUE, VERMILION), strict=True):
        second.plot(torch.arange(1, len(errors) + 1), errors, color=color, label=f"basis={name}")
    second.set_ylim(0, None)
    second.set_xlabel("directions of rotated keys")
    second.set_ylabel("squared error of scores")
    second.set_title("scores of held-out text")
    second.legend(loc="upper right")
    return figure


def angles() -> dict[str, list[Tensor]]:
    """Angles between the directions of all tokens and heads in a layer and in the next one, in degrees, by layer."""
    count = embedded()[0].config.num_hidden_layers
    found: dict[str, list[Tensor]] = {"keys": [], "values": []}
    for layer in range(1, count):
        before = originals(layer - 1)
        here = originals(layer)
        for name, one, other in (("keys", before.keys, here.keys), ("values", before.values, here.values)):
            found[name].append(angle_between(unit_vectors(one)[0], unit_vectors(other)[0]).rad2deg().flatten())
    return found


def arc_errors(steps: int = 20) -> dict[str, Tensor]:
    """The relative squared error of keys in both layers of the pair that ends with `LAYER`, by the place on the arc."""
    pair = [unit_vectors(originals(layer).keys) for layer in (LAYER - 1, LAYER)]
    errors: dict[str, list[Tensor]] = {"first layer": [], "second layer": []}
    for step in range(steps + 1):
        shared = interpolate(pair[0][0], pair[1][0], step / steps)
        for name, (direction, norm) in zip(errors, pair, strict=True):
            lost = ((shared - direction) * norm).square().sum()
            errors[name].append(lost / norm.square().sum())
    return {name: torch.stack(each) for name, each in errors.items()}


def minicache() -> Figure:
    """Angles between neighboring layers, and the error of both layers by the place of the direction."""
    figure, (first, second) = canvas(2, ["minicache:start=0", "tokenwise:bits=8", "tokenwise"])
    for (name, each), color, shift in zip(angles().items(), (BLUE, VERMILION), (-0.12, 0.12), strict=True):
        at = torch.arange(1, len(each) + 1) + shift
        low, middle, high = torch.stack([some.quantile(torch.tensor([0.05, 0.5, 0.95]).double()) for some in each]).mT
        first.vlines(at, low, high, color=color, linewidth=1)
        first.plot(at, middle, "o", markersize=4, color=color, label=name)
    first.axhline(90, color=GREY, linewidth=0.8, linestyle=":")
    first.set_ylim(0, None)
    first.set_xlabel("layer, with the one before it")
    first.set_ylabel("angle (degrees)")
    first.set_title("angles of all tokens and heads")
    first.legend(loc="lower right")
    for (name, errors), color in zip(arc_errors().items(), (BLUE, VERMILION), strict=True):
        second.plot(torch.linspace(0, 1, len(errors)), errors, color=color, label=name)
    second.axvline(0.6, color=GREY, linewidth=1, label="default")
    second.set_xlim(0, 1)
    second.set_ylim(0, None)
    second.set_xlabel("t, from the first layer to the second")
    second.set_ylabel("squared error of keys\nover squared norm")
    second.set_title(f"layers {LAYER - 1} and {LAYER}")
    second.legend(loc="upper center")
    return figure
