"""Shell completion: names of models, policies and parts, found without importing PyTorch."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvpolicy.cli.model_names import shipped


def complete_model(incomplete: str) -> list[str]:
    """Shipped names that begin so; a folder or a file is completed by the shell."""
    return [name for name in shipped() if name.startswith(incomplete)]


def complete_policy(incomplete: str) -> Iterator[str]:
    """Policies that go on with a name that may stand there; nothing heavy is imported for it.

    >>> list(complete_policy("squeeze+kvcrush/s")), list(complete_policy("squeeze+p"))
    (['squeeze+kvcrush/snapkv', 'squeeze+kvcrush/streaming'], ['squeeze+plain', 'squeeze+probe'])
    """
    from kvpolicy.registry import Kind, kinds, names

    if "@" in incomplete:
        return
    start = max(incomplete.rfind(sign) for sign in "+/") + 1
    before = [re.split("[:/]", part)[0] for part in incomplete[:start].split("+") if part]
    taken: list[Kind] = [kind for kind in kinds() if set(before) & set(names(kind))]
    free: list[Kind] = [kind for kind in kinds() if kind not in taken]
    if incomplete[:start].endswith("/"):  # what is wrapped is of the wrapper's kind
        free = [kind for kind in taken if before[-1] in names(kind)]
    known = sorted(name for kind in free for name in names(kind)) + ([] if start else ["none"])
    yield from (incomplete[:start] + name for name in known if name.startswith(incomplete[start:]))


def complete_part(incomplete: str) -> list[str]:
    """Kinds of parts, and names of parts, that begin so."""
    from kvpolicy.registry import kinds, names

    known = [*(f"{kind}s" for kind in kinds()), *names()]
    return [word for word in known if word.startswith(incomplete)]
