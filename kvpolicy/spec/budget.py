"""The arithmetic of budgets: their words, their bytes, and their division among layers."""

from __future__ import annotations

import math
import re
from typing import cast

import torch
from torch import Tensor

from kvpolicy.spec.errors import KVPolicyError, KVPolicyTypeError

Budget = float | int | str
"""A share of the prompt (float), tokens per layer on average (int), or bytes of the whole cache (`"512MiB"`)."""

_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = _DECIMAL | {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SHARE = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e-?[0-9]+)?")
_TOKENS = re.compile(r"[0-9]{1,1000}")
_BYTES = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)([A-Za-z]+)")
_HOW = "give a share of the prompt in (0, 1] such as 0.2, tokens such as 2048, or bytes such as 512MiB"
_NEAR = 1e-9  # fractional tokens closer than this are equal


def parse_budget(text: str) -> Budget:
    """Read a budget; how it is written decides what it means.

    Args:
        text: `0.2` (share), `2048` (tokens), `512MiB` (bytes). `1` is one token and `1.0` is everything.

    Raises:
        KVPolicyError: Where it is none of these, or out of range.

    Examples:
        >>> parse_budget("0.2"), parse_budget("2048"), parse_budget("1.5GiB")
        (0.2, 2048, '1.5GiB')
    """
    if _TOKENS.fullmatch(text):
        return check_budget(int(text))
    if _SHARE.fullmatch(text):
        return check_budget(float(text))
    bytes_of(text)
    return text


def check_budget(budget: object) -> Budget:
    """The budget itself, as a plain float, int or str.

    Raises:
        KVPolicyTypeError: Where it is of another type.
        KVPolicyError: Where it is out of range.
    """
    if isinstance(budget, bool) or not isinstance(budget, float | int | str):
        raise KVPolicyTypeError(f"The budget {budget!r} is of type {type(budget).__name__}: {_HOW}.")
    if isinstance(budget, str):
        return parse_budget(budget)
    if isinstance(budget, float):
        if not 0 < budget <= 1:
            raise KVPolicyError(f"The share {budget!r} is not in (0, 1]: {_HOW}.")
        return float(budget)
    if not 1 <= budget < 10**18:
        raise KVPolicyError(f"The budget of {budget} tokens is out of range: {_HOW}.")
    return int(budget)


def format_budget(budget: Budget) -> str:
    """Write a budget so that `parse_budget` reads it back.

    Examples:
        >>> format_budget(1.0), format_budget(1)
        ('1.0', '1')
    """
    return budget if isinstance(budget, str) else repr(budget)


def bytes_of(text: str) -> int:
    """How many bytes `512MiB` and the like are, rounded down.

    Raises:
        KVPolicyError: Where it is not an amount of bytes.

    Examples:
        >>> bytes_of("1.5KiB"), bytes_of("2MB")
        (1536, 2000000)
    """
    match = _BYTES.fullmatch(text)
    if match is None:
        raise KVPolicyError(f"The budget {text!r} is not understood: {_HOW}.")
    number, unit = match.groups()
    if unit not in _UNITS:
        raise KVPolicyError(f"The budget {text!r} has the unknown unit {unit!r}: use {', '.join(_UNITS)}.")
    whole, _, part = number.partition(".")
    amount = int(whole + part) * _UNITS[unit] // 10 ** len(part)  # in integers, because floats lose large amounts
    if amount < 1:
        raise KVPolicyError(f"The budget {text!r} keeps nothing: {_HOW}.")
    return amount


def waterfill(target: Tensor, total: Tensor, floor: int, ceiling: Tensor) -> Tensor:
    """Whole tokens per layer, near fractional targets and inside bounds.

    Every layer gets its target times one common factor, clamped to the bounds; so what a layer cannot use goes to the
    layers that can, in proportion to their targets. Where there is more than all layers can use, each gets the most
    it can use and the surplus is split evenly on top.

    Args:
        target: Tokens each layer should get, [B, L] fp64, at least 0; rows sum to `total`.
        total: Tokens of all layers together, [B] int64.
        floor: Fewest tokens of a layer.
        ceiling: Most tokens that a layer of each row can use, [B] int64.

    Returns:
        [B, L] int64; rows sum to `total` exactly, and no row depends on another.

    Raises:
        KVPolicyError: Where `total` is less than the layers' floors together.

    Examples:
        >>> waterfill(torch.tensor([[8.0, 4.0, 0.0]]), torch.tensor([12]), 1, torch.tensor([6])).tolist()
        [[6, 5, 1]]
    """
    targets = cast("list[list[float]]", target.tolist())  # pyright: ignore[reportUnknownMemberType]
    totals, ceilings = _ints(total), _ints(ceiling)
    filled = [_fill_row(*row, floor) for row in zip(targets, totals, ceilings, strict=True)]
    return torch.tensor(filled, dtype=torch.int64, device=target.device).reshape(target.shape)


def _ints(values: Tensor) -> list[int]:
    return cast("list[int]", values.tolist())  # pyright: ignore[reportUnknownMemberType]


def _fill_row(target: list[float], total: int, ceiling: int, floor: int) -> list[int]:
    # Plain floats, row by row: a vectorised sum may round a row differently next to other rows.
    layers = len(target)
    if total >= layers * ceiling:
        each, odd = divmod(total - layers * ceiling, layers)
        return [ceiling + each + (index < odd) for index in range(layers)]
    if total < layers * floor:
        raise KVPolicyError(
            f"A budget of {total} tokens over {layers} layers is too small: "
            f"every layer needs {floor}, so give at least {layers * floor}."
        )
    return _round(_fractions(target, total, floor, ceiling), total, ceiling)


def _fractions(target: list[float], total: int, floor: int, ceiling: int) -> list[float]:
    """Fractional tokens per layer: `factor * target`, clamped, with the one factor that makes the sum right."""
    result = [0.0] * len(target)
    free = set(range(len(target)))
    rest = float(total)
    while free:
        mass = math.fsum(target[index] for index in free)
        for index in free:
            result[index] = rest * target[index] / mass if mass > 0 else rest / len(free)
        excess = math.fsum(min(max(result[index], floor), ceiling) - result[index] for index in free)
        # Clamping gave away more than it took, so the factor can only fall: what is below the floor is settled.
        settled = {i for i in free if (result[i] < floor if excess > 0 else result[i] > ceiling)}
        if not settled:  # nothing is out of bounds, but perhaps what just balances
            return [min(max(value, float(floor)), float(ceiling)) for value in result]
        for index in settled:
            result[index] = float(floor if excess > 0 else ceiling)
        rest -= math.fsum(result[index] for index in settled)
        free -= settled
    return result


def _round(values: list[float], total: int, ceiling: int) -> list[int]:
    """Whole numbers that sum to `total`, by largest remainder; ties go to the lower index."""
    whole = [math.floor(value + _NEAR) for value in values]
    # rounded, so that remainders which are equal but for arithmetic noise are a tie
    order = sorted(range(len(values)), key=lambda index: (-round(values[index] - whole[index], 9), index))
    missing = total - sum(whole)
    for index in [index for index in order if whole[index] < ceiling][:missing]:
        whole[index] += 1
    assert sum(whole) == total, "the layers' shares must sum to the total"
    return whole
