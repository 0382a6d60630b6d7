"""`kvpolicy list`: all parts of policies by kind, with parameters and papers."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, NamedTuple

import typer

from kvpolicy.cli.arguments import Json, complete_part
from kvpolicy.cli.formatting import as_json, paragraph, terms
from kvpolicy.cli.strategy_docs import Description, Parameter, read
from kvpolicy.registry import BUILT_IN, QUESTIONS, SUMMARIES, WHOLE, Kind, described, either, names, whole_policy
from kvpolicy.text.errors import KVPolicyError


class Entry(NamedTuple):
    """A registered strategy.

    Attributes:
        kind: Its kind, such as `codec`, or `policy` if the name stands for a whole policy.
        name: Its name in a spec.
        described: Its documentation, or None if it cannot be loaded.
        error: Why it cannot be loaded.
    """

    kind: Kind | Literal["policy"]
    name: str
    described: Description | None
    error: str = ""


def list_(
    which: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help=f"{either(f'{kind}s' for kind in BUILT_IN)}, or the name of a strategy.",
            autocompletion=complete_part,
        ),
    ] = "",
    json: Json = False,
) -> None:
    """List the strategies of each kind; of a kind or a name, with their parameters and papers."""
    if not which and not json:
        print(overview())
        return
    found = entries(which)
    if json:
        print(as_json("list", {"strategies": [_facts(entry) for entry in found]}))
        return
    groups: dict[Kind | Literal["policy"], list[Entry]] = {}
    for entry in found:
        groups.setdefault(entry.kind, []).append(entry)
    blocks: list[str] = []
    for kind, some in groups.items():
        head = "A whole policy, which stands alone:" if kind == "policy" else _head(kind)
        blocks.append("\n".join([head, *(f"\n{_format(entry, full=bool(which))}" for entry in some)]))
    print("\n\n".join(blocks))


def overview() -> str:
    """Format the name and the first sentence of every strategy; built-in ones are not imported for it."""
    blocks: list[str] = []
    for kind in BUILT_IN:
        said = [(name, SUMMARIES.get(name) or _first_sentence(kind, name)) for name in names(kind)]
        blocks.append(f"{_head(kind)}\n{terms(said)}")
    hint = (
        "kvpolicy list KIND and kvpolicy list NAME describe parameters and papers, kvpolicy explain POLICY a whole "
        f"policy. Names of whole policies: {', '.join(WHOLE)}."
    )
    return "\n\n".join([*blocks, paragraph(hint)])


def _first_sentence(kind: Kind, name: str) -> str:
    """The summary of a strategy of another package, or the reason why it cannot be loaded."""
    entry = _entry(kind, name)
    return f"Cannot be loaded: {entry.error}" if entry.described is None else entry.described.summary


def entries(which: str = "") -> list[Entry]:
    """Return the strategies of a kind, the strategy or whole policy of a name, or all strategies.

    Raises:
        KVPolicyError: If there is no such kind or name.
    """
    from kvpolicy.registry import lookup, suggest

    plural = which.removesuffix("s").lower()
    if not which or plural in BUILT_IN:
        return [_entry(kind, name) for kind in BUILT_IN if plural in ("", kind) for name in names(kind)]
    if which in WHOLE:
        return [Entry("policy", which, read(whole_policy(which).OPTIONS))]
    if which not in names():
        plurals = [f"{k}s" for k in BUILT_IN]
        suggestion = suggest(which, [*plurals, *names(), *WHOLE]) if which else "."
        if suggestion == ".":
            suggestion = "; try kvpolicy list for all names."
        raise KVPolicyError(f"KIND must be {', '.join(plurals)} or the name of a strategy, got {which!r}{suggestion}")
    return [_entry(lookup(which)[0], which)]


def _entry(kind: Kind, name: str) -> Entry:
    from kvpolicy.registry import lookup

    try:
        return Entry(kind, name, read(lookup(name)[1]))
    except ValueError as error:  # a broken plug-in must not hide the others
        return Entry(kind, name, None, " ".join(str(error).split()))


def _head(kind: Kind) -> str:
    return paragraph(f"{described(kind).capitalize()}s: {QUESTIONS[kind]}")


def _format(entry: Entry, *, full: bool) -> str:
    """Format a strategy; in `full` with the whole description, and the meaning of each parameter."""
    if entry.described is None:
        return f"  {entry.name}\n{paragraph(f'Cannot be loaded: {entry.error}', 4)}"
    found = entry.described
    own = [parameter for parameter in found.parameters if parameter.name != "base"]
    base = next((parameter.default for parameter in found.parameters if parameter.name == "base"), "")
    lines = [f"  {entry.name}", paragraph(found.summary, 4)]
    if base:
        wraps = f"Wraps another {entry.kind}: {entry.name}/NAME, by default {entry.name}/{base}."
        lines.append(paragraph(wraps, 4))
    if found.divides_heads:
        lines.append(paragraph(f"May wrap a head allocator: {entry.name}/NAME.", 4))
    if full:
        lines += [paragraph(part, 4) for part in found.idea.split("\n\n") if part]
    if full and own:
        lines.append("    Parameters:")
        meanings = [f"{each.meaning} ({each.kind})" if each.meaning else f"({each.kind})" for each in own]
        lines.append(
            terms([(f"{each.name}={each.default}", said) for each, said in zip(own, meanings, strict=True)], 6)
        )
    elif own:
        lines.append(paragraph("; ".join(map(_brief, own)), 4, 6))
    if found.source:
        lines.append(paragraph(f"Source: {found.source}.", 4, 6))
    return "\n".join(lines)


def _brief(parameter: Parameter) -> str:
    """Format a parameter with its default, and its other values if they are a fixed set."""
    values = parameter.kind.split("|") if "|" in parameter.kind else []
    others = [value for value in values if value != parameter.default]
    return f"{parameter.name}={parameter.default}" + (f" (or {', '.join(others)})" if others else "")


def _facts(entry: Entry) -> dict[str, Any]:
    head: dict[str, Any] = {"name": entry.name, "kind": entry.kind}
    if entry.described is None:
        return head | {"error": entry.error}
    return head | dataclasses.asdict(entry.described) | {"arxiv": entry.described.arxiv}
