"""Examples in the docstrings of `kvpolicy_vllm` run; the connector, which imports vLLM, has none."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import kvpolicy_vllm

MODULES = sorted(found.name for found in pkgutil.iter_modules(kvpolicy_vllm.__path__) if found.name != "connector")


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module = importlib.import_module(f"kvpolicy_vllm.{name}")
    assert not doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed
