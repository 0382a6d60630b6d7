"""API pages show each strategy with the options and the defaults of its constructor."""

from __future__ import annotations

import ast
import inspect

import pytest

pytest.importorskip("griffe")

import griffe

from kvpolicy import registry
from kvpolicy_eval.catalog import signatures


def test_pages_show_the_constructor_of_every_strategy() -> None:
    loader = griffe.GriffeLoader(extensions=griffe.load_extensions(signatures.Strategies))
    package = loader.load("kvpolicy")
    for _, cls in map(registry.lookup, registry.names()):
        shown = package[f"{cls.__module__}.{cls.__qualname__}".removeprefix("kvpolicy.")].members["__init__"]
        _, *parameters = shown.parameters
        taken = inspect.signature(cls).parameters
        assert [one.name for one in parameters] == [*taken], cls
        for one in parameters:
            text = str(one.default)
            default = taken[one.name].default
            is_constant = text.endswith(".SAME")  # by its name
            is_base = repr(default) == "<factory>"
            assert text.endswith("()") if is_base else is_constant or ast.literal_eval(text) == default, (cls, one.name)
