"""The classes of transformers that are checked: two of its mappings, by name."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from importlib.resources import files
from typing import Any, NamedTuple

CAUSAL = "causal"
IMAGE = "image"
KINDS = (CAUSAL, IMAGE)
"""Text models, and models that also take pictures."""


class Entry(NamedTuple):
    """A name in one of the mappings.

    Attributes:
        kind: One of `KINDS`.
        name: The type of its config, such as `llama`.
    """

    kind: str
    name: str

    @property
    def key(self) -> str:
        """Its key among results.

        >>> Entry("causal", "llama").key
        'causal llama'
        """
        return f"{self.kind} {self.name}"


def classes() -> Mapping[str, Mapping[str, str]]:
    """The names of the model classes of the installed transformers, by kind and name."""
    from transformers.models.auto import modeling_auto as auto

    return {
        CAUSAL: auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        IMAGE: auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }


def installed() -> list[Entry]:
    """The entries of the installed transformers, by kind and name."""
    return [Entry(kind, name) for kind, names in classes().items() for name in sorted(names)]


def counted() -> list[Entry]:
    """The entries that counts are over, of transformers 5.23; a release may have dropped some.

    >>> len(counted())
    286
    """
    content = _content()
    return [Entry(kind, name) for kind in KINDS for name in content[kind]]


def counted_version() -> str:
    """The version of transformers that `counted` is of.

    >>> counted_version()
    '5.23.0'
    """
    return _content()["transformers"]


def newer() -> list[Entry]:
    """Entries of the installed transformers that the counted version did not have."""
    known = set(counted())
    return [entry for entry in installed() if entry not in known]


def named(names: Collection[str]) -> list[Entry]:
    """Installed entries of some names; all without names.

    Raises:
        ValueError: If transformers has no such name.
    """
    found = installed()
    if unknown := [name for name in names if all(name != entry.name for entry in found)]:
        raise ValueError(f"The name must be one of transformers' causal or image-text models, got {unknown[0]!r}.")
    return [entry for entry in found if not names or entry.name in names]


def _content() -> dict[str, Any]:
    return json.loads((files("kvpolicy_eval.families") / "entries.json").read_text(encoding="utf-8"))
