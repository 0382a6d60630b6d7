"""The selector `random`: a uniform sample, by seed, layer and head, whatever else runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import RandomTokens
from kvpolicy.testing import check
from tests.conformance.bench import Bench, draw
from tests.selectors.walks import walks


def kept(spec: str, *, heads: int = 2, layer: int = 0, prompt: int = 200, steps: int = 0, budget: int = 50) -> Any:
    """The positions that each head of a row keeps, as sets."""
    bench = Bench(spec, [budget], new=steps, layer_idx=layer)
    for number, size in enumerate([prompt, *[1] * steps]):
        bench.forward(*draw(size, number, batch=1, heads=heads))
    return [set(head.tolist()) for head in bench.layer.tensors.positions[0]]


@pytest.mark.parametrize("spec", ["random", "random:seed=3", "random:decode=grow", "chunk:size=4/random"])
def test_as_the_slow_version(spec: str) -> None:
    assert walks(spec) == 1


@pytest.mark.parametrize("decode", ["evict", "grow"])
def test_keeps_the_rules(decode: Any) -> None:
    check(RandomTokens(seed=7, decode=decode))


def test_heads_layers_and_seeds_draw_by_themselves() -> None:
    one, other = kept("random")
    assert 199 in one & other
    sets = [one, other, *kept("random:seed=1"), *kept("random", layer=1)]
    shared = [len(a & b) - 1 for n, a in enumerate(sets) for b in sets[:n]]
    # Of 49 tokens, a quarter is expected to be shared, with a standard deviation of 2.6.
    assert max(shared) < 26 and min(shared) > 2
    assert kept("random") == [one, other]


def test_prompt_and_generated_tokens_have_the_same_chance() -> None:
    found = torch.zeros(240)
    for seed in range(5):
        for head in kept(f"random:seed={seed}", heads=64, prompt=120, steps=120, budget=60):
            found[list(head)] += 1
    assert found[-1] == 320
    # Each token is kept in a quarter of 320 draws: 80 with a standard deviation of 7.7, and 0.7 for the mean of 120.
    assert abs(found[:120].mean() - 79) < 3
    assert abs(found[120:-1].mean() - 79) < 3
    assert found[:-1].min() > 45 and found[:-1].max() < 115


def test_heads_with_budgets_of_their_own_keep_other_tokens() -> None:
    model, _ = kvpolicy.tiny()
    ids = torch.arange(60, 180)[None]
    with torch.no_grad(), kvpolicy.attach(model, "uniform/duo+random@0.3") as handle:
        model(ids)
        cache: Any = handle.cache
        plan: Any = handle.plan
        layer: Any = cache.layers[0]
        before = layer.positions.clone()
        for token in range(20):
            model(torch.tensor([[token]]), cache=cache)
        assert cache.nbytes == plan.nbytes
    assert (layer.positions == 139).any() and not torch.equal(before, layer.positions)
    by_head = [set(layer.positions[0][layer.owner[0] == head].flatten().tolist()) for head in range(2)]
    assert by_head[0] != by_head[1]
