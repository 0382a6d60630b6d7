"""Validation of user input: the fields of strategies, and numbers of tokens, rows and ranks.

Values are checked where they enter, because a wrong one would otherwise fail deep inside a forward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from kvpolicy.spec.errors import KVPolicyError, KVPolicyTypeError

MAX_FIELD = 2**31
"""Integer fields of a strategy are below this: PyTorch operators take no larger ones."""

MAX_SIZE = 2**40
"""The largest number of tokens, rows or ranks; larger ones would overflow when multiplied by the bytes of a layer."""

_KINDS: dict[str, tuple[type, Callable[[Any], Any], str]] = {
    "int": (Integral, int, "a whole number"),
    "float": (Real, lambda value: float(value) + 0.0, "a number"),
    "bool": (bool, bool, "True or False"),
}
"""By annotation: what a value must be, what makes it one of its form, and what to ask for."""


def check_instance(what: str, part: object) -> None:
    """Raise KVPolicyTypeError where a class stands in the place of an instance; `what` is what it should be.

    Examples:
        >>> check_instance("codec", int)
        Traceback (most recent call last):
        kvpolicy.KVPolicyTypeError: The codec is the class int: give an instance, int().
    """
    if isinstance(part, type):
        raise KVPolicyTypeError(f"The {what} is the class {part.__name__}: give an instance, {part.__name__}().")


def check_fields(strategy: Any) -> None:
    """Check the fields that are annotated `int`, `float` or `bool`, and give equal numbers one form.

    So equal strategies have equal words: of a field that is a float, 1 becomes 1.0 and -0.0 becomes 0.0; where a
    `Literal` lists whole numbers, 4.0 becomes 4. Annotations are read as they were written, in a module that begins
    with `from __future__ import annotations`.

    Raises:
        KVPolicyTypeError: Where a value is of another type.
        KVPolicyError: Where a whole number is too large for any use.

    Examples:
        >>> from kvpolicy import H2O, StreamingLLM
        >>> H2O(recent=1)
        H2O(recent=1.0, decode='evict')
        >>> StreamingLLM(sinks=2.5)
        Traceback (most recent call last):
        kvpolicy.KVPolicyTypeError: StreamingLLM's sinks is 2.5: give a whole number.
    """
    for field in fields(strategy):
        annotation, value = str(field.type), getattr(strategy, field.name)
        if annotation in _KINDS:
            value = _in_form(annotation, value, f"{type(strategy).__name__}'s {field.name}")
        elif annotation.startswith("Literal[") and isinstance(value, float) and value.is_integer():
            value = int(value)
        object.__setattr__(strategy, field.name, value)


def _in_form(annotation: str, value: Any, name: str) -> Any:
    kind, make, words = _KINDS[annotation]
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise KVPolicyTypeError(f"{name} is {value!r}: give {words}.")
    if annotation == "int" and not -MAX_FIELD <= value < MAX_FIELD:
        raise KVPolicyError(f"{name} is {value!r}: give a number below 2^31.")
    return make(value)


def check_sizes(**sizes: tuple[object, int]) -> None:
    """Raise unless each is a whole number in range; every name has its number and the least that it may be.

    Raises:
        KVPolicyTypeError: Where one is no whole number.
        KVPolicyError: Where one is out of range.

    Examples:
        >>> check_sizes(batch=(1, 1), new=(0, 0))
    """
    for name, (size, least) in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise KVPolicyTypeError(f"{name} is {size!r} and no whole number: give one such as {max(least, 1)}.")
        if not least <= size <= MAX_SIZE:
            raise KVPolicyError(f"{name} is {size} and out of range: give a number from {least} to 2^40.")


def place_of(what: str, number: Any, count: int) -> int:
    """A row's or a head's place among `count`.

    Raises:
        KVPolicyTypeError: Where it is no whole number.
        KVPolicyError: Where there are not so many.

    Examples:
        >>> place_of("row", 1, 2)
        1
    """
    try:
        place = operator.index(number)
    except TypeError:
        raise KVPolicyTypeError(f"{what} is {number!r} and no whole number: give one such as 0.") from None
    if not 0 <= place < count:
        raise KVPolicyError(f"There is no {what} {place}: the cache has {count}, counted from 0.")
    return place


def each_row(prompt: int | Sequence[int], batch: int) -> list[int]:
    """Tokens of each row's prompt, from one number or one per row.

    Raises:
        KVPolicyError: Where a number is out of range, or there is not one per row.
        KVPolicyTypeError: Where one is no whole number.

    Examples:
        >>> each_row(7, 2), each_row([3, 4], 2)
        ([7, 7], [3, 4])
    """
    lengths: list[int] = list(prompt) if isinstance(prompt, Sequence) else [prompt] * batch
    if len(lengths) != batch:
        raise KVPolicyError(
            f"There are {len(lengths)} prompt lengths for {batch} rows: give one number or one per row."
        )
    for length in lengths:
        check_sizes(prompt=(length, 0))
    return lengths


def expected(prompt: Tensor | Sequence[int] | int | None, new: int | None) -> tuple[Tensor | None, int | None]:
    """What a cache is told to expect: tokens of each row's prompt, [B] or [] int64, and how many will be generated.

    Raises:
        KVPolicyError: Where a number is out of range.
        KVPolicyTypeError: Where one is no whole number.

    Examples:
        >>> expected([3, 4], 5), expected(7, None)
        ((tensor([3, 4]), 5), (tensor(7), None))
    """
    if new is not None:
        check_sizes(new=(new, 0))
    if prompt is None:
        return None, new
    given: Any = prompt.tolist() if isinstance(prompt, Tensor) else prompt  # pyright: ignore[reportUnknownMemberType]
    for length in given if isinstance(given, list | tuple) else [given]:
        check_sizes(prompt=(length, 0))
    return torch.tensor(given, dtype=torch.int64), new


def longest(told: Tensor | None, prompt: Tensor | None) -> Tensor | None:
    """The longer of two expected prompts, [B] or []; the newer one where they are of other rows, as for beams.

    Examples:
        >>> longest(torch.tensor(7), torch.tensor([9, 4])), longest(None, torch.tensor(3))
        (tensor([9, 7]), tensor(3))
    """
    if told is None or prompt is None:
        return told if prompt is None else prompt
    if told.dim() and prompt.dim() and len(told) != len(prompt):
        return prompt
    return torch.maximum(told, prompt)


def at_least(length: Tensor, prompt: Tensor | None) -> Tensor:
    """Tokens of each row [B], or those of its expected prompt, [B] or [], where these are more.

    Raises:
        KVPolicyError: Where as many rows were not expected.
    """
    if prompt is None:
        return length
    if prompt.dim() and len(prompt) != len(length):
        raise KVPolicyError(
            f"The cache expects prompts of {len(prompt)} rows and was given {len(length)}: make it with one length for "
            "all, or one per row."
        )
    return torch.maximum(length, prompt)
