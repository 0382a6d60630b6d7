"""The documentation of a strategy: its docstring and its fields, parsed for `list` and `explain`."""

from __future__ import annotations

import inspect
import re
import types
import typing
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, Literal

_SECTION = re.compile(r"(Args|Attributes|Example|Examples|Source|Differences?|Raises|Returns|Note|Notes):\s*")
_PARAMETER = re.compile(r" {4}(\w+): (.*)")
_TYPE_NAMES = {int: "integer", float: "number", str: "string", bool: "true or false", type(None): "none"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A parameter of a strategy.

    Attributes:
        name: Its name in a spec.
        kind: Its type, or the allowed values separated by `|`.
        default: Its default, as written in a spec.
        meaning: Its description in the docstring.
    """

    name: str
    kind: str
    default: str
    meaning: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """The documentation of a strategy.

    Attributes:
        summary: The first paragraph of its docstring.
        idea: The other paragraphs before the sections.
        parameters: Its parameters.
        source: The first sentence of the section `Source`, which cites the paper.
        wraps: Whether it wraps another strategy, as in `kvcrush/h2o`.
        divides_heads: Whether it wraps a head allocator, as in `uniform/adakv`.
    """

    summary: str
    idea: str
    parameters: tuple[Parameter, ...]
    source: str
    wraps: bool
    divides_heads: bool = False

    @property
    def arxiv(self) -> str:
        """The arXiv identifier of the paper, or an empty string."""
        found = re.search(r"arXiv:([0-9]{4}\.[0-9]{4,5})", self.source)
        return found.group(1) if found else ""


def read(strategy: type[Any]) -> Description:
    """Parse the documentation of a strategy; what is missing is left empty.

    >>> from kvpolicy.allocators.uniform import Uniform
    >>> read(Uniform).summary
    'Give every layer the same budget.'
    >>> from kvpolicy.allocators.pyramid import Pyramid
    >>> found = read(Pyramid)
    >>> found.arxiv, [(p.name, p.default, p.kind) for p in found.parameters]
    ('2406.02069', [('beta', '20.0', 'number')])
    """
    sections = _sections(strategy.__doc__ or "")
    head, _, idea = sections[""].strip().partition("\n\n")
    idea = idea.partition(">>>")[0]  # without examples
    meanings = _meanings(sections.get("Args", ""))
    return Description(
        summary=" ".join(head.split()),
        idea="\n\n".join(" ".join(part.split()) for part in idea.split("\n\n")).strip(),
        parameters=_parameters(strategy, meanings),
        source=_first_sentence(sections.get("Source", "")),
        wraps="base" in _names(strategy),
        divides_heads="heads" in _names(strategy),
    )


def attributes(kind: type[Any]) -> dict[str, str]:
    """The descriptions of the attributes of a class, in its docstring."""
    return _meanings(_sections(kind.__doc__ or "").get("Attributes", ""))


def _sections(docstring: str) -> dict[str, str]:
    """Split a docstring in Google style by its section headings; the text before them has an empty heading."""
    found: dict[str, list[str]] = {"": []}
    name = ""
    for line in inspect.cleandoc(docstring).splitlines():
        if match := _SECTION.match(line):
            name = match.group(1)
            line = line[match.end() :]
        found.setdefault(name, []).append(line)
    return {name: "\n".join(lines) for name, lines in found.items()}


def _meanings(text: str) -> dict[str, str]:
    """Return the description of each parameter in a section `Args`; descriptions may span several lines."""
    meanings: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if match := _PARAMETER.fullmatch(line):
            name = match.group(1)
            meanings[name] = match.group(2)
        elif name:
            meanings[name] += " " + line.strip()
    return {name: meaning.strip() for name, meaning in meanings.items()}


def _first_sentence(text: str) -> str:
    """Return the text up to the first `.`, `:` or `;` that is outside of parentheses and follows a word."""
    joined = " ".join(text.split())
    return re.split(r"(?<=[\w)])[.:;]\s(?![^()]*\))", joined, maxsplit=1)[0].rstrip(".")


def _parameters(strategy: type[Any], meanings: dict[str, str]) -> tuple[Parameter, ...]:
    if not is_dataclass(strategy):
        return ()
    try:
        hints = typing.get_type_hints(strategy)
    except Exception:  # an annotation of another package may not be resolvable
        hints = {}
    return tuple(
        Parameter(
            name=field.name,
            kind=_kind(hints.get(field.name, field.type)),
            default=_default(field),
            meaning=meanings.get(field.name, ""),
        )
        for field in fields(strategy)
        if field.init and field.name != "heads"
    )


def _names(strategy: type[Any]) -> list[str]:
    return [field.name for field in fields(strategy) if field.init] if is_dataclass(strategy) else []


def _default(field: Any) -> str:
    if field.default_factory is not MISSING:
        return _in_spec(field.default_factory())
    return "" if field.default is MISSING else _in_spec(field.default)


def _in_spec(value: Any) -> str:
    """Format a value as it is written in a spec."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if is_dataclass(value) and not isinstance(value, type):
        from kvpolicy.registry import name_of

        try:
            return name_of(type(value))
        except ValueError:  # a strategy without a name can be passed as an object only
            return repr(value)
    return str(value)


def _kind(hint: Any) -> str:
    """Describe an annotation: the values of a literal, the options of a union, or the name of a type."""
    if typing.get_origin(hint) is Literal:
        return "|".join(_in_spec(value) for value in typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_kind(option) for option in typing.get_args(hint))
    return _TYPE_NAMES.get(hint) or str(getattr(hint, "__name__", hint)).lower()
