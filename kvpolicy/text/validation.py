"""Validation of user input: the fields of strategies, and numbers of tokens, rows and ranks.

Values are checked where they enter, because a wrong one would otherwise fail deep inside a forward.
"""

from __future__ import annotations

import functools
import operator
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.limits import MAX_FIELD, MAX_SIZE
from kvpolicy.text.tables import shorten

AutoInt = int | Literal["auto"]
"""A number of tokens, or `auto` for a number that depends on the budget."""

AutoFloat = float | Literal["auto"]
"""A number, or `auto` for one that depends on the budget."""


class _Kind(NamedTuple):
    """Values of a field with one annotation: the accepted type, the conversion to it, and its name in messages."""

    accepts: type
    convert: Callable[[Any], Any]
    name: str


# The abstract types of `numbers` also cover the scalars of NumPy. Adding 0.0 turns -0.0 into 0.0.
_KINDS = {
    int: _Kind(Integral, int, "an integer"),
    float: _Kind(Real, lambda value: float(value) + 0.0, "a number"),
    bool: _Kind(bool, bool, "True or False"),
}

_PLAIN = (int, float, bool, str)
"""The types of values that files and specs can hold."""

CHECK = "check"
"""The metadata of a field that is the function which checks its value, see `kvpolicy.text.strategy`."""


class _Rule(NamedTuple):
    """How the values of a field are checked.

    Attributes:
        field: Its name.
        type: One of `_KINDS`, or None for any other.
        automatic: Whether `auto` is a value too.
        choices: The values of a `Literal`; empty for any other type.
        whole: Whether 4.0 becomes 4: where the annotation lists the values itself, which may be integers.
        example: The end of a message, which suggests the default if there is one.
        check: Raises an error about a value of this type; None if it has no constraint.
    """

    field: str
    type: type[Any] | None
    automatic: bool
    choices: tuple[object, ...]
    whole: bool
    example: str
    check: Callable[[str, Any], None] | None


def check_instance(what: str, part: object) -> None:
    """Check that an instance was given, and not its class.

    Args:
        what: The name of the argument, for the message.
        part: The argument.

    Raises:
        KVPolicyTypeError: If it is a class.

    Examples:
        >>> check_instance("codec", int)
        Traceback (most recent call last):
        kvpolicy.KVPolicyTypeError: The codec must be an instance, got the class int; try int().
    """
    if isinstance(part, type):
        raise KVPolicyTypeError(
            f"The {what} must be an instance, got the class {part.__name__}; try {part.__name__}()."
        )


DECODE_MODES = ("evict", "grow")
"""Ways in which a selector may treat generated tokens, see `kvpolicy.protocols.DecodeMode`."""


def check_fields(strategy: Any) -> None:
    """Check the fields of a dataclass by their annotations and constraints, and normalize equal values.

    Checked are fields that are annotated `int`, `float`, `bool`, `AutoInt`, `AutoFloat` or with a `Literal`. Equal
    strategies then have equal spec strings: 1 becomes 1.0 and -0.0 becomes 0.0 in a float field, and 4.0 becomes 4
    where a `Literal` lists integers. Numbers and strings of other libraries, such as NumPy, become those of Python in
    every field, so that each of them can be written to a file.

    Raises:
        KVPolicyTypeError: If a value is of another type.
        KVPolicyError: If an integer is out of range, or a value is not allowed.

    Examples:
        >>> from kvpolicy import H2O, StreamingLLM
        >>> H2O(recent=1)
        H2O(recent=1.0, decode='evict')
        >>> StreamingLLM(sinks=2.5)
        Traceback (most recent call last):
        kvpolicy.KVPolicyTypeError: StreamingLLM.sinks must be an integer, got 2.5.
    """
    owner = type(strategy).__name__
    rules = _rules(type(strategy))
    for rule in rules:
        value = _plain(getattr(strategy, rule.field))
        if rule.type is not None and not (rule.automatic and value == "auto"):
            value = _normalized(rule.type, value, f"{owner}.{rule.field}")
        elif rule.whole and isinstance(value, float) and value.is_integer():
            value = int(value)
        object.__setattr__(strategy, rule.field, value)
    # After all types, so that the first message about several wrong options is one about a type.
    for rule in rules:
        value = getattr(strategy, rule.field)
        if rule.choices and value not in rule.choices:
            _refuse_choice(rule, value, owner)
        if rule.check is not None:
            rule.check(f"{owner}.{rule.field}", value)


@functools.cache
def _rules(cls: type[Any]) -> tuple[_Rule, ...]:
    try:
        hints = typing.get_type_hints(cls, localns={"Literal": Literal})
    except NameError:  # a name that only type checkers know, or the function that defines the class
        types = {kind.__name__: kind for kind in _KINDS}
        hints = {field.name: types.get(str(field.type), field.type) for field in fields(cls)}
    return tuple(_rule(field, hints[field.name]) for field in fields(cls))


def _rule(field: Field[Any], hint: Any) -> _Rule:
    args = typing.get_args(hint)
    automatic = len(args) == 2 and args[1] == Literal["auto"]
    kind = args[0] if automatic else hint
    return _Rule(
        field=field.name,
        type=kind if kind in tuple(_KINDS) else None,
        automatic=automatic,
        choices=args if typing.get_origin(hint) is Literal else (),
        whole="Literal[" in str(field.type),
        example="" if field.default is MISSING else f"; try {field.default!r}",
        check=field.metadata.get(CHECK),
    )


