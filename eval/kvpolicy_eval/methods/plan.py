"""Which policies are measured for the page of each method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpolicy import registry
from kvpolicy_eval.common.codecs import selector_for, short_windows, with_ranking

BUDGETS = [0.3, 0.2, 0.1]
BASELINE = "window"
ALLOCATOR_SELECTORS = ["window", "h2o", "snapkv"]
"""Selectors with which allocators are measured."""
CURVE_SELECTORS = ["h2o", "snapkv", "kvzip"]
"""Selectors with which allocators are measured that compare tokens of different layers."""
HEAD_SELECTORS = ["snapkv", "h2o", "kvzip"]
"""Selectors with which head allocators are measured."""
MERGER_SELECTORS = ["streaming", "h2o", "snapkv"]
"""Selectors with which mergers are measured."""
MERGERS = {"regress": ["regress", "regress:queries=replay"]}
"""Mergers of a merger's page; others have their defaults only."""
CODEC_SELECTOR = "snapkv"
"""Selector with which codecs are measured under eviction."""
CODEC_BUDGET = 0.2
"""Budget at which codecs are measured under eviction."""

SELECTORS = {
    "window": ["window", "full"],
    "snapkv": ["snapkv:kernel=5", "snapkv"],
    "kvzap": ["kvzap:window=16", "kvzap", "uniform/adakv+kvzap:window=16", "kvzip:plus=true"],
    "kvcrush": ["kvcrush/snapkv", "snapkv", "kvcrush/h2o", "h2o"],
    "defensive": ["defensive", "defensive:kernel=7", "snapkv"],
    "dropkv": ["dropkv:kernel=1", "dropkv", "snapkv"],
    "critical": ["critical/snapkv", "snapkv", "critical/h2o", "h2o"],
    "caote": ["caote/snapkv", "snapkv", "caote/h2o", "h2o"],
    "chunk": ["chunk/snapkv", "snapkv", "chunk/h2o", "h2o"],
    "fair": ["fair/snapkv", "snapkv", "fair/h2o", "h2o"],
}
"""Policies of a selector's page, without budgets and without the baseline; others have their defaults only."""

ALLOCATORS = {"simlayer": "simlayer:recent=16:threshold=0.5"}
"""Allocators with options: the prompts are shorter than the tokens that a lazy layer keeps by default."""

CODECS = {
    "plain": [],
    "tokenwise": ["tokenwise:bits=4", "tokenwise:bits=2"],
    "kivi": ["kivi:bits=4", "kivi:bits=2"],
    "kvquant": ["kvquant:bits=3", "kvquant:bits=2"],
    "rotate": ["rotate:bits=4", "rotate:bits=2"],
    "kvarn": ["kvarn:value_bits=4", "kvarn", "kivi:bits=4"],
    "oscar": ["oscar:bits=4", "oscar", "rotate:bits=2"],
    "turboquant": ["turboquant:bits=4", "turboquant:bits=2"],
    "csr": ["csr:nnz=8", "csr:nnz=4"],
    "lowrank": [
        "lowrank:rank=16",
        "lowrank:rank=8",
        "lowrank:rank=12",
        "lowrank:rank=12:ranks=energy",
        "lowrank:rank=12:ranks=threshold",
        "lowrank:rank=12:ranks=fisher",
        "lowrank:rank=8:key_space=unrotated",
        "lowrank:rank=16:basis=scores",
        "lowrank:rank=16/tokenwise:bits=4",
    ],
    "minicache": ["minicache", "minicache:start=0", "minicache:start=0.25", "minicache:keep=0.3", "tokenwise:bits=8"],
    "think": ["think", "think:ratio=0.6", "think/tokenwise:bits=4"],
    "zipcache": ["zipcache:recode_every=16"],
}
"""Codecs of a codec's page, to which policies without a codec are added; others have their defaults only."""


READS = [0.2, 0.1, 0.05]
"""Fractions of the slots that readers are measured at."""

READERS = {
    "quest": ["quest:page=16", "quest", "exact"],
    "labels": ["labels", "exact"],
    "loki": ["loki", "loki:channels=16", "labels:channels=8:dense=0", "labels:dense=0", "exact"],
    "sparq": ["sparq", "sparq:correct=false", "labels:channels=8:dense=0", "exact"],
    "rocket": ["rocket", "rocket:page=2", "quest:dense=0", "sparq:correct=false", "exact"],
    "centroids": ["centroids", "centroids:estimate=false", "centroids:page=16", "quest:dense=0", "exact"],
    "retrieval": ["retrieval", "retrieval:estimate=false", "retrieval:cluster=16", "centroids", "exact"],
    "shadowkv": [
        "shadowkv:recent=8",
        "shadowkv:recent=8:rank=8",
        "shadowkv:recent=8:joint=true",
        "shadowkv:recent=8:joint=true:page=4",
        "quest:page=8:dense=0",
        "exact",
    ],
    "reuse": ["reuse/exact", "reuse:layers=2_5/exact", "reuse:full=false/exact", "exact"],
}
"""Readers of a reader's page, to which reading everything is added; others have their defaults only."""


