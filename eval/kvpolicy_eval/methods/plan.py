"""What is measured for each method's page."""

from __future__ import annotations

from kvpolicy import registry
from kvpolicy_eval.codecs import short_windows, with_ranking

BUDGETS = [0.3, 0.2, 0.1]
BASELINE = "window"
OVER = ["window", "h2o", "snapkv:kernel=7"]
"""Selectors that allocators are measured with."""
CHOOSER = "snapkv:kernel=7"
"""Who chooses tokens where a codec is measured under eviction, and at which budget."""
CHOSEN = 0.2

SELECTORS = {
    "full": ["full"],
    "window": ["window", "full"],
    "streaming": ["streaming"],
    "h2o": ["h2o"],
    "snapkv": ["snapkv", "snapkv:kernel=7"],
    "tova": ["tova"],
    "probe": ["probe"],
    "kvcrush": ["kvcrush/snapkv:kernel=7", "snapkv:kernel=7", "kvcrush/h2o", "h2o"],
}
"""Policies of a selector's page, without a budget; the baseline is added."""

CODECS = {
    "plain": [],
    "tokenwise": ["tokenwise", "tokenwise:bits=2"],
    "kivi": ["kivi:bits=4", "kivi:bits=2"],
    "gear": ["gear"],
    "kvquant": ["kvquant:bits=3", "kvquant:bits=2"],
    "rotate": ["rotate:bits=4", "rotate:bits=2"],
    "turboquant": ["turboquant:bits=4", "turboquant:bits=2"],
    "bfp": ["bfp"],
    "staircase": ["staircase"],
    "csr": ["csr:nnz=8", "csr:nnz=4"],
    "mikv": ["mikv"],
    "zipcache": ["zipcache:recode_every=16"],
}
"""Codecs of a codec's page; exact tokens are added."""


def methods() -> list[str]:
    """Every method that has a page, allocators first, codecs last.

    >>> methods()[:4]
    ['uniform', 'pyramid', 'squeeze', 'full']
    """
    return [*registry.ALLOCATORS, *registry.SELECTORS, *registry.CODECS]


def chosen(name: str) -> list[str]:
    """Policies of the page of an allocator or a selector, without budgets.

    >>> chosen("streaming")
    ['streaming', 'window']
    >>> chosen("pyramid")[:2]
    ['window', 'pyramid+window']
    """
    if name in registry.ALLOCATORS:
        with_it = [f"{name}+{selector}" for selector in OVER if name != "uniform"]
        return [policy for pair in zip(OVER, with_it or OVER, strict=True) for policy in dict.fromkeys(pair)]
    return list(dict.fromkeys([*SELECTORS[name], BASELINE]))


def coded(name: str) -> list[str]:
    """Policies of a codec's page: exact tokens, the codec alone, and the same under eviction.

    >>> coded("zipcache")
    ['full', 'snapkv:kernel=7@0.2', 'h2o+zipcache:recode_every=16', 'snapkv:kernel=7+zipcache:recode_every=16@0.2']
    """
    policies = ["full", f"{CHOOSER}@{CHOSEN}"]
    for codec in map(short_windows, CODECS[name]):
        policies += [with_ranking(codec), f"{CHOOSER}+{codec}@{CHOSEN}"]
    return policies
