"""Names of the models that ship with the package, found without importing PyTorch."""

from __future__ import annotations

from importlib.resources import files

TINY = "tiny"
"""The name of the embedded model."""


def shipped() -> list[str]:
    """Return the embedded model and the models whose configs ship with the package.

    >>> shipped()[:3]
    ['gemma-3-12b', 'gpt-oss-20b', 'llama-2-70b']
    """
    configs = files("kvpolicy") / "assets" / "configs"
    return sorted([*(path.name.removesuffix(".json") for path in configs.iterdir()), TINY])
