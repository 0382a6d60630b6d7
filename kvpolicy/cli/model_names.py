"""Names of the models that ship with the package, found without importing PyTorch."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from kvpolicy.text.embedded_names import EMBEDDED
from kvpolicy.text.errors import KVPolicyError

TINY = "tiny"
"""The name of the embedded model that is the default."""


def shipped() -> list[str]:
    """Return the embedded models and the models whose configs ship with the package.

    >>> shipped()[-2:]
    ['tiny', 'tiny-4k']
    """
    configs = files("kvpolicy") / "assets" / "configs"
    return sorted([*(path.name.removesuffix(".json") for path in configs.iterdir()), *EMBEDDED])


def check_order(command: str, model: str) -> None:
    """Raise KVPolicyError if a policy was given in the place of the model.

    Args:
        command: The name of the command.
        model: The argument MODEL.
    """
    from kvpolicy.policy import Policy

    if model in shipped() or Path(model).exists():
        return
    try:
        Policy.parse(model)
    except ValueError:
        return
    raise KVPolicyError(f"MODEL must be a model, got the policy {model!r}; try kvpolicy {command} MODEL {model}.")
