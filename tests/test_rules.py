"""The law: what the engine knows by name has at least three users among the registered parts, or is an object.

A part that wants something of its own hands over an object that knows how to do it, such as a statistic. A flag of
traits, or an optional ability, is a name that the engine must know: it is worth its place where several methods share
it. What is left to turn into objects is listed here, and the lists may only become shorter.

`python -m tests.test_rules` prints the users of every flag and ability.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Protocol, get_args, get_type_hints

import pytest

from kvpolicy import protocols, registry
from kvpolicy.protocols import MergerTraits, ReaderTraits, Traits

PACKAGE = Path(registry.__file__).parent
TRAITS = (Traits, ReaderTraits, MergerTraits)
USERS = 3

FLAGS_TO_GO: set[str] = set()
ABILITIES_TO_GO: set[str] = set()
DOORS = 38
"""Modules of the engine that other rooms import; the goal is 12."""

if not (PACKAGE / "README.md").is_file() and not (PACKAGE / "engine" / "README.md").is_file():
    pytest.skip("the source tree is not here", allow_module_level=True)


@cache
def parts() -> dict[str, type[Any]]:
    """The class of each registered part, by its name."""
    found: dict[str, type[Any]] = {}
    for table in registry.BUILT_IN.values():
        for name, path in table.items():
            module, _, kind = path.partition(":")
            found[name] = getattr(importlib.import_module(module), kind)
    return found


def keywords(cls: type[Any], calls: set[str]) -> set[str]:
    """Names of keyword arguments in calls of some functions, in a class and in what it inherits but the interfaces."""
    names: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith("kvpolicy.") and not base.__module__.startswith("kvpolicy.protocols"):
            for node in ast.walk(ast.parse(inspect.getsource(base))):
                if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in calls:
                    names |= {str(each.arg) for each in node.keywords}
    return names


def is_object(kind: type[Any], field: str) -> bool:
    """Whether a field holds an object that the part hands over, or none."""
    hint = get_type_hints(kind)[field]
    return type(None) in get_args(hint) and any(isinstance(each, type(Protocol)) for each in get_args(hint))


def users_of_flags() -> dict[str, list[str]]:
    """Which parts set each field of the traits."""
    flags = {kind: {each for each in kind._fields if not is_object(kind, each)} for kind in TRAITS}
    users: dict[str, list[str]] = {f"{kind.__name__}.{flag}": [] for kind in TRAITS for flag in flags[kind]}
    for name, cls in parts().items():
        for kind in TRAITS:
            for flag in keywords(cls, {kind.__name__, "_replace"}) & flags[kind]:
                users[f"{kind.__name__}.{flag}"].append(name)
    return users


def abilities() -> Iterator[tuple[registry.Kind, type[Any]]]:
    """The kind and the class of each optional ability: those that the interface of a kind names as such."""
    for kind in registry.BUILT_IN:
        text = str(inspect.getdoc(getattr(protocols, kind.title().replace("_", ""))))
        for listed in re.findall(r"ptional abilit(?:ies are|y is)\s([^.]*)\.", text):
            for name in re.findall(r"`(\w+)`", listed):
                yield kind, getattr(protocols, name)


def users_of_abilities() -> dict[str, list[str]]:
    """Which parts have each ability of their own, not by what an interface has for all."""
    users: dict[str, list[str]] = {}
    for kind, ability in abilities():
        members = {name for name in vars(ability) if not name.startswith("_")} - {*vars(Protocol)}
        users[ability.__name__] = [
            name
            for name in registry.BUILT_IN[kind]
            if members <= {each for base in parts()[name].__mro__ for each in own(base)}
        ]
    return users


def own(base: type[Any]) -> set[str]:
    """What a class that is no interface defines."""
    return set() if base.__module__.startswith(("kvpolicy.protocols", "typing")) else {*vars(base)}


def few(users: dict[str, list[str]]) -> set[str]:
    return {name for name, found in users.items() if len(found) < USERS}


def test_a_flag_has_three_users() -> None:
    assert few(users_of_flags()) == FLAGS_TO_GO, "hand over an object, or take the flag off the list"


def test_an_ability_has_three_users() -> None:
    assert few(users_of_abilities()) == ABILITIES_TO_GO, "hand over an object, or take the ability off the list"


def test_the_engine_has_few_doors() -> None:
    """So that its modules may change: others import what is meant for them."""
    doors: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "engine":
            doors |= {*re.findall(r"^\s*from (kvpolicy\.engine\.\w+) import", path.read_text("utf-8"), re.MULTILINE)}
    assert len(doors) <= DOORS, sorted(doors)


def main() -> None:
    """Print the users."""
    for users in (users_of_flags(), users_of_abilities()):
        for name, found in sorted(users.items(), key=lambda pair: len(pair[1])):
            print(f"{len(found):3} {name}: {', '.join(found[:6])}")
        print(f"{len(few(users))} of {len(users)} have fewer than {USERS}")


if __name__ == "__main__":
    main()
