"""The grammar of policy specs: `squeeze:keep_share=0.4+kvcrush:split=0.25/snapkv:window=32+kivi:bits=4@0.2`.

    policy = part {"+" part} ["@" budget]
    part   = term {"/" term}                  the left wraps the right, through its field `base`
    term   = name {":" key "=" value}

A budget that is a fraction may have a least number of tokens: `snapkv@0.2:least=1024`. A policy that is made from a
file stands alone: `tuned:file=plan.json@0.1`.

Every selector that evicts while decoding takes `protect=prompt`, and every allocator `skip=2-2`, which wraps it; the
latter is also read as `skip=first:2,last:2`.

Parts come in any order, at most one of each kind. A selector wraps a selector, a codec a codec and a reader a reader;
an allocator wraps a head allocator through its field `heads`. Spaces around `+`, `/`, `:`, `=` and `@` are ignored. As
it is written, a spec contains no comma and no character that a shell would interpret. The type of a value is that of
the strategy's field. A string value may contain slashes; where its strategy wraps another, a slash before the name of
one that it may wrap is written `%2F`. `%` escapes everything except letters, digits and `_.-/`.

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

from kvpolicy.registry import OPTIONS, Kind, kinds, lookup, name_of, names, suggest
from kvpolicy.text.arguments import suggest_option, write_options_by
from kvpolicy.text.budget import Budget, format_budget, parse_budget
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.tables import shorten

_MAX_TERMS = 8  # of one part: bounds the recursion for hostile input
WRAPPING = ("base", "heads")
"""The fields through which a strategy wraps another."""

_BASES: dict[Kind, str] = {"selector": "h2o", "codec": "tokenwise", "reader": "quest"}
"""A strategy of each kind that others wrap, for messages."""

_SPACES = re.compile(r"\s*([+/:=@])\s*")
_NAME = re.compile(r"[^:/=]*")
_INT = re.compile(r"-?[0-9]{1,1000}")
_FLOAT = re.compile(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e-?[0-9]+)?")
_TEXT = re.compile(r"[A-Za-z0-9_.\-/%]*")
_TYPES: dict[type, str] = {int: "an integer", float: "a number", str: "a string of letters, digits and _.-/%"}


def parse(text: str) -> tuple[dict[Kind, Any], Budget | None]:
    """Read a policy's parts and its budget.

    Args:
        text: A spec, as described at the top of this module.

    Returns:
        The strategies by kind, and the budget or None.

    Raises:
        KVPolicyError: If the text is not a valid spec.

    >>> parse("pyramid:beta=10@512MiB")
    ({'allocator': Pyramid(beta=10.0, heads=None)}, '512MiB')
    >>> parse("pyramid + window @ 20%") == parse("pyramid+window@0.2")
    True
    """
    body, at, amount = without_spaces(text).partition("@")
    parts: dict[Kind, Any] = {}
    for part in body.split("+"):
        if not part.strip():
            raise KVPolicyError(
                f"The parts of a policy must not be empty, got {shorten(text)!r}; try a spec such as 'snapkv@0.2'."
            )
        kind, strategy = _part(part)
        if kind == "head_allocator":
            name = shorten(part)
            raise KVPolicyError(f"A head allocator must follow an allocator, got {name!r}; try 'uniform/{name}'.")
        if kind in parts:
            raise KVPolicyError(
                f"A policy must have at most one {kind}, got {shorten(text)!r}; remove one, or wrap one in the other "
                "with '/'."
            )
        parts[kind] = strategy
    return parts, parse_budget(amount) if at else None


def check_text(text: object) -> str:
    """The text of a spec.

    Raises:
        KVPolicyTypeError: If it is no text.
    """
    if not isinstance(text, str):
        got = type(text).__name__
        raise KVPolicyTypeError(f"A spec must be a string, got {got}; try Policy.of, which takes policies too.")
    return text


def without_spaces(text: str) -> str:
    """A spec without the spaces that have no meaning: at its ends, and around the characters that separate its parts.

    Examples:
        >>> without_spaces(" snapkv + kivi: bits=4 @ 20% ")
        'snapkv+kivi:bits=4@20%'
    """
    return _SPACES.sub(r"\1", text.strip())


def first_name(text: str) -> str:
    """The name at the beginning of a spec.

    Examples:
        >>> first_name("tuned:file=plan.json@0.1")
        'tuned'
    """
    return re.split(r"[:/=+@]", without_spaces(text), maxsplit=1)[0]


def parse_alone(name: str, cls: type[Any], text: str) -> tuple[Any, Budget | None]:
    """Read a spec that consists of one name, which is no part, with options and a budget.

    Args:
        name: The name.
        cls: The dataclass of its options.
        text: The spec, which begins with the name.

    Returns:
        The options, and the budget or None.

    Raises:
        KVPolicyError: If the text is not a valid spec.
    """
    body, at, amount = without_spaces(text).partition("@")
    if "+" in body:
        raise KVPolicyError(f"{name!r} sets every part of a policy and must stand alone, got {shorten(text)!r}.")
    rest = body.removeprefix(name)
    if rest and not rest.startswith(":"):
        raise KVPolicyError(f"An option must be written as {name}:key=value, got {shorten(text)!r}.")
    return _build(name, cls, _options(name, cls, rest[1:])), parse_budget(amount) if at else None


def show_alone(name: str, options: object, budget: Budget) -> str:
    """Write what `parse_alone` reads."""
    return f"{_show_term(options, name)}@{format_budget(budget)}"


def show(parts: Mapping[Kind, object], budget: Budget | None) -> str:
    """Write parts so that `parse` reads them back: only what differs from the defaults.

    Raises:
        KVPolicyError: If a strategy is not registered.
    """
    spec = "+".join(_show_term(parts[kind]) for kind in kinds() if kind in parts)
    return spec if budget is None else f"{spec}@{format_budget(budget)}"


def _part(text: str) -> tuple[Kind, Any]:
    terms: list[tuple[str, Kind, type[Any], dict[str, Any], dict[str, dict[str, int]]]] = []
    rest: str | None = text
    while rest is not None:
        name, kind, cls, options, shared, rest = _term(rest)
        wrapped = _wraps(terms[-1][2]) if terms else None
        if wrapped == "heads" and kind != "head_allocator":
            every = ", ".join(names("head_allocator"))
            raise KVPolicyError(f"The head allocator of {terms[-1][0]!r} must be one of {every}, got {name!r}.")
        if wrapped == "base" and terms[0][1] != kind:
            raise KVPolicyError(
                f"{terms[0][0]!r} must wrap a {terms[0][1]}, got the {kind} {name!r}; use '+' between parts."
            )
        terms.append((name, kind, cls, options, shared))
        if len(terms) > _MAX_TERMS:
            raise KVPolicyError(f"A part must nest at most {_MAX_TERMS} strategies, got {shorten(text)!r}.")
    # From the innermost term outwards, since a strategy is created with its base.
    inner: Any = None
    for name, _, cls, options, shared in reversed(terms):
        wrapping = {_wraps(cls): inner} if inner is not None else {}
        inner = _build(name, cls, options | wrapping)
        for option, values in shared.items():
            inner = _build(option, lookup(option)[1], values | {"base": inner})
    return terms[0][1], inner


def _wraps(cls: type[Any]) -> str:
    """The field through which a strategy wraps another, or an empty string."""
    return next((field for field in WRAPPING if field in fields_of(cls)), "")


def _term(text: str) -> tuple[str, Kind, type[Any], dict[str, Any], dict[str, dict[str, int]], str | None]:
    """The first term of a part: its name, kind, class, options, those of its kind, and the text that it wraps."""
    match = _NAME.match(text)
    name = match.group() if match else ""
    if not name.strip():
        raise KVPolicyError(f"The name of a strategy must not be empty, got {shorten(text)!r}; try 'kvcrush/h2o'.")
    kind, cls = lookup(name)
    rest = text[len(name) :]
    inner: str | None = None
    wrapped = _wraps(cls)
    if wrapped:
        # In a value of text, a slash is followed by the name of what may be wrapped only where it is.
        is_plain = wrapped == "base" and not _takes_text(cls)
        found = re.search("/", rest) if is_plain else re.match("/", rest) or _before_inner(cls).search(rest)
        if found:
            inner = rest[found.end() :]
            rest = rest[: found.start()]
    elif rest.startswith("/"):  # not an option, since the values of options come after ':'
        raise KVPolicyError(
            f"The left side of '/' must be a strategy that wraps another, got {name!r}; use '+' between parts."
        )
    if rest and not rest.startswith(":"):
        raise KVPolicyError(f"An option must be written as {name}:key=value, got {shorten(text)!r}.")
    shared, own = _shared(name, kind, rest[1:])
    return name, kind, cls, _options(name, cls, own), shared, inner


def _shared(name: str, kind: Kind, text: str) -> tuple[dict[str, dict[str, int]], str]:
    """The options of a term that every strategy of its kind takes, with their fields, and the text of the others."""
    found: dict[str, dict[str, int]] = {}
    for key, option in OPTIONS.items():
        if option.kind != kind:
            continue
        # Before the options are separated, since a value may contain colons.
        for match in reversed([*re.finditer(rf"(?:^|:){key}=({option.values})(?=:|$)", text)]):
            if key in found:
                raise KVPolicyError(f"Every option of {name!r} must be given once, got {key!r} twice.")
            if not all(_INT.fullmatch(value) for value in match.groupdict().values() if value):
                continue  # more digits than Python reads: refused below
            fields = {field.rstrip("_"): int(value) for field, value in match.groupdict().items() if value}
            empty = {field: 0 for field in match.groupdict() if not field.endswith("_")}
            found[key] = empty | fields
            text = (text[: match.start()] + text[match.end() :]).removeprefix(":")
        wrong = re.search(rf"(?:^|:){key}=([^:]*)", text)
        if wrong:
            raise KVPolicyError(
                f"The option {name}:{key} must be {option.example}, got {shorten(wrong.group(1))!r}; try "
                f"{key}={option.example}."
            )
    return found, text


def _options(name: str, cls: type[Any], text: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    known = {key: hint for key, hint in _hints(cls).items() if key not in WRAPPING}
    aliases: Mapping[str, str] = getattr(cls, "ALIASES", {})
    value_aliases: Mapping[str, Mapping[str, str]] = getattr(cls, "VALUE_ALIASES", {})
    for option in text.split(":") if text else []:
        key, equals, value = option.partition("=")
        key = aliases.get(key, key)
        if key not in known:
            raise KVPolicyError(_unknown_option(name, key, shorten(value), list(known)))
        if key in result:
            former = "".join(f" (formerly {old!r})" for old, new in aliases.items() if new == key)
            raise KVPolicyError(f"Every option of {name!r} must be given once, got {key!r}{former} twice.")
        if not equals:
            raise KVPolicyError(f"The option {key!r} of {name!r} must have a value; write {key}=value.")
        value = value_aliases.get(key, {}).get(value, value)
        result[key] = _value(f"{name}:{key}", known[key], value)
    return result


def _unknown_option(name: str, key: str, value: str, known: list[str]) -> str:
    got = repr(shorten(key))
    if key == "heads":
        return f"The head allocator of {name!r} must be written after '/', got the option 'heads'; try {name}/adakv."
    if key == "base":
        inner = _BASES.get(lookup(name)[0], "BASE")
        return f"The base of {name!r} must be written after '/', got the option 'base'; try {name}/{inner}."
    if not known:
        return f"{name!r} must be given without options, got {got}; try {name}."
    advice = suggest_option(key, known, value, budget="@{}")
    return f"The options of {name!r} must be among {', '.join(known)}, got {got}{advice}"


def _build(name: str, cls: type[Any], options: dict[str, Any]) -> Any:
    try:
        return cls(**options)
    except TypeError as error:
        raise KVPolicyError(f"The strategy {name!r} could not be created: {error}") from error


def _value(where: str, hint: Any, text: str) -> Any:
    """A value of the field type `hint`."""
    # Constants come first: in a field of type `str | None`, "none" is None, and "%6Eone" is the string.
    constants, value_types = _choices(hint)
    for constant in constants:
        if _show_constant(constant) == text:
            return constant
    if int in value_types and _INT.fullmatch(text):
        return int(text)
    if float in value_types and _FLOAT.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    if str in value_types and _TEXT.fullmatch(text):
        return unquote(text, errors="surrogateescape")
    names = [_show_constant(constant) for constant in constants]
    allowed = " or ".join([_TYPES[kind] for kind in value_types] + names)
    if not allowed:  # a field that holds an object
        raise KVPolicyError(f"The option {where} must be set in Python, since a spec cannot express its type.")
    advice = suggest(text, names)
    if str in value_types and "%" not in text:
        advice = f"; try {shorten(quoted(text))}."
    raise KVPolicyError(f"The option {where} must be {allowed}, got {shorten(text)!r}{advice}")


def _choices(hint: Any) -> tuple[list[Any], list[type]]:
    """The constants and the types that a field of type `hint` accepts."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        each = [_choices(option) for option in typing.get_args(hint)]
        return [value for values, _ in each for value in values], [kind for _, found in each for kind in found]
    if typing.get_origin(hint) is Literal:
        return list(typing.get_args(hint)), []
    if hint in (None, type(None)):
        return [None], []
    if hint is bool:
        return [True, False], []
    return [], [hint] if hint in _TYPES else []


