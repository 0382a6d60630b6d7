"""`kvpolicy list`: every allocator, selector and codec, with parameters and papers."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, NamedTuple

import typer

from kvpolicy.cli.printing import as_json, paragraph, terms
from kvpolicy.cli.strategies import Description, Parameter, read
from kvpolicy.cli.words import Json, complete_part
from kvpolicy.spec.errors import KVPolicyError

QUESTIONS = {
    "allocator": "how many tokens may each layer keep?",
    "selector": "which tokens are these?",
    "codec": "how is a kept token stored?",
}
"""What each kind of part answers."""


class Entry(NamedTuple):
    """A registered strategy; `error` says why it cannot be read."""

    kind: str
    name: str
    described: Description | None
    error: str = ""


def list_(
    which: Annotated[
        str,
        typer.Argument(
            metavar="KIND", help="allocators, selectors or codecs; or a name.", autocompletion=complete_part
        ),
    ] = "",
    json: Json = False,
) -> None:
    """List the parts that a policy can have, with their parameters."""
    found = entries(which)
    if json:
        print(as_json("list", {"strategies": [_facts(entry) for entry in found]}))
        return
    print("\n\n".join(_group(kind, [e for e in found if e.kind == kind], which) for kind in _kinds(found)))
    if not which:
        print(
            f"\n{paragraph('What a parameter means: kvpolicy list NAME. What a policy does: kvpolicy explain POLICY.')}"
        )


def entries(which: str = "") -> list[Entry]:
    """The strategies of a kind, the one of a name, or all.

    Raises:
        KVPolicyError: Where there is no such kind and no such name.
    """
    from kvpolicy.registry import kinds, lookup, names, suggest

    kind = which.removesuffix("s").lower()
    if not which or kind in kinds():
        wanted = [(k, name) for k in kinds() for name in names(k) if kind in ("", k)]
        return [_entry(k, name) for k, name in wanted]
    if which not in names():
        known = [*(f"{k}s" for k in kinds()), *names()]
        raise KVPolicyError(
            f"There is no kind of part and no strategy called {which!r}{suggest(which, known)} "
            "Give allocators, selectors, codecs, or a name that `kvpolicy list` shows."
        )
    return [_entry(lookup(which)[0], which)]


def _entry(kind: str, name: str) -> Entry:
    from kvpolicy.registry import lookup

    try:
        return Entry(kind, name, read(lookup(name)[1]))
    except ValueError as error:  # a plug-in that is broken keeps no other from being listed
        return Entry(kind, name, None, " ".join(str(error).split()))


def _kinds(found: list[Entry]) -> list[str]:
    return list(dict.fromkeys(entry.kind for entry in found))


def _group(kind: str, found: list[Entry], which: str) -> str:
    head = paragraph(f"{kind.capitalize()}s: {QUESTIONS.get(kind, '')}")
    return "\n".join([head, *(f"\n{_shown(entry, full=bool(which))}" for entry in found)])


def _shown(entry: Entry, *, full: bool) -> str:
    if entry.described is None:
        return f"  {entry.name}\n{paragraph(f'Cannot be loaded: {entry.error}', 4)}"
    found = entry.described
    own = [p for p in found.parameters if p.name != "base"]
    base = next((p.default for p in found.parameters if p.name == "base"), "")
    lines = [f"  {entry.name}", paragraph(found.summary, 4)]
    lines += [paragraph(f"Wraps another: {entry.name}/NAME, by default {entry.name}/{base}.", 4)] if base else []
    if full:
        lines += [paragraph(part, 4) for part in found.idea.split("\n\n") if part]
        lines += ["    Parameters:", terms([(f"{p.name}={p.default}", _meaning(p)) for p in own], 6)] if own else []
    else:
        lines += [paragraph("; ".join(map(_brief, own)), 4, 6)] if own else []
    lines += [paragraph(f"Source: {found.source}.", 4, 6)] if found.source else []
    return "\n".join(lines)


def _brief(parameter: Parameter) -> str:
    """A parameter's default, and the other words that it may be."""
    others = [word for word in parameter.kind.split("|") if word != parameter.default] if "|" in parameter.kind else []
    return f"{parameter.name}={parameter.default}" + (f" (or {', '.join(others)})" if others else "")


def _meaning(parameter: Parameter) -> str:
    return f"{parameter.meaning} ({parameter.kind})" if parameter.meaning else f"({parameter.kind})"


def _facts(entry: Entry) -> dict[str, Any]:
    head: dict[str, Any] = {"name": entry.name, "kind": entry.kind}
    if entry.described is None:
        return head | {"error": entry.error}
    return head | dataclasses.asdict(entry.described) | {"arxiv": entry.described.arxiv}
