"""Budgets: how they are written, what they mean in bytes, how they are divided among layers, and sizes of pages.

A layer stores its tokens in pages if its heads have budgets of their own.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from numbers import Integral, Real
from typing import cast

import torch
from torch import Tensor

from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.tables import shorten

SMALLEST_PAGE = 4
LARGEST_PAGE = 64
PAGES_PER_HEAD = 8
"""Pages that a head should have on average, so that its budget can come close to what the allocator wants."""


def page_size(tokens: int) -> int:
    """Slots of a page in a row with `tokens` tokens in an average head.

    Examples:
        >>> [page_size(tokens) for tokens in (3, 40, 100, 500, 10_000)]
        [4, 4, 8, 32, 64]
    """
    size = LARGEST_PAGE
    while size > SMALLEST_PAGE and tokens // size < PAGES_PER_HEAD:
        size //= 2
    return size


def fewest_tokens(tokens: int) -> int:
    """The smallest budget of a layer that gives an average head at least `tokens` tokens in whole pages.

    Examples:
        >>> [fewest_tokens(tokens) for tokens in (1, 5, 65)]
        [4, 8, 72]
    """
    while tokens % page_size(tokens):
        tokens += 1
    return max(tokens, SMALLEST_PAGE)


@dataclass(frozen=True, slots=True)
class Share:
    """A fraction of the prompt as a budget, with a least number of tokens, so that short prompts keep enough of theirs.

    A layer keeps `max(fraction * prompt, least)` tokens of each row on average, and never more than there are. A prompt
    of which the fraction is less than `least` is thus treated as under the budget `least` in tokens, and a longer one
    as under the fraction.

    Args:
        fraction: The fraction of the prompt, in (0, 1].
        least: The least number of tokens per layer on average, from 1.

    Raises:
        KVPolicyTypeError: If `fraction` is no float, or `least` no integer.
        KVPolicyError: If one of them is out of range.

    Examples:
        >>> str(Share(0.2, least=1024)), parse_budget("20%:least=1024") == Share(0.2, least=1024)
        ('0.2:least=1024', True)
        >>> Share(0.2, least=1024).of_prompt(42), Share(0.2, least=1024).of_prompt(10_000)
        (1024, 0.2)
    """

    fraction: float
    least: int

    def __post_init__(self) -> None:
        """Check and convert both numbers."""
        if isinstance(self.fraction, Integral) or not isinstance(self.fraction, Real):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise KVPolicyTypeError(_no_fraction(repr(self.fraction)))
        if isinstance(self.least, bool) or not isinstance(self.least, Integral):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise KVPolicyTypeError(_no_least(f"{self.least!r} of type {type(self.least).__name__}"))
        if not 1 <= self.least < _MAX_TOKENS:
            raise KVPolicyError(_no_least(str(self.least)))
        object.__setattr__(self, "fraction", check_budget(float(self.fraction)))
        object.__setattr__(self, "least", int(self.least))

    def of_prompt(self, tokens: int) -> float | int:
        """The plain budget that this one is for a prompt of so many tokens: `least`, or the fraction if it is more."""
        return self.least if int(tokens * self.fraction + EPSILON) < self.least else self.fraction

    def __str__(self) -> str:
        """The budget as a spec has it."""
        return f"{self.fraction!r}:{_LEAST}{self.least}"


Budget = float | int | str | Share
"""A fraction of the prompt (float, or `Share` with a least number of tokens), tokens per layer on average (int), or
bytes of the whole cache (`"512MiB"`)."""

EPSILON = 1e-9
"""Added before rounding down, so that a fraction such as 0.29 of 100 tokens is 29, and not 28.999..."""

_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = _DECIMAL | {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_THOUSANDS = ("k", "K", "m", "M")  # of a number of tokens, such as 2k, which a budget does not take
_FRACTION = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e-?[0-9]+)?")
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})\s*%")
_TOKENS = re.compile(r"[0-9]{1,1000}")
_BYTES = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]+)")
_MAX_TOKENS = 10**18
_LEAST = "least="
_TOLERANCE = 1e-9  # fractional tokens that differ by less are equal


def parse_budget(text: str) -> Budget:
    """Read a budget; the way it is written decides its type.

    Args:
        text: `0.2` or `20%` (a fraction), `2048` (tokens) or `512MiB` (bytes). `1` is one token and `1.0` is the whole
            prompt. A fraction may have a least number of tokens, as in `0.2:least=1024`.

    Raises:
        KVPolicyError: If it is none of these, or out of range.

    Examples:
        >>> parse_budget("0.2"), parse_budget("2048"), parse_budget("1.5GiB")
        (0.2, 2048, '1.5GiB')
        >>> parse_budget("20%"), parse_budget("512 MiB")
        (0.2, '512MiB')
        >>> parse_budget("0.2:least=1024")
        Share(fraction=0.2, least=1024)
    """
    text, colon, option = text.strip().partition(":")
    return _with_least(parse_budget(text), option, text) if colon else _parse_plain(text)


def _with_least(plain: Budget, option: str, text: str) -> Share:
    """The budget of a spec with an option, `text:option`."""
    name, equals, number = (part.strip() for part in option.partition("="))
    if name != "least" or not equals:
        raise KVPolicyError(
            f"The option of a budget must be least=TOKENS, got {shorten(option.strip())!r}; try 0.2:least=1024."
        )
    if not isinstance(plain, float):
        raise KVPolicyError(_no_fraction(shorten(text.strip())))
    if not _TOKENS.fullmatch(number):
        raise KVPolicyError(_no_least(repr(shorten(number))))
    return Share(plain, int(number))


def _parse_plain(text: str) -> Budget:
    """Read a budget without options."""
    text = text.strip()
    if _TOKENS.fullmatch(text):
        return check_budget(int(text))
    if _FRACTION.fullmatch(text):
        return check_budget(float(text))
    percent = _PERCENT.fullmatch(text)
    if percent is not None:
        return check_budget(float(Decimal(percent[1]) / 100))  # in decimals: 12.3 / 100 is not the float 0.123
    bytes_of(text)
    return "".join(text.split())


def check_budget(budget: object) -> Budget:
    """The budget as a plain float, int or str, or a `Share`; scalars of NumPy are converted.

    Raises:
        KVPolicyTypeError: If it is of another type.
        KVPolicyError: If it is out of range.

    Examples:
        >>> check_budget(2048), check_budget("0.2")
        (2048, 0.2)
    """
    if isinstance(budget, str):
        return parse_budget(budget)
    if isinstance(budget, Share):
        return budget
    if isinstance(budget, bool) or not isinstance(budget, Real):
        raise KVPolicyTypeError(_must_be(f"{shorten(repr(budget))} of type {type(budget).__name__}"))
    if isinstance(budget, Integral):
        tokens = int(budget)
        if not 1 <= tokens < _MAX_TOKENS:
            raise KVPolicyError(_must_be(f"{shorten(str(tokens))} tokens"))
        return tokens
    fraction = float(budget)
    if not 0 < fraction <= 1:
        raise KVPolicyError(_must_be(f"the fraction {fraction!r}"))
    return fraction


def format_budget(budget: Budget) -> str:
    """Write a budget so that `parse_budget` reads it back.

    Examples:
        >>> format_budget(1.0), format_budget(1)
        ('1.0', '1')
    """
    return repr(budget) if isinstance(budget, float | int) else str(budget)


def json_budget(budget: Budget) -> float | int | str:
    """A budget as JSON can hold it, which `check_budget` reads back."""
    return str(budget) if isinstance(budget, Share) else budget


def fraction_of(budget: Budget) -> float | None:
    """The fraction of the prompt of a budget, with a least number of tokens or without; None of another budget.

    Examples:
        >>> fraction_of(0.2), fraction_of(Share(0.2, least=64)), fraction_of(2048)
        (0.2, 0.2, None)
    """
    if isinstance(budget, Share):
        return budget.fraction
    return budget if isinstance(budget, float) else None


def least_of(budget: Budget) -> int:
    """The number of tokens of which a budget keeps all, whatever the prompt: 0 if it says none.

    Examples:
        >>> least_of(2048), least_of(Share(0.2, least=64)), least_of(0.2)
        (2048, 64, 0)
    """
    if isinstance(budget, Share):
        return budget.least
    return budget if isinstance(budget, int) else 0


def with_least(budget: Budget, least: int) -> Budget:
    """A budget with a least number of tokens, if it is a fraction without one; others are returned as they are.

    Args:
        budget: The budget.
        least: The least number of tokens; 0 for none.

    Examples:
        >>> str(with_least(0.2, 1024)), str(with_least(0.2, 0)), str(with_least(64, 1024))
        ('0.2:least=1024', '0.2', '64')
        >>> str(with_least(Share(0.2, least=64), 1024))
        '0.2:least=64'
    """
    return Share(budget, least) if isinstance(budget, float) and least else budget


def bytes_of(text: str) -> int:
    """The number of bytes that a text such as `512MiB` means, rounded down.

    Raises:
        KVPolicyError: If it is not an amount of bytes.

    Examples:
        >>> bytes_of("1.5KiB"), bytes_of("2MB")
        (1536, 2000000)
    """
    match = _BYTES.fullmatch(text)
    if match is None:
        raise KVPolicyError(_must_be(repr(shorten(text))))
    number, unit = match.groups()
    if unit not in _UNITS:
        advice = "512MiB, or 2048 for tokens" if unit in _THOUSANDS else "512MiB"
        raise KVPolicyError(
            f"The unit of a budget in bytes must be {', '.join(_UNITS)}, got {shorten(unit)!r}; try {advice}."
        )
    whole, _, part = number.partition(".")
    amount = int(whole + part) * _UNITS[unit] // 10 ** len(part)  # in integers, because floats lose large amounts
    if amount < 1:
        raise KVPolicyError(_must_be(repr(text)))
    return amount


def _must_be(got: str) -> str:
    return (
        "The budget must be a fraction of the prompt in (0, 1], a number of tokens from 1, or a number of bytes from "
        f"1B, got {got}; try 0.2, 20%, 2048 or 512MiB."
    )


def _no_fraction(got: str) -> str:
    return f"A least number of tokens must follow a fraction of the prompt, got {got}; try 0.2:least=1024."


def _no_least(got: str) -> str:
    return f"The least number of tokens of a budget must be an integer from 1, got {got}; try 0.2:least=1024."


def waterfill(target: Tensor, total: Tensor, floor: int, ceiling: Tensor, even: float = 0.0) -> Tensor:
    """Integer tokens per layer, close to fractional targets and within bounds.

    Every layer gets its target times one common factor, clamped to the bounds. What a layer cannot use thus goes to
    the layers that can, in proportion to their targets. If there is more than all layers can use, each gets the most
    it can use, and the surplus is divided evenly on top.

    Args:
        target: Tokens each layer should get, [B, L] fp64, at least 0; rows sum to `total`.
        total: Tokens of all layers together, [B] int64.
        floor: The fewest tokens of a layer.
        ceiling: The most tokens that a layer of each row can use, [B] int64.
        even: The fraction of an even division that every layer has before the rest is divided by targets. More weight
            for one layer then never gives another one more.

    Returns:
        [B, L] int64; rows sum to `total` exactly, and no row depends on another.

    Raises:
        KVPolicyError: If `total` is less than the sum of the layers' floors.

    Examples:
        >>> waterfill(torch.tensor([[8.0, 4.0, 0.0]]), torch.tensor([12]), 1, torch.tensor([6])).tolist()
        [[6, 5, 1]]
    """
    targets = cast("list[list[float]]", target.tolist())  # pyright: ignore[reportUnknownMemberType]
    rows = zip(targets, _ints(total), _ints(ceiling), strict=True)
    filled = [_fill_row(*row, floor, even) for row in rows]
    return torch.tensor(filled, dtype=torch.int64, device=target.device).reshape(target.shape)


def _ints(values: Tensor) -> list[int]:
    return cast("list[int]", values.tolist())  # pyright: ignore[reportUnknownMemberType]


def _fill_row(target: list[float], total: int, ceiling: int, floor: int, even: float) -> list[int]:
    # Plain floats, row by row: a vectorized sum may round a row differently next to other rows.
    layers = len(target)
    if total >= layers * ceiling:
        # Every layer gets the most it can use. The surplus is divided evenly, so that the sum stays exact.
        each, odd = divmod(total - layers * ceiling, layers)
        return [ceiling + each + (index < odd) for index in range(layers)]
    if total < layers * floor:
        raise KVPolicyError(
            f"The budget must be at least {layers * floor} tokens in all, {floor} for each of {layers} layers, "
            f"got {total}."
        )
    return _round(_fractions(target, total, floor, ceiling, even * total / layers), total, ceiling)


def _fractions(target: list[float], total: int, floor: int, ceiling: int, each: float) -> list[float]:
    """Fractional tokens per layer: `each + factor * target`, clamped, with the factor by which they sum to `total`."""
    result = [0.0] * len(target)
    free = set(range(len(target)))
    rest = float(total)
    # Each pass fixes at least one layer at a bound, so there are at most as many passes as layers.
    while free:
        mass = math.fsum(target[index] for index in free)
        for index in free:
            above = rest - each * len(free)
            result[index] = each + above * target[index] / mass if mass > 0 else rest / len(free)
        excess = math.fsum(min(max(result[index], floor), ceiling) - result[index] for index in free)
        # If clamping to the floor added more tokens than clamping to the ceiling removed, the factor can only
        # fall, so whatever is below the floor now stays there. Otherwise the same holds for the ceiling.
        settled = {i for i in free if (result[i] < floor if excess > 0 else result[i] > ceiling)}
        if not settled:  # what is still out of bounds balances exactly
            return [min(max(value, float(floor)), float(ceiling)) for value in result]
        for index in settled:
            result[index] = float(floor if excess > 0 else ceiling)
        rest -= math.fsum(result[index] for index in settled)
        free -= settled
    return result


def _round(values: list[float], total: int, ceiling: int) -> list[int]:
    """Integers that sum to `total`, by the largest remainder; ties go to the lower index."""
    whole = [math.floor(value + _TOLERANCE) for value in values]
    # Remainders are rounded, so that those which differ by arithmetic noise alone are a tie.
    order = sorted(range(len(values)), key=lambda index: (-round(values[index] - whole[index], 9), index))
    missing = total - sum(whole)
    for index in [index for index in order if whole[index] < ceiling][:missing]:
        whole[index] += 1
    assert sum(whole) == total, "the tokens of the layers must sum to the total"
    return whole
