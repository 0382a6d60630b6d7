"""The rooms of kvpolicy_eval: the order of their imports, and their READMEs."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import kvpolicy_eval
from tests.test_layout import _imported

PACKAGE = Path(kvpolicy_eval.__file__).parent
MAY_IMPORT: dict[str, set[str]] = {
    "configs": set(),
    "data": set(),
    "common": {"data"},
    # what users run
    "sweep": {"data"},
    "report": {"common", "sweep"},
    "peers": {"common", "data"},
    "bench": {"common", "data"},
    "gpu": {"bench", "common"},
    "real": {"common", "data"},
    "cli": {"sweep", "report", "peers"},
    # what trains the embedded model
    "train": {"common", "data"},
    # what fills the documentation
    "tables": {"common", "data", "sweep", "train"},
    "families": {"common"},
    "methods": {"common"},
    "pictures": {"common", "data"},
    "notebooks": {"pictures"},
    "board": {"bench", "common", "data", "peers", "pictures"},
    "catalog": {"board", "common", "methods", "pictures"},
}
"""Rooms that each room may import; a room comes after all rooms that it may import."""
USERS = ("sweep", "report", "peers", "bench", "gpu", "real", "cli")
INTERNAL = {"tables", "board", "families", "methods", "pictures", "notebooks", "catalog", "train"}


def module_name(path: Path) -> str:
    """Dotted name of a file of the package."""
    parts = [PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def imports(name: str, source: str) -> set[str]:
    """Modules of the package that a module imports, anywhere in its code.

    Names of modules in strings count too: they may be imported by `importlib` or run as a process.
    """
    tree = ast.parse(source)
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return (_imported(tree, SOURCES) | texts & SOURCES.keys()) - {PACKAGE.name, name}


def room(module: str) -> str:
    """Folder of a module, or its name if it is in no folder."""
    return module.split(".")[1]


GRAPH = {name: imports(name, source) for name, source in SOURCES.items() if name != PACKAGE.name}
ROOMS = {
    name: {room(target) for module in GRAPH if room(module) == name for target in GRAPH[module]} - {name}
    for name in MAY_IMPORT
}


@pytest.mark.parametrize(
    "line",
    [
        "def f():\n    from kvpolicy_eval.data import tasks",
        "if TYPE_CHECKING:\n    from kvpolicy_eval.data.tasks import LENGTHS",
        "import_module('kvpolicy_eval.data.tasks')",
    ],
)
def test_every_kind_of_import_counts(line: str) -> None:
    assert imports("kvpolicy_eval.sweep.made_up", line) == {"kvpolicy_eval.data.tasks"}


def test_every_module_is_in_a_known_room() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {room(module) for module in GRAPH} | folders == set(MAY_IMPORT)
    assert [path.name for path in sorted(PACKAGE.glob("*.py"))] == ["__init__.py", "cli.py"]


def test_rooms_import_only_what_precedes_them() -> None:
    order = list(MAY_IMPORT)
    for name, allowed in MAY_IMPORT.items():
        assert all(order.index(other) < order.index(name) for other in allowed), name
    assert {name: used - MAY_IMPORT[name] for name, used in ROOMS.items() if used - MAY_IMPORT[name]} == {}


def test_what_users_run_is_apart_from_the_documentation_and_the_training() -> None:
    apart = {*USERS, "data", "common"}
    assert not apart & INTERNAL and all(MAY_IMPORT[name] <= apart for name in apart)


def test_modules_import_in_no_circle() -> None:
    TopologicalSorter(GRAPH).prepare()


@pytest.mark.parametrize("name", [name for name in MAY_IMPORT if name != "cli"])
def test_every_room_says_what_it_may_import(name: str) -> None:
    text = (PACKAGE / name / "README.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {name}\n") and len(text.splitlines()) < 20
    (line,) = re.findall(r"^May import: (.*?)[.;]", text, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", line)) & set(MAY_IMPORT) == MAY_IMPORT[name]
    assert "\nBegin with " in text
