"""The candidates that a tuner chooses from if the user names none."""

from __future__ import annotations

from collections.abc import Sequence

from kvpolicy.policy import Policy
from kvpolicy.text.errors import KVPolicyError

SHARES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0)
"""Fractions of the prompt that a layer keeps."""

PARTS = (
    "snapkv",
    "snapkv+tokenwise:bits=4",
    "uniform/adakv+snapkv",
    "uniform/adakv+snapkv+tokenwise:bits=4",
    "keydiff+tokenwise:bits=4",
    "kvzip",
    "kvzip+tokenwise:bits=4",
    "uniform/adakv+kvzip",
    "uniform/adakv+kvzip+tokenwise:bits=4",
    "uniform/adakv+kvzip+tokenwise:key_bits=4:value_bits=2",
    "uniform/adakv+kvzip+tokenwise:bits=2",
)
"""Selectors that look at the question or replay the context, with and without head budgets and codes."""


def default_grid() -> list[Policy]:
    """Every default combination of parts at every share.

    Examples:
        >>> len(default_grid()), str(default_grid()[0])
        (77, 'snapkv@0.02')
    """
    return make_grid(PARTS, SHARES)


def make_grid(specs: Sequence[str], shares: Sequence[float]) -> list[Policy]:
    """Every spec at every share; one that evicts nothing at 1.0 alone.

    Args:
        specs: Policies; a budget that they have is not used.
        shares: Fractions of the prompt in (0, 1].

    Raises:
        KVPolicyError: If a spec is not valid, or there is no spec or share.

    Examples:
        >>> [str(policy) for policy in make_grid(["h2o", "kivi:bits=4"], [0.1, 1.0])]
        ['h2o@0.1', 'h2o@1.0', 'kivi:bits=4']
    """
    if not specs or not shares:
        raise KVPolicyError("The candidates must be at least one policy at one share, got none; try snapkv and 0.1.")
    grid: list[Policy] = []
    for spec in specs:
        parts = Policy.parse(spec)
        merges = parts.merger.traits.when != "never"
        if parts.keeps_whole:
            grid.append(parts)
            continue
        # A merger that never has a victim is refused, and keeps everything as its selector does.
        grid += [parts.with_budget(float(share)) for share in sorted(set(shares)) if not (merges and share == 1.0)]
    return list(dict.fromkeys(grid))
