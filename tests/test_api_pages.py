"""The reference lists every public name, and each says what it takes, gives back, refuses and comes from."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.doc_blocks import DOCS

if not DOCS.is_dir():
    pytest.skip("the docs are not installed", allow_module_level=True)

PUBLIC = [
    "kvpolicy",
    "kvpolicy.adapters",
    "kvpolicy.calibration",
    "kvpolicy.helpers",
    "kvpolicy.plots",
    "kvpolicy.protocols",
    "kvpolicy.testing",
    "kvpolicy_deepspeed",
    "kvpolicy_vllm",
]
"""Modules whose names are public, all of them."""
OWN = {"drop", "even", "uniform", "full", "window", "plain", "tokenwise", "all"}
"""Methods that no paper claims."""


def listed() -> list[str]:
    pages = sorted((DOCS / "api").glob("*.md"))
    return [
        path for page in pages for path in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]


def found(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def names(module: str) -> Iterator[str]:
    """What a module offers: names that are its own, or that it imports in order to offer them."""
    home = importlib.import_module(module)
    offers = (module in PUBLIC and hasattr(home, "__path__")) or module == "kvpolicy.helpers"
    for name in dir(home):
        thing = getattr(home, name)
        typing = not callable(thing) or getattr(thing, "__module__", "").partition(".")[0] != module.partition(".")[0]
        own = offers or getattr(thing, "__module__", "") == module
        if not (name.startswith("_") or isinstance(thing, ModuleType) or typing or not own):
            yield name


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_listed(module: str) -> None:
    have = [found(path) for path in listed() if path.startswith(module.partition(".")[0])]
    missing = [
        name for name in names(module) if not any(getattr(importlib.import_module(module), name) is one for one in have)
    ]
    assert not missing


def test_nothing_is_listed_twice() -> None:
    assert len(listed()) == len(set(listed()))


def test_listed_names_are_there_and_documented() -> None:
    for path in listed():
        thing = found(path)
        if not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue  # an alias of a type, whose own string stands below it
        text = inspect.getdoc(thing) or ""
        assert text and len(text.splitlines()[0]) <= 120, path
        assert ">>>" not in text or "Examples:" in text, f"{path}: without 'Examples:' a page shows code as a quotation"
        taken = arguments(thing)
        said = set(re.findall(r"^ {4}\*{0,2}(\w+)(?: \(.*\))?:", text, re.MULTILINE))
        assert not taken or not (taken - said) or len(taken) == 1, f"{path} does not say what {taken - said} is"
        assert "Raises:" in text or not raises(thing), f"{path} does not say what it raises"


def arguments(thing: Any) -> set[str]:
    """What a caller gives; a protocol takes nothing, `attach` makes a handle, and lm-eval's guide has its model's."""
    ours = thing.__module__.startswith("kvpolicy.") and thing.__name__ != "Handle"
    if inspect.isclass(thing) and (getattr(thing, "_is_protocol", False) or not ours):
        return set()
    try:
        return {name for name in inspect.signature(thing).parameters if name not in ("self", "args", "kwargs")}
    except ValueError:
        return set()


ERRORS = ("ValueError", "TypeError", "KVPolicyError", "KVPolicyTypeError", "KVPolicyStateError")


def raises(thing: Any) -> bool:
    """Whether a function itself tells a user what is wrong; classes check their fields, whose ranges `Args` has."""
    if not inspect.isfunction(thing):
        return False
    tree = ast.parse(textwrap.dedent(inspect.getsource(thing)))
    calls = (node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise))
    return any(isinstance(call, ast.Call) and ast.unparse(call.func) in ERRORS for call in calls)


def test_methods_name_their_source() -> None:
    from kvpolicy.registry import lookup
    from kvpolicy.registry import names as registered

    silent = [name for name in registered() if "Source:" not in (lookup(name)[1].__doc__ or "")]
    assert set(silent) <= OWN


def type_only_imports(module: str) -> dict[str, str]:
    """The names that a module imports for type checkers alone, and where from."""
    home = importlib.import_module(module)
    tree = ast.parse(Path(str(home.__file__)).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return {
        str(alias.asname): str(node.module)
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@pytest.mark.parametrize("module", ["kvpolicy", "kvpolicy.reporting.plots"])
def test_types_see_the_names_that_are_looked_up(module: str) -> None:
    """The imports that only type checkers read are those of the table that `__getattr__` reads."""
    wrong = "run python -m kvpolicy_eval.catalog, which writes those of kvpolicy"
    assert type_only_imports(module) == importlib.import_module(module)._LAZY, wrong


def test_the_flat_module_of_plots_has_every_plot() -> None:
    assert type_only_imports("kvpolicy.plots").keys() == type_only_imports("kvpolicy.reporting.plots").keys()