DEFAULTS_PAGE = "defaults"
DEFAULTS = ("even", "drop", "plain", "all")
"""Parts that change nothing. They share one page, which has no tables."""


def page_of(name: str) -> str:
    """The page of a method, without its suffix.

    >>> page_of("h2o"), page_of("plain")
    ('h2o', 'defaults')
    """
    return DEFAULTS_PAGE if name in DEFAULTS else name


def paged() -> list[str]:
    """The methods that have a page of their own, in the order of the registry."""
    return [name for name in methods() if name not in DEFAULTS]


def measured() -> list[str]:
    """The methods whose pages have the table of this command.

    Selectors depend most on the place of the question: their pages have the answers by place, from the board, instead.
    """
    return [name for name in paged() if name not in registry.SELECTORS]


def methods() -> list[str]:
    """All methods, in the order of the registry.

    >>> methods()[:4]
    ['uniform', 'pyramid', 'squeeze', 'kvcompose']
    """
    return [name for by_name in registry.BUILT_IN.values() for name in by_name]


def reader_policies(name: str) -> list[str]:
    """Policies of the page of a reader, without the fraction of the slots that is read.

    >>> reader_policies("quest")
    ['quest:page=16', 'quest', 'exact', 'all']
    """
    return list(dict.fromkeys([*READERS.get(name, [name]), "all"]))


def at_read(policy: str, read: float) -> str:
    """A reader at a fraction of the slots; `all` has none.

    >>> at_read("quest:page=16", 0.05), at_read("all", 0.05)
    ('quest:page=16:read=0.05', 'all')
    """
    return policy if policy == "all" else f"{policy}:read={read}"


def selection_policies(name: str) -> list[str]:
    """Policies of the page of a method other than a codec, without budgets.

    >>> selection_policies("streaming")
    ['streaming', 'window']
    >>> selection_policies("pyramid")[:2], selection_policies("duo")[:2]
    (['window', 'pyramid+window'], ['snapkv', 'uniform/duo+snapkv'])
    """
    if name in registry.MERGERS:
        mergers = [] if name == "drop" else MERGERS.get(name, [name])
        return [policy for base in MERGER_SELECTORS for policy in (base, *(f"{base}+{merger}" for merger in mergers))]
    if name in registry.HEAD_ALLOCATORS:
        return [policy for selector in HEAD_SELECTORS for policy in (selector, f"uniform/{name}+{selector}")]
    if name not in registry.ALLOCATORS:
        return list(dict.fromkeys([*SELECTORS.get(name, [name]), BASELINE]))
    if name == "uniform":  # it is the default, so that there is nothing to compare it with
        return list(ALLOCATOR_SELECTORS)
    compares = registry.lookup(name)[1]().layer_metric == "curve"
    selectors = CURVE_SELECTORS if compares else ALLOCATOR_SELECTORS
    return [policy for selector in selectors for policy in (selector, f"{ALLOCATORS.get(name, name)}+{selector}")]


@dataclass(frozen=True)
class CodecRow:
    """A row in the table of a codec.

    Attributes:
        codec: Spec of the codec, as the row names it.
        policy: The codec with every token.
        evicting: The codec under eviction; None where the selector of the table does not combine with it.
    """

    codec: str
    policy: str
    evicting: str | None


def codec_selector(name: str) -> str:
    """The selector under which the codecs in the table of a codec are measured."""
    return selector_for(name, CODEC_SELECTOR)


def codec_rows(name: str, also: Sequence[str] = ()) -> list[CodecRow]:
    """Rows in the table of a codec: no codec, this one with some options, and others beside it.

    Args:
        name: The codec.
        also: Specs of further codecs.

    >>> plain, zipcache = codec_rows("zipcache")
    >>> zipcache.codec, zipcache.policy, zipcache.evicting
    ('zipcache:recode_every=16', 'h2o+zipcache:recode_every=16', 'snapkv+zipcache:recode_every=16@0.2')
    """
    selector = codec_selector(name)
    rows = [CodecRow("plain", "full", f"{selector}@{CODEC_BUDGET}")]
    for codec in [*CODECS.get(name, [name]), *also]:
        short = short_windows(codec)
        combines = selector_for(codec, selector) == selector
        rows.append(CodecRow(codec, with_ranking(short), f"{selector}+{short}@{CODEC_BUDGET}" if combines else None))
    return rows


def codec_policies(name: str) -> list[str]:
    """Policies in the table of a codec.

    >>> codec_policies("bfp")[:3]
    ['full', 'snapkv@0.2', 'bfp:residual_length=8:block_size=8']
    """
    return [policy for row in codec_rows(name) for policy in (row.policy, row.evicting) if policy is not None]
