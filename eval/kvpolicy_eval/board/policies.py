"""Policies of the board: every method of the registry, and combinations of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from kvpolicy import Policy, registry
from kvpolicy.hf.attachment import Hold
from kvpolicy_eval.common.codecs import selector_for

Library = Literal["kvpress", "transformers"]
Kind = (
    Literal["all tokens", "selector", "allocator", "head allocator", "merger", "codec", "reader", "combination"]
    | Library
)

SELECTOR = "snapkv"
"""Selector that allocators, mergers and codecs are combined with."""

CODECS = {
    "tokenwise": "tokenwise:bits=4",
    "kivi": "kivi:bits=2",
    "kvquant": "kvquant:bits=3:calibration={model}",
    "turboquant": "turboquant:bits=4",
    "csr": "csr:nnz=8:dictionary={model}",
    "lowrank": "lowrank:rank=16:key_space=unrotated:calibration={model}",
}
"""Codecs with options; others have their defaults. `{model}` names the calibration of the model."""

SELECTORS = {
    "qfilters": "qfilters:file={model}",
    "triattention": "triattention:file={model}",
    "kvzap": "kvzap:file={model}:window=16",
    "defensive": "defensive:kernel=7",
    "dropkv": "dropkv:kernel=7",
    "critical": "critical/snapkv",
    "caote": "caote/h2o",
    "chunk": "chunk/snapkv",
    "fair": "fair/snapkv",
}
"""Selectors with options, and wrappers.

Values of the tasks have four tokens, which a narrow pooling loses; a window of 128 is as long as many of their budgets.
"""

ALLOCATORS = {"simlayer": "simlayer:recent=16:threshold=0.5"}
"""Allocators with options: the prompts are shorter than the tokens that a lazy layer keeps by default."""

VARIANTS = ("snapkv:window=8", "expected:decode=grow:moments=prompt", "keydiff:decode=grow")
"""Selectors once more, with options that change what they hold."""

HEAD_ALLOCATORS = {"duo": "duo:file={model}"}
"""Head allocators with options."""

READERS = {
    "quest": "quest:dense=0",
    "labels": "labels:dense=0",
    "loki": "loki:channels=16:calibration={model}",
    "reuse": "reuse/quest",
}
"""Readers with options."""

COMBINATIONS = (
    "squeeze+kvcrush/snapkv",
    "uniform/adakv+kvzip",
    "uniform/adakv+kvzap:file={model}:window=16",
    "kvcompose+kvzip",
    "global/adakv+kvzip",
    "uniform/adakv+defensive:kernel=7",
    "uniform/adakv+critical/snapkv:decode=grow",
    "uniform/adakv+h2o",
    "uniform/adakv+expected:decode=grow:moments=prompt",
    "uniform/adakv+snapkv+tokenwise:bits=4",
    "uniform/adakv+kvzip+tokenwise:bits=4",
    "squeeze+kvcrush/snapkv+tokenwise:bits=4",
    "h2o+tokenwise:bits=4",
    "kvzip+tokenwise:bits=4",
    "snapkv+think/tokenwise:bits=4",
)

HELD_IN_CODES = "uniform/adakv+kvzip+tokenwise:bits=4"
"""Combination that is measured once more, with prompts that wait for their replay in codes."""


class Entry(NamedTuple):
    """One row of the board: a policy, or a method of another library.

    Attributes:
        spec: Without a budget; a reader's has the place `{read}` for the fraction of the slots that it reads.
        kind: Kind of the method that it shows; the library for a method of another one, whose spec is its code.
        hold: How a prompt is held that waits, as `hold` of `kvpolicy.attach`.
    """

    spec: str
    kind: Kind
    hold: Hold = "plain"

    @property
    def name(self) -> str:
        """Name of the row: the spec, and how a prompt is held if not as keys and values."""
        return self.spec if self.hold == "plain" else f"{self.spec}, hold={self.hold}"

    @property
    def by_bytes(self) -> bool:
        """Whether its budget is a number of bytes; the full cache has none, and readers hold everything."""
        return self.kind not in ("all tokens", "reader")

    @property
    def is_peer(self) -> bool:
        """Whether it is a method of another library."""
        return self.kind in get_args(Library)

    def at(self, share: float) -> str:
        """The spec at a fraction of what the full cache's step reads.

        >>> Entry("full+quest:read={read}", "reader").at(0.1)
        'full+quest:read=0.1'
        """
        return self.spec.replace("{read}", f"{share:g}")


def kind_of(spec: str) -> Kind:
    """The kind of what a policy shows: its only part, or the only one beside `SELECTOR`.

    Args:
        spec: Without a budget; the parts may be of other packages.

    >>> kind_of("tova"), kind_of("snapkv+kivi"), kind_of("uniform/adakv+snapkv"), kind_of("squeeze+h2o+kivi")
    ('selector', 'codec', 'head allocator', 'combination')
    """
    policy = Policy.parse(spec.replace("{read}", "0.5"))
    default = Policy()
    own: list[Kind] = []
    if policy.heads is not None:
        own.append("head allocator")
    elif policy.allocator != default.allocator:
        own.append("allocator")
    rest: tuple[Kind, ...] = ("merger", "codec", "reader")
    own.extend(kind for kind in rest if getattr(policy, kind) != getattr(default, kind))
    beside = (default.selector, Policy.parse(SELECTOR).selector)
    if len(own) > 1 or (own and policy.selector not in beside):
        return "combination"
    alone: Kind = "all tokens" if policy.selector == default.selector else "selector"
    return own[0] if own else alone


def within_bytes(listed: Sequence[Entry]) -> list[Entry]:
    """Entries that hold a budget of bytes; a policy that is listed for each way to hold a prompt counts once."""
    return [entry for entry in listed if entry.by_bytes and entry.hold == "plain"]


def entries(model: str = "tiny") -> list[Entry]:
    """Everything that the board compares.

    Args:
        model: The model; methods that need a calibration get the one of this model.

    >>> [entry.spec for entry in entries()][:3]
    ['full', 'window', 'streaming']
    """
    found = [Entry("full", "all tokens")]
    found += [Entry(SELECTORS.get(name, name), "selector") for name in registry.SELECTORS if name != "full"]
    found += [Entry(spec, "selector") for spec in VARIANTS]
    found += [
        Entry(f"{ALLOCATORS.get(name, name)}+{SELECTOR}", "allocator")
        for name in registry.ALLOCATORS
        if name != "uniform"
    ]
    found += [
        Entry(f"uniform/{HEAD_ALLOCATORS.get(name, name)}+{SELECTOR}", "head allocator")
        for name in registry.HEAD_ALLOCATORS
        if name != "even"
    ]
    found += [Entry(f"{SELECTOR}+{name}", "merger") for name in registry.MERGERS if name != "drop"]
    found += [
        Entry(f"{selector_for(name, SELECTOR)}+{CODECS.get(name, name)}", "codec")
        for name in registry.CODECS
        if name != "plain"
    ]
    found += [Entry(spec, "combination") for spec in COMBINATIONS]
    found += [Entry(HELD_IN_CODES, "combination", "codes")]
    found += [
        Entry(f"full+{READERS.get(name, name)}:read={{read}}", "reader") for name in registry.READERS if name != "all"
    ]
    return [entry._replace(spec=entry.spec.replace("{model}", model)) for entry in found]
