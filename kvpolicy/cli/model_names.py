"""Names of the models that ship with the package, found without importing PyTorch."""

from __future__ import annotations

from importlib.resources import files

from kvpolicy.spec.embedded_names import EMBEDDED

TINY = "tiny"
"""The name of the embedded model that is the default."""


def shipped() -> list[str]:
    """Return the embedded models and the models whose configs ship with the package.

    >>> shipped()[-2:]
    ['tiny', 'tiny-4k']
    """
    configs = files("kvpolicy") / "assets" / "configs"
    return sorted([*(path.name.removesuffix(".json") for path in configs.iterdir()), *EMBEDDED])