def _show_term(strategy: object, name: str = "", shared: tuple[str, ...] = ()) -> str:
    cls = type(strategy)
    name = name or name_of(cls)
    if name in OPTIONS:
        shown = OPTIONS[name].shown.format(**{key: getattr(strategy, key) for key in fields_of(cls)})
        return _show_term(getattr(strategy, "base"), shared=(f"{name}={shown}", *shared))  # noqa: B009
    terms = [name]
    base = ""
    for key, field in fields_of(cls).items():
        value = getattr(strategy, key)
        if value == _default(field):
            continue
        if key in WRAPPING:
            base = f"/{_show_term(value)}"
        else:
            shown = _show_value(value, _hints(cls)[key])
            terms.append(f"{key}={_before_inner(cls).sub('%2F', shown) if _wraps(cls) else shown}")
    return ":".join([*terms, *shared]) + base


write_options_by(_show_term)


def _show_value(value: Any, hint: Any) -> str:
    constants, _ = _choices(hint)
    if value in constants or value is None or isinstance(value, bool):
        return _show_constant(value)
    if isinstance(value, float):
        # 1e+20 becomes 1e20, since a plus sign separates parts.
        return repr(float(value)).replace("+", "")
    if isinstance(value, int):
        return str(value)
    if not isinstance(value, str):
        raise KVPolicyError(
            f"An option must be a number, a bool, a string or None to be written in a spec, got a "
            f"{type(value).__name__}; keep the policy as an object."
        )
    text = quoted(value)
    taken = text in [_show_constant(constant) for constant in constants]  # a file called "none" is not None
    return f"%{ord(text[0]):02X}{text[1:]}" if taken else text