def _refuse_choice(rule: _Rule, value: object, owner: str) -> NoReturn:
    name = f"{owner}.{rule.field}"
    example = rule.example
    if rule.choices == DECODE_MODES:
        name = "decode"  # the same of every selector
        example = "; try 'evict'"
    raise KVPolicyError(
        f"{name} must be one of {', '.join(map(repr, rule.choices))}, got {shorten(repr(value))}{example}."
    )


def _plain(value: object) -> object:
    """A number or a string as one of Python's own types; anything else as it is."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    return str.__str__(value) if isinstance(value, str) else value


def _normalized(kind: type[Any], value: Any, name: str) -> Any:
    accepts, convert, described = _KINDS[kind]
    # bool is a subclass of int, but True is not a number of tokens.
    if not isinstance(value, accepts) or isinstance(value, bool) != (kind is bool):
        raise KVPolicyTypeError(f"{name} must be {described}, got {shorten(repr(value))}.")
    if kind is int and not -MAX_FIELD <= value < MAX_FIELD:
        raise KVPolicyError(f"{name} must be below 2^31 in magnitude, got {value!r}.")
    return convert(value)


def check_size(name: str, size: object, least: int, most: int = MAX_SIZE) -> int:
    """A number of tokens, rows or ranks as a plain int.

    Args:
        name: The name of the argument, for the message.
        size: The argument.
        least: The smallest value allowed.
        most: The largest, a power of two.

    Raises:
        KVPolicyTypeError: If it is not an integer.
        KVPolicyError: If it is out of range.

    Examples:
        >>> check_size("batch", 2, 1)
        2
    """
    if isinstance(size, bool) or not isinstance(size, Integral):
        raise KVPolicyTypeError(f"{name} must be an integer, got {shorten(repr(size))}; try {max(least, 1)}.")
    number = int(size)
    if not least <= number <= most:
        # In decimals, Python writes no integer of thousands of digits.
        got = str(number) if abs(number) <= most else shorten(hex(number))
        raise KVPolicyError(f"{name} must be between {least} and 2^{most.bit_length() - 1}, got {got}.")
    return number


def check_index(what: str, index: Any, count: int) -> int:
    """The index of a row or a head, among `count`.

    Raises:
        KVPolicyTypeError: If it is not an integer.
        KVPolicyError: If it is out of range.

    Examples:
        >>> check_index("row", 1, 2)
        1
    """
    try:
        found = operator.index(index)
    except TypeError:
        raise KVPolicyTypeError(f"{what} must be an integer, got {shorten(repr(index))}; try 0.") from None
    if not 0 <= found < count:
        raise KVPolicyError(f"{what} must be between 0 and {count - 1}, got {found}.")
    return found


def each_row(prompt: int | Sequence[int], batch: int) -> list[int]:
    """The prompt length of each row, from one number or one per row.

    Raises:
        KVPolicyError: If a length is out of range, or there is not one per row.
        KVPolicyTypeError: If a length is not an integer.

    Examples:
        >>> each_row(7, 2), each_row([3, 4], 2)
        ([7, 7], [3, 4])
    """
    several = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    lengths: list[int] = list(prompt) if several else [prompt] * batch  # pyright: ignore
    if len(lengths) != batch:
        raise KVPolicyError(f"prompt must be one length or one per row, got {len(lengths)} lengths for {batch} rows.")
    return [check_size("prompt", length, 0) for length in lengths]


def expected(prompt: Tensor | Sequence[int] | int | None, new: int | None) -> tuple[Tensor | None, int | None]:
    """The lengths that a cache is told to expect.

    Args:
        prompt: Prompt length of each row, or one for all; None if unknown.
        new: Tokens to be generated; None if unknown.

    Returns:
        The prompt lengths, [B] or [] int64, and `new` as a plain int.

    Raises:
        KVPolicyError: If a number is out of range.
        KVPolicyTypeError: If a number is not an integer.

    Examples:
        >>> expected([3, 4], 5), expected(7, None)
        ((tensor([3, 4]), 5), (tensor(7), None))
    """
    if new is not None:
        new = check_size("new", new, 0)
    if prompt is None:
        return None, new
    given: Any = prompt.tolist() if isinstance(prompt, Tensor) else prompt  # pyright: ignore[reportUnknownMemberType]
    if isinstance(given, list | tuple):
        lengths = [check_size("prompt", length, 0) for length in given]
        return torch.tensor(lengths, dtype=torch.int64, device="cpu"), new
    return torch.tensor(check_size("prompt", given, 0), dtype=torch.int64, device="cpu"), new


def longest(told: Tensor | None, prompt: Tensor | None) -> Tensor | None:
    """The larger of two expected prompt lengths, each [B] or [].

    If their rows do not match, as after a beam search with another number of beams, the newer one counts.

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
    """The length of each row [B], or the expected length of its prompt, [B] or [], if that is larger.

    Raises:
        KVPolicyError: If another number of rows was expected.
    """
    if prompt is None:
        return length
    if prompt.dim() and len(prompt) != len(length):
        raise KVPolicyError(
            f"prompt must be one length or one per row, got {len(prompt)} lengths for {len(length)} rows."
        )
    return torch.maximum(length, prompt)


def has_integers(numbers: Tensor) -> bool:
    """Whether a tensor has integers, as token ids and numbers of rows are; flags are none."""
    return not (numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool)
