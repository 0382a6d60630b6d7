"""How many directions each layer has, for its keys and for its values: a total divided over them, or a file."""

from __future__ import annotations

import heapq
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from kvpolicy.codecs._files import CalibrationFile
from kvpolicy.codecs.projection import Basis, energies, fisher_of
from kvpolicy.protocols import ModelInfo
from kvpolicy.text.budget import waterfill
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.formats import check_format, expanded
from kvpolicy.text.model_file import parse_json
from kvpolicy.text.tables import shorten

FORMAT = 1
"""Version of the format of a file of ranks; newer ones are refused."""

SAME = "same"
DIVIDED = ("energy", "threshold", "fisher")
"""Names of the divisions; what is neither `same` nor one of them is a file."""


class Ranks(NamedTuple):
    """Directions of a layer.

    Attributes:
        keys: Of keys.
        values: Of values.
    """

    keys: int
    values: int


def divided(file: CalibrationFile, basis: Basis, how: str, total: int, step: int, model: ModelInfo) -> dict[int, Ranks]:
    """Divide directions over the layers under the policy, and over keys and values.

    Args:
        file: What `basis` reads, so that a calibration that has changed is divided again.
        basis: The calibrated directions.
        how: `energy`, `threshold` or `fisher`.
        total: Directions of all layers together, in steps.
        step: Directions of each head that are given at a time; it divides the head dimension.
        model: The model.

    Raises:
        KVPolicyError: If the calibration lacks what is divided by.
    """
    return dict(zip(model.indices, _divided(file, basis, how, total, step, model.indices, model.head_dim), strict=True))


@lru_cache(maxsize=16)
def _divided(
    file: CalibrationFile, basis: Basis, how: str, total: int, step: int, layers: tuple[int, ...], head_dim: int
) -> tuple[Ranks, ...]:
    if how == "fisher":
        weights = [fisher_of(basis.folder, layer_idx) for layer_idx in layers]
        found = by_weight(
            torch.tensor(weights, dtype=torch.float64, device="cpu").flatten().sqrt(), total, head_dim // step
        )
    else:
        sides = [side for layer_idx in layers for side in energies(basis, layer_idx)]
        shares = torch.stack([_shares(energy, step * basis.group) for energy in sides])
        found = (least_energy if how == "energy" else equal_energy)(shares, total)
    return tuple(Ranks(step * keys, step * values) for keys, values in zip(found[::2], found[1::2], strict=True))


def _shares(energy: Tensor, size: int) -> Tensor:
    """The share of the energy [H, D] of all heads in each `size` directions, [D / size], falling."""
    along = energy.sum(0).unflatten(0, (-1, size)).sum(-1)
    return along / along.sum().clamp_min(torch.finfo(along.dtype).tiny)


def least_energy(shares: Tensor, total: int) -> list[int]:
    """Divide directions so that the shares of the energy that are left out have the least sum.

    Args:
        shares: The share of its energy that each side of a layer has in each direction, [M, R], falling in a row. A
            direction may stand for several.
        total: Directions in all, from M to M * R.

    Returns:
        Directions of each side, at least one; ties go to the earlier side.

    Examples:
        >>> least_energy(torch.tensor([[0.5, 0.3, 0.2], [0.9, 0.1, 0.0]]), 4)
        [3, 1]
    """
    sides, directions = shares.shape
    # A share falls along a row, so that the largest ones of a row are its first ones.
    largest = shares[:, 1:].flatten().sort(descending=True, stable=True).indices[: total - sides]
    return [1 + n for n in (largest // max(directions - 1, 1)).bincount(minlength=sides).tolist()]


def equal_energy(shares: Tensor, total: int) -> list[int]:
    """Divide directions so that the least share of the energy that a side keeps is the largest.

    Each direction goes to the side that keeps the least so far; see `least_energy` for the arguments.

    Examples:
        >>> equal_energy(torch.tensor([[0.5, 0.3, 0.2], [0.9, 0.1, 0.0]]), 4)
        [3, 1]
        >>> equal_energy(torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.4, 0.2]]), 4)
        [2, 2]
    """
    sides, directions = shares.shape
    kept = cast("list[list[float]]", shares.cumsum(-1).tolist())  # pyright: ignore[reportUnknownMemberType]
    found = [1] * sides
    least = [(kept[side][0], side) for side in range(sides)] if directions > 1 else []
    heapq.heapify(least)
    for _ in range(total - sides):
        _, side = heapq.heappop(least)
        found[side] += 1
        if found[side] < directions:
            heapq.heappush(least, (kept[side][found[side] - 1], side))
    return found


def by_weight(weights: Tensor, total: int, most: int) -> list[int]:
    """Divide directions in proportion to weights, at least one and at most `most` each.

    Args:
        weights: [M] fp64, at least 0.
        total: Directions in all, from M to M * `most`.
        most: The most directions of a side.

    Examples:
        >>> by_weight(torch.tensor([1.0, 2.0, 9.0]), 12, 6)
        [2, 4, 6]
    """
    target = weights.double() * (total / weights.double().sum().clamp_min(1e-300))
    return [
        int(n)
        for n in waterfill(target[None], torch.tensor([total], device="cpu"), 1, torch.tensor([most], device="cpu"))[0]
    ]


def load_ranks(path: str, model: ModelInfo) -> dict[int, Ranks]:
    """Read the ranks of every layer under the policy from a file.

    The file is JSON, with the ranks of every layer of the model; those of layers without the policy are not read:

        {"keys": [12, 20, 16], "values": [24, 28, 20]}

    Args:
        path: The file.
        model: The model.

    Raises:
        KVPolicyError: If it cannot be read, is no such file, or a rank is out of range.
    """
    what = f"The file of ranks {shorten(repr(path))}"
    try:
        blob = expanded(path).read_bytes()
    except OSError as error:
        raise KVPolicyError(
            f"LowRank.ranks must be same, {', '.join(DIVIDED)} or a file, got {shorten(repr(path))}, which cannot be "
            f"read ({error.strerror}); try energy."
        ) from error
    # Content that is no object has no ranks, as the loop says.
    content = parse_json(blob, what, 'try {"keys": [16], "values": [16]}')
    if not isinstance(content, dict):
        content = {}
    check_format(cast("dict[str, Any]", content), FORMAT, what)
    # Every layer has a rank, but only those under the policy are checked: others need none.
    for side in ("keys", "values"):
        ranks = content.get(side)
        if not isinstance(ranks, list) or len(cast("list[Any]", ranks)) != model.depth:
            got = f"{len(cast('list[Any]', ranks))} ranks" if isinstance(ranks, list) else "none"
            raise KVPolicyError(
                f"{what} must have a list of {side} with a rank for each of the model's {model.depth} layers, got "
                f"{got}."
            )
        for index in model.indices:
            rank: Any = ranks[index]
            if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= model.head_dim:
                raise KVPolicyError(
                    f"A rank in {shorten(repr(path))} must be an integer from 1 to {model.head_dim}, got {rank!r} for "
                    f"the {side} of layer {index}."
                )
    return {index: Ranks(content["keys"][index], content["values"][index]) for index in model.indices}