def quoted(text: str) -> str:
    """A string as a spec has it."""
    # `quote` leaves `~` as it is, which a shell may expand. File names need not be UTF-8, hence the surrogates.
    return quote(text, safe="/", errors="surrogateescape").replace("~", "%7E")


def _show_constant(constant: Any) -> str:
    """The text of a constant: none, true, false, or a member of a Literal."""
    return str(constant).lower() if constant is None or isinstance(constant, bool) else str(constant)


def _takes_text(cls: type[Any]) -> bool:
    """Whether an option of a strategy may be any string, such as the name of a file."""
    return any(str in _choices(hint)[1] for key, hint in _hints(cls).items() if key not in WRAPPING)


def _before_inner(cls: type[Any]) -> re.Pattern[str]:
    """A slash that the name of a strategy follows which one of this class may wrap.

    A class that wraps none of its own says so by `WRAPS_ITSELF`, so that a folder may have its name.
    """
    own = name_of(cls)
    inner = names("head_allocator") if _wraps(cls) == "heads" else names(lookup(own)[0])
    others = inner if getattr(cls, "WRAPS_ITSELF", True) else [name for name in inner if name != own]
    return re.compile(f"/(?=(?:{'|'.join(map(re.escape, others))})(?:[:/]|$))")


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


@functools.cache
def fields_of(cls: type[Any]) -> dict[str, Field[Any]]:
    """The options of a strategy class by name, the strategy that it wraps included."""
    return {field.name: field for field in fields(cls) if field.init}


@functools.cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {key: hints[key] for key in fields_of(cls)}
