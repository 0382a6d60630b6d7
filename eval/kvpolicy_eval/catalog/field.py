"""The map of the field: systems for the KV cache, the presses of kvpress, and what of each is here.

`field.yaml` has one entry for each; `Entry` documents the keys.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from typing import Any

import yaml

from kvpolicy import Policy
from kvpolicy_eval.common.markdown import table

HERE = ("here", "variant")
"""Statuses of what a policy or a function of this project gives."""
NOT_HERE = ("trained", "architecture", "driver", "hardware", "engine", "not built")
"""Statuses of what nothing here gives: the reasons."""
STATUSES = (*HERE, "adapter", *NOT_HERE)
KINDS = (
    "layer budgets",
    "head budgets",
    "selector",
    "merger",
    "codec",
    "channels",
    "layers",
    "reader",
    "reuse",
    "serving",
    "speculation",
    "model",
    "benchmark",
    "wrapper",
)
"""Kinds of systems: what they decide, store, change or measure."""
COLUMNS = ["name", "year", "kind", "status", "as, and what differs"]
COMMON = ("uniform", "full")
"""Parts that complete a policy, and do not stand for the system that it gives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A system or a press.

    Attributes:
        name: Its name.
        kind: One of `KINDS`.
        status: One of `STATUSES`.
        arxiv: Identifier of its paper, which also tells the year.
        source: Address of its paper, if that is not on arXiv.
        year: Year of such a paper.
        policy: Spec that gives it; exactly one of this and `feature`, if the status is one of `HERE`.
        feature: What gives it and is no policy, such as a function; for an adapter, by default the press alone.
        page: Page that these link to; of a spec, the name of a method, by default its first part outside `COMMON`.
        nearest: Spec of what is nearest to it, if it is not here.
        note: What differs, or why it is not here.
    """

    name: str
    kind: str
    status: str
    arxiv: str = ""
    source: str = ""
    year: int | None = None
    policy: str = ""
    feature: str = ""
    page: str = ""
    nearest: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        """Check the entry.

        Raises:
            ValueError: If a field is wrong, contradicts another, or has a spec that is none.
        """
        self._require(self.kind in KINDS, "kind", f"one of {', '.join(KINDS)}", self.kind)
        self._require(self.status in STATUSES, "status", f"one of {', '.join(STATUSES)}", self.status)
        paper = not self.arxiv or (re.fullmatch(r"\d{4}\.\d{5}", self.arxiv) and not self.year and not self.source)
        self._require(bool(paper), "arxiv", "like 2404.04793, without year and source", self.arxiv)
        given = [text for text in (self.policy, self.feature) if text]
        here = self.status in HERE
        self._require(not (self.policy and self.feature), "policy and feature", "given one at a time", given)
        answered = bool(given) == here or self.status == "adapter"
        self._require(answered, "policy or feature", "given if it is here", given)
        self._require(not (here and self.nearest), "nearest", "left out if it is here", self.nearest)
        self._require(bool(self.page) or not self.feature, "page", "given beside feature", self.page)
        self._require(self.status in ("here", "adapter") or bool(self.note), "note", "given", self.note)
        for spec in (self.policy, self.nearest):
            if spec:
                Policy.parse(spec)

    def _require(self, condition: bool, field: str, wanted: str, value: object) -> None:
        if not condition:
            raise ValueError(f"{field} of {self.name} in field.yaml must be {wanted}, got {value!r}.")

    @property
    def published(self) -> str:
        """Year of its paper, on arXiv that of the first version; empty if not known."""
        return f"20{self.arxiv[:2]}" if self.arxiv else str(self.year or "")

    def row(self) -> list[str]:
        """Its row, with the columns `COLUMNS`; the name leads to the paper."""
        paper = f"https://arxiv.org/abs/{self.arxiv}" if self.arxiv else self.source
        name = f"[{self.name}]({paper})" if paper else self.name
        status = f"not here: {self.status}" if self.status in NOT_HERE else self.status
        return [name, self.published, self.kind, status, self._answer()]

    def _answer(self) -> str:
        """The part that gives it and how it differs, or why nothing does and what comes nearest."""
        said: list[str] = []
        if self.policy:
            said.append(_method_link(self.policy, self.page))
        elif self.feature:
            said.append(_link(self.feature, self.page))
        elif self.status == "adapter":
            said.append(_link(f"KVPressScorer({self.name}())", "extend/kvpress.md"))
        if self.note:
            said.append(self.note.removesuffix("."))
        if self.nearest:
            said.append(f"Nearest: {_method_link(self.nearest, self.page)}")
        return ". ".join(said)


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """All entries.

    Attributes:
        systems: Systems of papers.
        presses: The presses of kvpress.
        version: Version of kvpress that has these presses.
    """

    systems: tuple[Entry, ...]
    presses: tuple[Entry, ...]
    version: str

    def methods(self) -> set[str]:
        """Names of all parts of the policies that give a system or a press."""
        policies = [entry.policy for entry in (*self.systems, *self.presses)]
        return {name for policy in policies for name in part_names(policy)}


def load() -> Field:
    """Read `field.yaml`.

    Raises:
        ValueError: If an entry is wrong, a name occurs twice, or the presses are not those that kvpress exports.
    """
    content = yaml.safe_load((files("kvpolicy_eval.catalog") / "field.yaml").read_text(encoding="utf-8"))
    return read(content)


def read(content: Mapping[str, Any]) -> Field:
    """Validate the content of `field.yaml`.

    Raises:
        ValueError: As for `load`.
    """
    systems, presses = (tuple(_entry(found) for found in content[key]) for key in ("systems", "presses"))
    for entries in (systems, presses):
        twice = [name for name, count in Counter(entry.name for entry in entries).items() if count > 1]
        if twice:
            raise ValueError(f"{twice[0]} must occur once in field.yaml, got two entries.")
    exported = set(content["kvpress"]["exported"])
    if wrong := exported ^ {entry.name for entry in presses}:
        raise ValueError(f"The presses of field.yaml must be those of its list `exported`; see {min(wrong)}.")
    return Field(systems=systems, presses=presses, version=str(content["kvpress"]["version"]))


def table_of(entries: Sequence[Entry]) -> str:
    """The table of entries, and a line that counts them."""
    counts = Counter(entry.status if entry.status not in NOT_HERE else "not here" for entry in entries)
    counted = ", ".join(f"{counts[status]} {status}" for status in (*HERE, "adapter", "not here") if counts[status])
    return f"{table(COLUMNS, [entry.row() for entry in entries])}\n\n{len(entries)} entries: {counted}."


def part_names(spec: str) -> list[str]:
    """Names of the parts in a spec.

    Examples:
        >>> part_names("uniform/adakv+kvcrush:split=0.5/h2o+kivi:bits=4@0.2")
        ['uniform', 'adakv', 'kvcrush', 'h2o', 'kivi']
    """
    return [part.partition(":")[0] for part in re.split(r"[+/]", spec.partition("@")[0]) if part]


def _entry(found: Mapping[str, Any]) -> Entry:
    keys = {field.name for field in fields(Entry)}
    if unknown := sorted(set(found) - keys):
        raise ValueError(f"{found.get('name')} in field.yaml has the unknown key {unknown[0]!r}.")
    return Entry(**found)


def _method_link(spec: str, page: str = "") -> str:
    page = page or next(name for name in part_names(spec) if name not in COMMON)
    return _link(spec, f"methods/{page}.md")


def _link(text: str, target: str) -> str:
    return f"[`{text}`]({target})"
