"""The kinds of the board's rows: of those of the registry, and of parts of other packages."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest

from kvpolicy import H2O, registry
from kvpolicy.text.arguments import named_options
from kvpolicy_eval.board.policies import CODECS, SELECTOR, entries, kind_of


@named_options
@dataclass(frozen=True, kw_only=True, slots=True)
class Mine(H2O):
    """A selector of another package."""


def test_listed_parts_have_the_kind_of_their_section() -> None:
    single = [entry for entry in entries() if entry.kind != "combination"]
    other = [entry.spec for entry in single if kind_of(entry.spec) != entry.kind]
    # Codecs that need another selector than `SELECTOR` are known by name.
    assert all(
        spec.partition("+")[0] != SELECTOR and spec.rpartition("+")[2] in {*CODECS.values(), *registry.CODECS}
        for spec in other
    )
    assert len(single) > 70 and len(other) < 8


def test_an_own_selector_is_a_selector(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("mine", f"{__name__}:Mine", "kvpolicy.selectors")
    monkeypatch.setattr(registry, "_entry_points", lambda: [point])
    monkeypatch.setattr(
        registry, "_load", lambda name, target, load=registry._load: Mine if name == "mine" else load(name, target)
    )
    registry._table.cache_clear()
    try:
        assert kind_of("mine") == "selector"
        assert kind_of("mine+kivi") == kind_of("squeeze+mine") == "combination"
    finally:
        registry._table.cache_clear()
