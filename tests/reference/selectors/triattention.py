"""Tokens that the mean query of a head will look at, from the places where it will stand."""

from __future__ import annotations

import functools
import math

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..coding import Config, Rotation
from ._common import kept_if_newest
from ._look import Look

DEFAULTS: Config = {"file": "", "reach": 65536, "every": 128, "of_group": "max", "normalize": False}
"""Without a file, all tokens are worth the same."""
SMALL = "triattention:file=FOLDER/triattention/centers.safetensors:reach=20:every=5"


def rerank_every(config: Config) -> int:
    """After how many generated tokens all are ranked again."""
    return config["every"]


def priority(config: Config, position: int, score: complex, length: int, budget: int) -> float:
    """The newest stays, then what was not ranked yet; a score's imaginary part says that it was."""
    return kept_if_newest(score.real if score.imag else 1e7 + position, position, length, 1)


def scores_of_tokens(config: Config, look: Look) -> list[complex]:
    """The products with the mean query at each distance ahead, and what its length alone says."""
    if not config["file"]:
        return [complex(0, 1)] * len(look.positions)
    group = len(look.queries)
    scores = [_scores(config, look, look.head * group + number) for number in range(group)]
    if config["normalize"]:
        scores = [_normalized(row) for row in scores]
    columns = zip(*scores, strict=True)
    return [complex(max(x) if config["of_group"] == "max" else sum(x) / group, 1) for x in columns]


def _scores(config: Config, look: Look, hq: int) -> list[float]:
    mean, lengths = centers(config["file"], look.layer, hq)
    ahead = [2**power for power in range(64) if 2**power <= config["reach"]]
    places = [look.apply(mean, look.length + distance).double() for distance in ahead]
    planes = planes_of(look.apply, len(mean))
    still = _lengths(look.apply(mean, 0).double(), planes)
    spread = [(lengths[f % len(lengths)] - still[f]) for f in range(len(planes))]
    found = []
    for key in look.keys:
        vector = torch.tensor(key, dtype=torch.float64)
        expected = sum(float(place @ vector) for place in places) / len(places)
        found.append(expected + sum(a * b for a, b in zip(spread, _lengths(vector, planes), strict=True)))
    return found


def _lengths(vector: Tensor, planes: list[list[int]]) -> list[float]:
    return [math.sqrt(sum(float(vector[channel]) ** 2 for channel in plane)) for plane in planes]


def _normalized(row: list[float]) -> list[float]:
    mean = sum(row) / len(row)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in row) / len(row))
    return [(x - mean) / max(deviation, 1e-6) for x in row]


@functools.lru_cache(maxsize=64)
def planes_of(apply: Rotation, dim: int) -> list[list[int]]:
    """The channels that a rotation mixes: pairs of them, or all where each moves on to the next one."""
    turned = [apply(torch.eye(dim)[i], 1).tolist() for i in range(dim)]
    mixed = [[j for j in range(dim) if j != i and turned[i][j] != 0] for i in range(dim)]
    if any(turned[i][j] == 1 for i in range(dim) for j in mixed[i]):
        return [[*range(dim)]]
    return [[i, *others] for i, others in enumerate(mixed) if others and i < others[0]]


@functools.cache
def centers(file: str, layer: int, hq: int) -> tuple[Tensor, list[float]]:
    """The mean query of a head in a file and its lengths, which all heads of a layer may share."""
    found = load_file(file)
    mean = found[f"centers.{layer}.mean"]
    lengths = found[f"centers.{layer}.lengths"]
    return mean[hq % len(mean)], lengths[hq % len(lengths)].tolist()
