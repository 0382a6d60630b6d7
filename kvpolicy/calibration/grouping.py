"""Groups of layers that are similar enough to share a dictionary."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs.csr.sparse import unit
from kvpolicy.text.errors import KVPolicyError


class Directions(NamedTuple):
    """The vectors of a layer as unit vectors, and their moments, which can be added up for two layers.

    Attributes:
        vectors: [n, D] fp32.
        total: Their sum, [D] fp64.
        moment: The sum of their outer products, [D, D] fp64.
    """

    vectors: Tensor
    total: Tensor
    moment: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Directions:
        """The directions of vectors [H, n, D], all heads together."""
        vectors = unit(x.flatten(0, 1))
        return cls(vectors, vectors.double().sum(0), vectors.double().mT @ vectors.double())


def divergence(a: Directions, b: Directions, bins: int = 200) -> float:
    """The Jensen-Shannon divergence of two layers, from 0 (equal distributions) to 1 (disjoint ones).

    The unit vectors of both layers are projected onto the two principal directions of their union, and counted in a
    histogram of `bins` times `bins` bins over the joint range. With few vectors per bin, layers appear more different
    than they are, and fewer share a dictionary.
    """
    count = len(a.vectors) + len(b.vectors)
    mean = (a.total + b.total) / count
    spread = (a.moment + b.moment) / count - torch.outer(mean, mean)
    # `eigh` sorts eigenvalues in ascending order, so the principal directions are the last columns.
    axes = torch.linalg.eigh(spread).eigenvectors[:, -2:].float()
    flat = [each.vectors @ axes for each in (a, b)]
    least = torch.minimum(flat[0].amin(0), flat[1].amin(0))
    width = (torch.maximum(flat[0].amax(0), flat[1].amax(0)) - least).clamp_min(1e-12) / bins
    cells = [((each - least) / width).long().clamp(0, bins - 1) for each in flat]
    # The last column, not the second: with one channel there is only one direction.
    p, q = (
        torch.bincount(each[:, 0] * bins + each[:, -1], minlength=bins * bins).double() / len(each) for each in cells
    )
    middle = (p + q) / 2
    nats = sum((torch.xlogy(each, each) - torch.xlogy(each, middle)).sum() / 2 for each in (p, q))
    return max(float(nats) / math.log(2), 0.0)


def group_layers(
    layers: Sequence[int], between: Callable[[int, int], float], pair: float = 0.2, chain: float = 1.0
) -> list[list[int]]:
    """Group neighboring layers from left to right, as long as they are similar.

    Args:
        layers: Indices of the layers, in ascending order.
        between: The divergence of two layers.
        pair: The maximum divergence of any two layers of a group.
        chain: The maximum sum of the divergences of neighbors in a group.

    Examples:
        >>> group_layers([0, 1, 2, 3], lambda a, b: 0.0 if a else 1.0)
        [[0], [1, 2, 3]]
    """
    groups: list[list[int]] = []
    length = 0.0
    for layer in layers:
        step = between(groups[-1][-1], layer) if groups else 0.0
        if groups and length + step <= chain and all(between(other, layer) <= pair for other in groups[-1]):
            groups[-1].append(layer)
            length += step
        else:
            groups.append([layer])
            length = 0.0
    return groups


def parse_groups(text: str, layers: Sequence[int]) -> list[list[int]]:
    """Parse groups such as `0,1,2-4`; `each` is one group per layer and `all` a single group.

    Raises:
        KVPolicyError: If a layer is missing, duplicate or unknown.

    Examples:
        >>> parse_groups("0,1-3", [0, 1, 2, 3])
        [[0], [1, 2, 3]]
    """
    if text in ("each", "all"):
        return [[layer] for layer in layers] if text == "each" else [list(layers)]
    groups: list[list[int]] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None:
            raise KVPolicyError(
                f"A group of layers must be a number or a range, got {part!r}; try 0,1,2-4, or auto, each or all."
            )
        first = int(match[1])
        last = int(match[2] or match[1])
        groups.append([layer for layer in layers if first <= layer <= last])
    if sorted(layer for group in groups for layer in group) != sorted(layers) or not all(groups):
        raise KVPolicyError(
            f"The groups must contain each of the layers {', '.join(map(str, layers))} once, got {text}; try auto, "
            "each or all."
        )
    return groups
