"""Model families and what the tests run of each: the tables of docs/guide/supported.md.

`features.yaml` has the list, which a test compares with the cases of the tests that it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml

from kvpolicy_eval.common.markdown import table


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """Something that a family can be run with.

    Attributes:
        name: Its key in `features.yaml`.
        title: Head of its column.
        meaning: What the tests require of it.
        tests: The files of these tests.
        families: The families that a test runs with it.
    """

    name: str
    title: str
    meaning: str
    tests: tuple[str, ...]
    families: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """The content of `features.yaml`.

    Attributes:
        families: What people call each family, by its name in the tests.
        features: In the order of the columns.
    """

    families: dict[str, str]
    features: tuple[Feature, ...]

    def table(self) -> str:
        """Families by features: `yes` where a test runs both, and an empty cell where none does."""
        rows = [
            [name, f"`{family}`", *("yes" if family in feature.families else "" for feature in self.features)]
            for family, name in self.families.items()
        ]
        return table(["models", "family", *(feature.title for feature in self.features)], rows)

    def tests(self) -> str:
        """Requirements of the tests of each feature, and where these are."""
        rows = [
            [feature.title, feature.meaning, ", ".join(f"`{path}`" for path in feature.tests)]
            for feature in self.features
        ]
        return table(["column", "what the tests require", "tests"], rows)


def load() -> Features:
    """Read `features.yaml`.

    Raises:
        ValueError: If a feature has none or both of `only` and `except`, or names a family that is not listed.
    """
    return read(yaml.safe_load((files("kvpolicy_eval.catalog") / "features.yaml").read_text(encoding="utf-8")))


def read(content: Mapping[str, Any]) -> Features:
    """Validate the content of `features.yaml`.

    Raises:
        ValueError: As for `load`.
    """
    families = dict(content["families"])
    return Features(
        families=families,
        features=tuple(_feature(name, found, frozenset(families)) for name, found in content["features"].items()),
    )


def _feature(name: str, found: Mapping[str, Any], families: frozenset[str]) -> Feature:
    if ("only" in found) == ("except" in found):
        raise ValueError(f"The feature {name} of features.yaml must have one of 'only' and 'except', got {[*found]}.")
    named = frozenset(found.get("only", found.get("except")))
    if unknown := named - families:
        raise ValueError(f"The feature {name} of features.yaml must name families of its list, got {min(unknown)!r}.")
    return Feature(
        name=name,
        title=found["title"],
        meaning=found["meaning"],
        tests=tuple(found["tests"]),
        families=named if "only" in found else families - named,
    )
