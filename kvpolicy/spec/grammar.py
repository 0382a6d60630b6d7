"""The words of a policy: `squeeze:share=0.4+kvcrush:split=0.25/snapkv:window=32+kivi:bits=4@0.2`.

    policy = part {"+" part} ["@" budget]
    part   = term {"/" term}                  the left wraps the right, through its field `base`
    term   = name {":" key "=" value}

Parts come in any order, at most one of each kind. No comma and nothing that a shell would interpret. The types of
values are those of the strategy's fields; a text value may hold slashes where its strategy wraps nothing, and `%`
escapes for everything outside letters, digits and `_.-/`.

A strategy whose options or values were renamed declares the former names, which still parse: `ALIASES` maps an option
to its present name, and `VALUE_ALIASES` the values of an option, by its present name, to the present values.
"""

from __future__ import annotations

import functools
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, Literal
from urllib.parse import quote, unquote

from kvpolicy.registry import Kind, kinds, lookup, name_of, suggest
from kvpolicy.spec.budget import Budget, format_budget, parse_budget
from kvpolicy.spec.errors import KVPolicyError

_MAX_TERMS = 8  # in one part; keeps a hostile text from nesting without end
_NAME = re.compile(r"[^:/=]*")
_INT = re.compile(r"-?[0-9]{1,1000}")
_FLOAT = re.compile(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e-?[0-9]+)?")
_TEXT = re.compile(r"[A-Za-z0-9_.\-/%]*")
_NEEDED: dict[type, str] = {int: "a whole number", float: "a number", str: "a text of letters, digits and _.-/%"}


def parse(text: str) -> tuple[dict[Kind, Any], Budget | None]:
    """Read a policy's parts and its budget.

    Args:
        text: What the module's first lines describe.

    Returns:
        The strategies named, by kind, and the budget or None.

    Raises:
        KVPolicyError: Where the text is not a policy.

    >>> parse("pyramid:beta=10@512MiB")
    ({'allocator': Pyramid(beta=10.0)}, '512MiB')
    """
    body, at, amount = text.partition("@")
    parts: dict[Kind, Any] = {}
    for words in body.split("+"):
        kind, strategy = _part(words)
        if kind in parts:
            raise KVPolicyError(f"The policy {text!r} names two {kind}s: keep one, or wrap one in the other with '/'.")
        parts[kind] = strategy
    return parts, parse_budget(amount) if at else None


def show(parts: Mapping[Kind, object], budget: Budget | None) -> str:
    """Write parts so that `parse` reads them back: only what differs from the defaults.

    Raises:
        KVPolicyError: Where a strategy is not registered.
    """
    words = "+".join(_show_term(parts[kind]) for kind in kinds() if kind in parts)
    return words if budget is None else f"{words}@{format_budget(budget)}"


def _part(words: str) -> tuple[Kind, Any]:
    terms: list[tuple[str, Kind, type[Any], dict[str, Any]]] = []
    rest: str | None = words
    while rest is not None:
        name, kind, cls, options, rest = _term(rest)
        if terms and terms[0][1] != kind:
            raise KVPolicyError(f"{terms[0][0]!r} wraps {terms[0][1]}s, and {name!r} is of the kind {kind}: use '+'.")
        terms.append((name, kind, cls, options))
        if len(terms) > _MAX_TERMS:
            raise KVPolicyError(f"The part {words[:40]!r}... wraps more than {_MAX_TERMS} strategies: use fewer.")
    inner: dict[str, Any] = {}
    for name, _, cls, options in reversed(terms):
        inner = {"base": _build(name, cls, options | inner)}
    return terms[0][1], inner["base"]


def _term(words: str) -> tuple[str, Kind, type[Any], dict[str, Any], str | None]:
    """The first term of `words`, and what it wraps."""
    match = _NAME.match(words)
    name = match.group() if match else ""
    kind, cls = lookup(name)
    rest, inner = words[len(name) :], None
    if "base" in _fields(cls):
        rest, slash, after = rest.partition("/")
        inner = after if slash else None
    elif rest.startswith("/"):
        raise KVPolicyError(f"{name!r} wraps nothing, so no '/' may follow it: put '+' between parts.")
    if rest and not rest.startswith(":"):
        raise KVPolicyError(f"{words!r} is not understood: write {name}:key=value.")
    return name, kind, cls, _options(name, cls, rest[1:]), inner


