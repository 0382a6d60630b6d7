"""The parts of a policy by kind, and whether an object is one."""

from __future__ import annotations

from kvpolicy.protocols import Allocator, Codec, Merger, Reader, Selector
from kvpolicy.registry import Kind
from kvpolicy.text.errors import KVPolicyTypeError
from kvpolicy.text.tables import shorten
from kvpolicy.text.validation import check_instance

PROTOCOLS: dict[Kind, type] = {
    "allocator": Allocator,
    "selector": Selector,
    "merger": Merger,
    "codec": Codec,
    "reader": Reader,
}
"""The protocol of each kind of part, in the order in which a spec is written."""


def check_part(kind: Kind, part: object) -> None:
    """Raise KVPolicyTypeError if a part is not of a kind."""
    check_instance(kind, part)
    if hasattr(part, "needs"):  # of an earlier version: without this, it would be shown nothing
        raise KVPolicyTypeError(
            f"The {kind} must hand over what it needs to see in statistics, got {shorten(repr(part))}, which has "
            "needs; try AttentionSum() or another one of kvpolicy.statistics."
        )
    if isinstance(part, PROTOCOLS[kind]):
        return
    kinds = kinds_of(part)
    if kinds:
        advice = f"pass it as {kinds[0]}="
    elif isinstance(part, str):
        advice = "read a spec with Policy.parse"
    else:
        advice = describe_missing(part, kind)
    raise KVPolicyTypeError(
        f"The {kind} must implement kvpolicy.protocols.{kind.capitalize()}, got {shorten(repr(part))}; {advice}."
    )


def kinds_of(part: object) -> list[Kind]:
    """The kinds whose protocol a part implements."""
    if isinstance(part, type):
        return []
    return [kind for kind, protocol in PROTOCOLS.items() if isinstance(part, protocol)]


def missing(part: object, kind: Kind) -> list[str]:
    """The members of a kind's protocol that a part lacks, sorted.

    Examples:
        >>> from kvpolicy.selectors.full import KeepAll
        >>> missing(KeepAll(), "codec")
        ['check', 'layout', 'stages', 'traits']
    """
    members = {*dir(PROTOCOLS[kind]), *PROTOCOLS[kind].__annotations__}
    return sorted(name for name in members if not name.startswith("_") and not hasattr(part, name))


def describe_missing(part: object, kind: Kind) -> str:
    """The members that a part lacks, as the end of a sentence.

    Examples:
        >>> from kvpolicy.selectors.full import KeepAll
        >>> describe_missing(KeepAll(), "allocator")
        'it lacks budgets, layer_metric of kvpolicy.protocols.Allocator'
    """
    return f"it lacks {', '.join(missing(part, kind))} of kvpolicy.protocols.{kind.capitalize()}"
