"""Names lead to classes and back; clashes and typos are told."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from importlib.metadata import EntryPoint

import pytest

from kvpolicy import KIVI, Policy, Uniform, registry


def test_entry_points_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading opens a file of every installed package."""
    read = importlib.metadata.entry_points
    calls: list[dict[str, str]] = []
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **group: calls.append(group) or read(**group))
    registry._table.cache_clear()
    assert registry.names() and registry.lookup("snapkv")
    assert len(calls) == 1


def test_every_built_in_name_leads_to_a_class_and_back() -> None:
    for name in registry.names():
        kind, cls = registry.lookup(name)
        assert name in registry.names(kind)
        assert registry.name_of(cls) == name
        assert cls.__dataclass_params__.frozen, name
        assert not hasattr(cls(), "__dict__"), f"strategies are slotted, {name} is not"


def test_kinds_are_the_parts_of_a_policy() -> None:
    parts = tuple(field.name for field in dataclasses.fields(Policy) if field.name != "budget")
    assert registry.kinds() == parts
    assert tuple(registry.BUILT_IN) == tuple(registry.QUESTIONS) == ("allocator", "head_allocator", *parts[1:])


def test_unknown_name_is_told_with_what_is_near_alone() -> None:
    said = r"^A strategy must have a registered name, got 'h20'; did you mean 'h2o'\?$"
    with pytest.raises(ValueError, match=said):
        registry.lookup("h20")
    with pytest.raises(ValueError, match=r"got 'xyzzy'; try a name that `kvpolicy list` shows\.$"):
        registry.lookup("xyzzy")
    with pytest.raises(ValueError, match="did you mean 'snapkv'"):
        registry.lookup("SnapKV")


def test_unregistered_class_has_no_name() -> None:
    class Mine:
        pass

    with pytest.raises(ValueError, match=r"Mine must be registered .*; add an entry point"):
        registry.name_of(Mine)


def test_entry_point_adds_a_name(plugins: list[EntryPoint]) -> None:
    plugins.append(EntryPoint("level", "kvpolicy:Uniform", "kvpolicy.allocators"))
    assert registry.lookup("level") == ("allocator", Uniform)
    assert "level" in registry.names("allocator")
    assert registry.name_of(Uniform) == "uniform"


def test_name_of_a_class_behind_a_re_export(plugins: list[EntryPoint]) -> None:
    plugins.append(EntryPoint("counter", "collections:Counter", "kvpolicy.codecs"))
    plugins.append(EntryPoint("deep", "importlib.metadata:EntryPoint", "kvpolicy.codecs"))
    plugins.append(EntryPoint("mapping", "typing:OrderedDict.__origin__", "kvpolicy.codecs"))
    assert registry.name_of(EntryPoint) == "deep"
    assert registry.name_of(registry.lookup("mapping")[1]) == "mapping"


@pytest.mark.parametrize("name", ["h2o", "kivi", "keepall"])
def test_taken_name_raises(plugins: list[EntryPoint], name: str) -> None:
    plugins.append(EntryPoint(name, "elsewhere:Thing", "kvpolicy.selectors"))
    with pytest.raises(
        ValueError, match=f"{name!r} must be registered once, got the .* and the selector elsewhere:Thing"
    ):
        registry.names()


def test_package_seen_twice_is_no_clash(plugins: list[EntryPoint]) -> None:
    plugins.extend([EntryPoint("level", "kvpolicy:Uniform", "kvpolicy.allocators")] * 2)
    assert registry.lookup("level")[1] is Uniform


@pytest.mark.parametrize("target", ["no_such_package:Thing", "kvpolicy.codecs:Nothing", "kvpolicy.codecs:kivi"])
def test_broken_entry_point_is_told(plugins: list[EntryPoint], target: str) -> None:
    plugins.append(EntryPoint("broken", target, "kvpolicy.codecs"))
    with pytest.raises(ValueError, match=r"'broken' (could not be imported from|must be a class)"):
        registry.lookup("broken")
    assert registry.lookup("kivi") == ("codec", KIVI), "others still work"
