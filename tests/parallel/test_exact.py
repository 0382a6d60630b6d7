"""N ranks keep exactly what one keeps: positions, codes, exact keys and logits, for every method."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conformance.policies import (
    ALLOCATORS,
    CODECS,
    GROUPING,
    MERGERS,
    SELECTORS,
    every_pair,
    is_refused,
    star_of_three,
    words,
)
from tests.parallel.ranks import run_ranks
from tests.parallel.sliced import Heads, compare
from tests.sampling import each_once, product

CRUSHED = [
    "anchor=random",
    "anchor=mean",
    "anchor=alternate",
    "anchor=ones:quantile=0.8",
    "buckets=distance",
    "pick=best:seed=3",
    "pick=random:split=0.5",
    "page=3:split=0.5",
]
MIKV = "mikv:high=0.3:high_bits=8:residual_length=2:block_size=3"
POOLED = [
    "tova@0.5",
    "tova:decode=grow@0.5",
    "squeeze+tova+tokenwise:bits=4:group_size=4:residual_length=2:block_size=3@0.5",
    *(f"kvcrush:{options}/snapkv:window=6:kernel=3@0.5" for options in CRUSHED),
    "kvcrush/tova@0.5",
    "kvcrush/h2o@0.5",
    "kvcrush:page=3/window@0.5",
    "kvcrush/streaming:sinks=2@0.5",
    "h2o@0.5",
    "probe:recent=0.2:random=0.2@0.5",
    f"tova+{MIKV}@0.5",
    f"h2o+{MIKV}@0.5",
    "probe+zipcache:recode_every=5@0.5",
    "kvzip:chunk=7:sinks=2@0.5",
    "squeeze+kvzip:chunk=7:instruction=5-6@0.5",
    "uniform/adakv+snapkv:window=6:kernel=3@0.5",
    "squeeze/adakv:safeguard=0.0+h2o@0.5",
    "uniform/adakv+h2o:decode=grow@0.5",
    "uniform/adakv+expected:sinks=2:horizon=6:decode=grow@0.5",
    "uniform/even+streaming:sinks=2@0.5",
    "uniform/adakv+h2o+tokenwise:residual_length=2:block_size=3@0.5",
    "uniform/adakv+h2o+compensate@0.5",
    "h2o+quest:read=6:page=2:dense=0:resort=3@0.8",
    "snapkv:window=6:kernel=3+labels:read=5:channels=3:dense=0@0.8",
    "h2o+sparq:read=5:channels=3@0.8",
    "h2o+centroids:read=6:page=2:resort=3@0.8",
    "h2o+retrieval:recent=1:read=6:cluster=3:rebuild=3@0.8",
    "h2o+shadowkv:read=6:page=2:rank=3:sinks=1:recent=2:rebuild=3@0.8",
    "tokenwise:residual_length=2:block_size=3+exact:read=5",
    "snapkv:window=6:kernel=3+reuse:every=2:dense=0/exact:read=5@0.8",
    "uniform/duo:file=FOLDER/heads.json+streaming:sinks=2@0.5",
    "tuned:file=FOLDER/layers.json@0.6",
    "tuned:file=FOLDER/coded.json@12",
    "squeeze/duo:file=FOLDER/heads.json:sparsity=0.4+snapkv:window=6:kernel=3@0.5",
    "qfilters:file=FOLDER/filters.safetensors@0.5",
    "kvzap:file=FOLDER/gate.safetensors:window=3@0.5",
    "uniform/adakv+kvzap:file=FOLDER/gate.safetensors:window=3@0.5",
    "defensive:window=6:kernel=3@0.5",
    "dropkv:window=6@0.5",
    "chunk:size=3/h2o@0.5",
    "critical/h2o@0.5",
    "caote:every=5/h2o@0.5",
    "kvcompose+kvzip:chunk=7:sinks=2@0.5",
    "zigzag:window=6+snapkv:window=6:kernel=3@0.5",
    "cake:window=6+window@0.5",
    "simlayer:sinks=2:recent=8:threshold=0.45+streaming:sinks=2@0.5",
    "d2olayers+h2o@0.5",
    "lava:window=6:kernel=3/adakv+snapkv:window=6:kernel=3@0.5",
    "dynamickv:window=6:kernel=3+tova@0.5",
    "mass:share=0.8+window@0.5",
    "global/adakv+defensive:window=6:kernel=3@0.5",
    "a2sf:factor=0.8:recent=4@0.5",
    "keyformer:steps=5@0.5",
    "rkv:window=3:every=5@0.5",
    "triattention:file=FOLDER/centers.safetensors:reach=20:every=5@0.5",
    "kvcrush/qfilters:file=FOLDER/filters.safetensors@0.5",
]
"""What looks at all heads, or at all query heads of a KV head."""

TWO = [Heads(4, 2), Heads(6, 3), Heads(4, 1, replicas=2), Heads(2, 1)]
"""Even, three over two, one that both hold, one that one holds."""

FOUR = [Heads(4, 4), Heads(6, 6), Heads(4, 2, replicas=2), Heads(6, 3)]


EVERYWHERE = "kvcrush/tova@0.5"
"""It asks the other ranks when a prompt is compressed and in every step."""


def _dealt(number: int) -> list[str]:
    """The policies that a way to divide heads meets on every commit: each policy meets one of them."""
    return [policy for at, policy in enumerate(POOLED) if at % len(TWO) == number or policy == EVERYWHERE]


def _check(heads: Heads, world: int, policies: list[str], folder: Path) -> None:
    wrong = run_ranks(compare, world, heads, policies, str(folder), limit=900)
    assert not any(wrong), "\n".join(line for lines in wrong for line in lines)


def test_every_method_on_two_ranks(tmp_path: Path) -> None:
    """Selectors of `POOLED` need no second policy: there are not more policies here than codecs."""
    pooled = set(re.findall(r"\w+", " ".join(POOLED)))
    selectors = sorted(SELECTORS, key=lambda name: name in pooled)[: len(CODECS)]
    assert pooled | {*selectors} >= {*SELECTORS}
    by_head = "snapkv+kvquant:bits=3:sinks=2:block_size=3:calibration=FOLDER/kvquant@0.6"
    by_profile = "squeeze:profile=FOLDER/profile.json+tova@0.5"
    turned = (selectors[at:] + selectors[:at] for at in range(len(selectors)))
    every = (each_once(ALLOCATORS, names, CODECS) for names in turned)
    # `words` gives codecs of several layers a selector that they take.
    rows = next(rows for rows in every if not any(is_refused(*row[1:]) and row[2] not in GROUPING for row in rows))
    _check(Heads(4, 2), 2, [*(words(*row) for row in rows), by_head, by_profile], tmp_path)


READ = "h2o+compensate+quest:read=6:page=2:dense=0:resort=3@0.8"


MERGED = [
    *(words("snapkv", name) for name in MERGERS if name != "drop"),
    words("snapkv", "regress:queries=replay:window=5:sinks=1:recent=3"),
    words("h2o", "merge", "kivi"),
    READ,
]


@product("heads,number", [Heads(4, 2), Heads(4, 1, replicas=2)], [0, 1], sample=[(Heads(4, 2), 0), (TWO[2], 1)])
def test_mergers_on_two_ranks(heads: Heads, number: int, tmp_path: Path) -> None:
    """Ranks that hold the same KV head have different queries of it, and must still merge alike."""
    _check(heads, 2, MERGED[number::2], tmp_path)


@pytest.mark.full
def test_every_pair_on_two_ranks(tmp_path: Path) -> None:
    _check(Heads(4, 2), 2, [*(words(*row) for row in star_of_three()), *every_pair()], tmp_path)


@pytest.mark.parametrize("number", range(len(TWO)), ids=map(str, TWO))
def test_what_looks_at_all_heads(number: int, tmp_path: Path) -> None:
    _check(TWO[number], 2, _dealt(number), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(TWO)), ids=map(str, TWO))
def test_what_looks_at_all_heads_elsewhere(number: int, tmp_path: Path) -> None:
    """The other policies."""
    _check(TWO[number], 2, [policy for policy in POOLED if policy not in _dealt(number)], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("heads", FOUR, ids=str)
def test_on_four_ranks(heads: Heads, tmp_path: Path) -> None:
    _check(heads, 4, [*POOLED, *every_pair()], tmp_path)
