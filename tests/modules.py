"""Modules that a test imports anew, as in an environment that lacks what they need."""

from __future__ import annotations

import sys

import pytest


def forget(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Let a package and its modules be imported anew, until the end of the test.

    Args:
        monkeypatch: Undoes it.
        package: The package, such as `kvpolicy.serving`.
    """
    parent, _, name = package.rpartition(".")
    # An import replaces this attribute too, by which later tests would reach the modules of this one.
    monkeypatch.setattr(sys.modules[parent], name, sys.modules[package])
    for module in [module for module in sys.modules if module == package or module.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, module)
