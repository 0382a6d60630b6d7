"""What a strategy says of itself: its docstring and its fields, read for people and for JSON."""

from __future__ import annotations

import inspect
import re
import types
import typing
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, Literal

_SECTION = re.compile(r"(Args|Attributes|Example|Examples|Source|Differences?|Raises|Returns|Note|Notes):\s*")
_PARAMETER = re.compile(r" {4}(\w+): (.*)")
_SHOWN = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "none"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter of a strategy.

    Attributes:
        name: Its name in a policy's words.
        kind: What it may be: a type, or its words.
        default: As it is written in a policy.
        meaning: What its docstring says, with the range.
    """

    name: str
    kind: str
    default: str
    meaning: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """A strategy in words.

    Attributes:
        summary: The first line of its docstring.
        idea: The paragraphs after it.
        parameters: Its fields.
        source: The paper, as the docstring cites it.
        wraps: Whether another strategy can follow it after `/`.
    """

    summary: str
    idea: str
    parameters: tuple[Parameter, ...]
    source: str
    wraps: bool

    @property
    def arxiv(self) -> str:
        """The paper's number on arXiv, or nothing."""
        found = re.search(r"arXiv:([0-9]{4}\.[0-9]{4,5})", self.source)
        return found.group(1) if found else ""


def read(strategy: type[Any]) -> Description:
    """Read a strategy's class; where it says nothing, nothing is told.

    >>> from kvpolicy.allocators.pyramid import Pyramid
    >>> found = read(Pyramid)
    >>> found.summary, found.arxiv
    ('Give early layers more budget than late ones, falling in a straight line.', '2406.02069')
    >>> [(p.name, p.default, p.kind) for p in found.parameters]
    [('beta', '20.0', 'number')]
    """
    sections = _sections(strategy.__doc__ or "")
    head, _, idea = sections[""].strip().partition("\n\n")
    told = _meanings(sections.get("Args", ""))
    return Description(
        summary=" ".join(head.split()),
        idea="\n\n".join(" ".join(part.split()) for part in idea.partition(">>>")[0].split("\n\n")).strip(),
        parameters=_parameters(strategy, told),
        source=_first_sentence(sections.get("Source", "")),
        wraps="base" in _names(strategy),
    )


def _sections(docstring: str) -> dict[str, str]:
    found: dict[str, list[str]] = {"": []}
    name = ""
    for line in inspect.cleandoc(docstring).splitlines():
        if match := _SECTION.match(line):
            name = match.group(1)
            line = line[match.end() :]
        found.setdefault(name, []).append(line)
    return {name: "\n".join(lines) for name, lines in found.items()}


def _meanings(text: str) -> dict[str, str]:
    told: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if match := _PARAMETER.fullmatch(line):
            name, told[match.group(1)] = match.groups()
        elif name:
            told[name] += " " + line.strip()
    return {name: meaning.strip() for name, meaning in told.items()}


def _first_sentence(text: str) -> str:
    words = " ".join(text.split())
    return re.split(r"(?<=[\w)])[.:;]\s(?![^()]*\))", words, maxsplit=1)[0].rstrip(".")


def _parameters(strategy: type[Any], told: dict[str, str]) -> tuple[Parameter, ...]:
    if not is_dataclass(strategy):
        return ()
    try:
        hints = typing.get_type_hints(strategy)
    except Exception:  # of a plug-in, which may name anything
        hints = {}
    return tuple(
        Parameter(
            name=field.name, kind=_kind(hints.get(field.name, field.type)), default=_default(field),
            meaning=told.get(field.name, ""),
        )
        for field in fields(strategy)
        if field.init
    )  # fmt: skip


def _names(strategy: type[Any]) -> list[str]:
    return [field.name for field in fields(strategy) if field.init] if is_dataclass(strategy) else []


def _default(field: Any) -> str:
    if field.default_factory is not MISSING:
        return _written(field.default_factory())
    return "" if field.default is MISSING else _written(field.default)


def _written(value: Any) -> str:
    """A value as a policy's words have it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if is_dataclass(value) and not isinstance(value, type):
        from kvpolicy.registry import name_of

        try:
            return name_of(type(value))
        except ValueError:
            return repr(value)
    return str(value)


def _kind(hint: Any) -> str:
    """What a parameter may be, in words."""
    if typing.get_origin(hint) is Literal:
        return "|".join(_written(value) for value in typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_kind(option) for option in typing.get_args(hint))
    return _SHOWN.get(hint) or str(getattr(hint, "__name__", hint)).lower()
