"""Every option of KVCrush and KIVI against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvpolicy import Plain, Policy
from tests.conformance.bench import Bench, draw, padding
from tests.conformance.policies import CODECS, SELECTORS, by_name, words
from tests.sampling import each_once, pairwise, product

BASES = [by_name(name) for name in SELECTORS if name != "kvcrush"]
ANCHORS = ["random", "mean", "alternate", "zeros", "ones"]
BUCKETS = ["rank", "distance"]
PICKS = ["first", "random", "best"]
PAGES = ["0", "1", "3", "8"]
SPLITS = ["0.0", "0.25", "0.5", "0.9"]
QUANTILES = ["0.0", "0.5", "0.7", "1.0"]
CRUSH = {
    "base": BASES,
    "anchor": ANCHORS,
    "buckets": BUCKETS,
    "pick": PICKS,
    "page": PAGES,
    "split": SPLITS,
    "quantile": QUANTILES,
    "seed": ["0", "7"],
}
MORE = [*SELECTORS, "kvcrush:page=4/h2o"]
KIVI = {"bits": ["2", "4", "8"], "group": ["1", "3", "4", "32"], "residual": ["0", "1", "6", "40"]}


def crush_words(
    base: str, anchor: str, buckets: str, pick: str, page: str, split: str, quantile: str, seed: str
) -> str:
    """The words of a KVCrush."""
    small = {"streaming": "streaming:sinks=2", "snapkv": "snapkv:window=5:kernel=3"}.get(base, base)
    crush = f"kvcrush:anchor={anchor}:buckets={buckets}:pick={pick}:page={page}:split={split}"
    return f"{crush}:quantile={quantile}:seed={seed}/{small}@0.5"


def converse(words: str, *, seed: int = 0, group: int = 2) -> Bench:
    """A padded prompt, steps, a longer continuation and steps, against the reference."""
    floor = Policy.parse(words).selector.min_tokens
    bench = Bench(words, [max(budget, floor) for budget in (14, 9, 5)], new=30, layer_idx=2)
    for number, size in enumerate([33, 1, 1, 1, 1, 12, 1, 1]):
        valid = padding(33, 33, 21, 12) if number == 0 else None
        bench.forward(*draw(size, 100 * seed + number, batch=3, group=group), valid)
    bench.check()
    return bench


FIRST, *CRUSHING = CRUSH.values()
TURNED = [(FIRST[number % len(FIRST)], *row) for number, row in enumerate(pairwise(*CRUSHING))]
"""Every pair of options, each with the next base."""


@pytest.mark.parametrize([*CRUSH], TURNED)
def test_kvcrush(
    base: str, anchor: str, buckets: str, pick: str, page: str, split: str, quantile: str, seed: str
) -> None:
    converse(crush_words(base, anchor, buckets, pick, page, split, quantile, seed))


@product("base,anchor,buckets,pick,page,seed", BASES, ANCHORS, BUCKETS, PICKS, PAGES, range(3), sample=[])
def test_kvcrush_in_full(base: str, anchor: str, buckets: str, pick: str, page: str, seed: int) -> None:
    split = SPLITS[seed]
    quantile = QUANTILES[-seed]
    converse(crush_words(base, anchor, buckets, pick, page, split, quantile, str(seed)), seed=seed, group=1 + seed)


@product("base,page", BASES, [3, 16, 64], sample=each_once(BASES, [3, 16, 64]))
def test_the_smallest_budget_by_pages(base: str, page: int) -> None:
    """It holds the page of the newest token and what the base always keeps first; the slow reference agrees."""
    policy = f"kvcrush:page={page}/{base}"
    floor = Policy.parse(policy + "@1.0").selector.min_tokens
    with pytest.raises(ValueError, match=f"must be at least {floor} tokens"):
        Policy.parse(f"{policy}@{floor - 1}")
    length = floor + page + 30
    for budget in (floor, floor + page // 2):
        bench = Bench(f"{policy}@{budget}", [budget])
        bench.forward(*draw(length, budget))
        for head in bench.turns[0].kept[0]:
            assert set(range(length // page * page, length)) <= set(head)
            assert not base.startswith("streaming") or set(range(4)) <= set(head)
        bench.forward(*draw(1, 0))
        bench.check()


@pytest.mark.parametrize("base", BASES)
def test_no_split_is_the_base(base: str) -> None:
    small = {"streaming": "streaming:sinks=2"}.get(base, base)
    crushed = converse(f"kvcrush:split=0.0/{small}@0.5")
    plain = converse(f"{small}@0.5")
    for mine, its in zip(crushed.turns, plain.turns, strict=True):
        assert mine.kept == its.kept
        assert torch.equal(mine.out, its.out)


@pytest.mark.parametrize("base", BASES)
def test_kvcrush_with_ties(base: str) -> None:
    """Zero queries: all scores alike, so that bits, buckets and representatives rest on positions alone."""
    bench = Bench(crush_words(base, "alternate", "distance", "first", "0", "0.5", "0.5", "0"), [10])
    for number, size in enumerate([30, 1, 1, 7, 1]):
        q, k, v = draw(size, number)
        bench.forward(torch.zeros_like(q), k, v)
    bench.check()


@product(["selector", *KIVI], ["window", "h2o", "tova:decode=grow", "kvcrush/h2o", "full"], *KIVI.values())
def test_kivi(selector: str, bits: str, group: str, residual: str) -> None:
    words = f"kivi:bits={bits}:group_size={group}:residual_length={residual}"
    bench = Bench(f"{selector}+{words}@{1.0 if selector == 'full' else 0.5}", [12, 10], new=30)
    bench.budgets = [999, 999] if selector == "full" else bench.budgets
    for number, size in enumerate([21, 1, 1, 1, 1, 1, 1, 9, 1, 1, 1]):
        bench.forward(*draw(size, number, batch=2), padding(21, 21, 14) if number == 0 else None)
    bench.check()


@product("selector,codec", MORE, CODECS, sample=each_once(MORE, CODECS))
def test_selection_does_not_depend_on_the_codec(selector: str, codec: str) -> None:
    """What a prompt keeps is chosen before anything is coded."""
    policy = Policy.parse(words(selector, codec))
    plain, coded = (Bench(one, [12, 9]) for one in (replace(policy, codec=Plain()), policy))
    for bench in (plain, coded):
        bench.forward(*draw(30, 5, batch=2), padding(30, 30, 22))
    assert plain.turns[0].kept == coded.turns[0].kept
    assert torch.equal(plain.turns[0].out, coded.turns[0].out)
