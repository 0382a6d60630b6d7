"""The slow version of a method, found by its name: that of the selector `tova` is `selectors/tova.py`."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from pathlib import Path
from typing import Any


@functools.cache
def version(kind: str, name: str) -> Any:
    """The module with the slow version of a method.

    Args:
        kind: Such as `selector`.
        name: A registered name.
    """
    assert name in names(kind), f"write tests/reference/{kind}s/{name}.py, the slow version of {name!r}"
    return importlib.import_module(f"{__package__}.{kind}s.{name}")


@functools.cache
def names(kind: str) -> list[str]:
    """The methods of a kind that have a slow version."""
    modules = pkgutil.iter_modules([str(Path(__file__).parent / f"{kind}s")])
    return sorted(module.name for module in modules if not module.name.startswith("_"))


def small(kind: str, name: str) -> str:
    """The spec of a method with numbers that fit tiny models: `SMALL` of its module, or its defaults.

    In the spec of a calibrated method, `FOLDER` stands for the folder of calibrations.
    """
    return getattr(version(kind, name), "SMALL", name) if name in names(kind) else name
