"""Examples in the docstrings of `kvpolicy_vllm` run; the connector, which imports vLLM, has none."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import kvpolicy_vllm

MODULES = sorted(found.name for found in pkgutil.iter_modules(kvpolicy_vllm.__path__) if found.name != "connector")


def test_examples_run() -> None:
    for name in MODULES:
        module = importlib.import_module(f"kvpolicy_vllm.{name}")
        assert not doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed, name
