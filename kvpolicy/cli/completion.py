"""Shell completion of models, policy specs and parts, and the names of shipped models, without importing PyTorch."""

from __future__ import annotations

import re
from collections.abc import Iterator
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


def complete_model(incomplete: str) -> list[str]:
    """Complete the name of a shipped model; the shell completes folders and files."""
    return [name for name in shipped() if name.startswith(incomplete)]


def complete_policy(incomplete: str) -> Iterator[str]:
    """Complete the last name of a policy spec with the strategies that are allowed at this position.

    >>> list(complete_policy("squeeze+kvcrush/sn")), list(complete_policy("squeeze+p"))
    (['squeeze+kvcrush/snapkv'], ['squeeze+plain', 'squeeze+probe'])
    """
    from kvpolicy.registry import WHOLE, Kind, kinds, names

    if "@" in incomplete:  # the budget follows, which has no names
        return
    start = max(incomplete.rfind(separator) for separator in "+/") + 1
    given = [re.split("[:/]", part)[0] for part in incomplete[:start].split("+") if part]
    used: list[Kind] = [kind for kind in kinds() if set(given) & set(names(kind))]
    allowed: list[Kind] = [kind for kind in kinds() if kind not in used]
    if incomplete[:start].endswith("/"):  # a wrapped strategy has the kind of its wrapper, but for head allocators
        allowed = [kind for kind in used if given[-1] in names(kind)]
        allowed = ["head_allocator"] if allowed == ["allocator"] else allowed
    candidates = sorted(name for kind in allowed for name in names(kind)) + ([] if start else ["none", *WHOLE])
    yield from (incomplete[:start] + name for name in candidates if name.startswith(incomplete[start:]))


def complete_part(incomplete: str) -> list[str]:
    """Complete the plural of a kind, such as `codecs`, or the name of a strategy."""
    from kvpolicy.registry import BUILT_IN, WHOLE, names

    candidates = [*(f"{kind}s" for kind in BUILT_IN), *names(), *WHOLE]
    return [word for word in candidates if word.startswith(incomplete)]
