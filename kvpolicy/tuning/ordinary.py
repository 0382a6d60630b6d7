"""Ordinary policies, which a policy found by tuning has to beat."""

from __future__ import annotations

_SELECTORS = ("window", "streaming", "h2o", "snapkv", "tova", "expected", "keydiff", "kvzip", "kvcrush/snapkv")
_CODECS = ("", "+tokenwise:bits=4")
_OTHERS = (
    "squeeze+snapkv",
    "squeeze+snapkv+tokenwise:bits=4",
    "pyramid+snapkv+tokenwise:bits=4",
    "uniform/adakv+snapkv+tokenwise:bits=4",
    "squeeze+keydiff+tokenwise:bits=4",
    "squeeze+kvzip+tokenwise:bits=4",
    "uniform/adakv+kvzip+tokenwise:bits=4",
    "squeeze/adakv+kvzip+tokenwise:bits=4",
    "kvzip+kivi:bits=2",
    "squeeze+kvzip+tokenwise:bits=8",
)
"""Budgets that differ by layer or head, and codes of fewer and of more bits."""


def rivals() -> tuple[str, ...]:
    """Specs of ordinary policies, without budgets: selectors and allocators, plain and with codecs.

    Examples:
        >>> len(rivals()), rivals()[:3]
        (28, ('window', 'window+tokenwise:bits=4', 'streaming'))
    """
    alone = [base + codec for base in _SELECTORS for codec in _CODECS]
    return (*alone, *_OTHERS)