def _options(name: str, cls: type[Any], words: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    known = {key: hint for key, hint in _hints(cls).items() if key != "base"}
    aliases: Mapping[str, str] = getattr(cls, "ALIASES", {})
    value_aliases: Mapping[str, Mapping[str, str]] = getattr(cls, "VALUE_ALIASES", {})
    for word in words.split(":") if words else []:
        key, equals, value = word.partition("=")
        key = aliases.get(key, key)
        if key not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            hint = "; its base is what follows '/'." if key == "base" else suggest(key, known)
            raise KVPolicyError(f"{name!r} has no option {key!r}, {has}{hint}")
        if key in result:
            former = "".join(f" (formerly {old!r})" for old, new in aliases.items() if new == key)
            raise KVPolicyError(f"{name!r} is given its option {key!r}{former} twice: keep one.")
        if not equals:
            raise KVPolicyError(f"The option {key!r} of {name!r} has no value: write {key}=value.")
        value = value_aliases.get(key, {}).get(value, value)
        result[key] = _value(f"{name}:{key}", known[key], value)
    return result


def _build(name: str, cls: type[Any], options: dict[str, Any]) -> Any:
    try:
        return cls(**options)
    except TypeError as error:
        raise KVPolicyError(f"{name!r} cannot be built: {error}") from error


def _value(where: str, hint: Any, text: str) -> Any:
    """A value of the field type `hint`."""
    constants, kinds_of = _choices(hint)
    for constant in constants:
        if _show_constant(constant) == text:
            return constant
    if int in kinds_of and _INT.fullmatch(text):
        return int(text)
    if float in kinds_of and _FLOAT.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    if str in kinds_of and _TEXT.fullmatch(text):
        return unquote(text, errors="surrogateescape")
    words = [_show_constant(constant) for constant in constants]
    needed = " or ".join([_NEEDED[kind] for kind in kinds_of] + words)
    raise KVPolicyError(f"The value {text!r} of {where} is not {needed or 'allowed in a text'}{suggest(text, words)}")


def _choices(hint: Any) -> tuple[list[Any], list[type]]:
    """The single values, and the types, that a field of type `hint` admits."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        each = [_choices(option) for option in typing.get_args(hint)]
        return [value for values, _ in each for value in values], [kind for _, found in each for kind in found]
    if typing.get_origin(hint) is Literal:
        return list(typing.get_args(hint)), []
    if hint in (None, type(None)):
        return [None], []
    if hint is bool:
        return [True, False], []
    return [], [hint] if hint in _NEEDED else []


def _show_term(strategy: object) -> str:
    cls = type(strategy)
    words, base = [name_of(cls)], ""
    for key, field in _fields(cls).items():
        value = getattr(strategy, key)
        if value == _default(field):
            continue
        if key == "base":
            base = f"/{_show_term(value)}"
        else:
            words.append(f"{key}={_show_value(value, _hints(cls)[key], slash='base' not in _fields(cls))}")
    return ":".join(words) + base


def _show_value(value: Any, hint: Any, *, slash: bool) -> str:
    constants, _ = _choices(hint)
    if value in constants or value is None or isinstance(value, bool):
        return _show_constant(value)
    if isinstance(value, float):
        return repr(float(value)).replace("+", "")
    if isinstance(value, int):
        return str(value)
    if not isinstance(value, str):
        raise KVPolicyError(f"The value {value!r} of type {type(value).__name__} cannot be written in a policy's text.")
    text = quote(value, safe="/" if slash else "", errors="surrogateescape").replace("~", "%7E")
    taken = text in [_show_constant(constant) for constant in constants]  # the file "none" is not None
    return f"%{ord(text[0]):02X}{text[1:]}" if taken else text


def _show_constant(constant: Any) -> str:
    """A value that a field's type lists: none, true, false, or a word of a Literal."""
    return str(constant).lower() if constant is None or isinstance(constant, bool) else str(constant)


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


@functools.cache
def _fields(cls: type[Any]) -> dict[str, Field[Any]]:
    return {field.name: field for field in fields(cls) if field.init}


@functools.cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {key: hints[key] for key in _fields(cls)}
