"""The option `protect=prompt` of selectors: what is evicted while decoding is generated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import Policy
from kvpolicy.registry import SELECTORS, lookup
from kvpolicy.selectors.protected import Protected
from kvpolicy.text.errors import KVPolicyError
from tests.conformance.bench import Bench, draw, padding
from tests.sampling import product

BASES = ["h2o", "random", "window", "snapkv:window=4:kernel=3", "tova", "keydiff:every=3", "rkv:window=3:every=4"]


@pytest.mark.parametrize("base", BASES)
def test_as_the_slow_version(base: str) -> None:
    """Two padded rows, steps beyond the budget, a second prompt and steps again."""
    bench = Bench(f"{base}:protect=prompt", [32, 24], new=40)
    sizes = [18, *[1] * 22, 5, *[1] * 9]
    masks = {0: padding(18, 18, 11), 23: padding(5, 3, 5, right=True)}
    for number, size in enumerate(sizes):
        bench.forward(*draw(size, number, batch=2), masks.get(number))
    assert bench.check().turns > 0.6 * 2 * len(sizes)
    for row, prompt in enumerate(([*range(18), *range(40, 43)], [*range(11), *range(33, 38)])):
        for head in bench.layer.tensors.positions[row].tolist():
            assert set(prompt) <= set(head)


COMPOSED = ["kvcrush:protect=prompt/h2o", "squeeze+snapkv:protect=prompt+tokenwise"]


@product("base", [*BASES, *COMPOSED], sample=[(base,) for base in ("random", "rkv:window=3:every=4", *COMPOSED)])
def test_the_prompt_stays_in_a_model(base: str) -> None:
    model, _ = kvpolicy.tiny()
    spec = f"{base if 'protect' in base else f'{base}:protect=prompt'}@50"
    with torch.no_grad(), kvpolicy.attach(model, spec) as handle:
        model(torch.arange(60, 85)[None])
        cache: Any = handle.cache
        for token in range(50):
            model(torch.tensor([[token]]), cache=cache)
        held: Any = handle.cache
        plan: Any = handle.plan
        assert held.nbytes == plan.nbytes
    for layer in cache.layers:
        for head in layer.positions[0].tolist():
            assert set(range(25)) <= set(head) and 74 in head
            assert len([at for at in head if at >= 25]) < 50


def test_a_prompt_that_fills_the_budget_is_refused() -> None:
    model, _ = kvpolicy.tiny()
    message = r"must be more than the tokens of the prompt for h2o:protect=prompt.*, got 50 for 50 tokens; try @100"
    with torch.no_grad(), kvpolicy.attach(model, "h2o:protect=prompt@50"), pytest.raises(KVPolicyError, match=message):
        model(torch.arange(60, 110)[None])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("h2o:protect=all@5", "h2o:protect must be prompt, got 'all'; try protect=prompt"),
        ("h2o:protect=prompt:protect=prompt@5", "must be given once, got 'protect' twice"),
        ("h2o:decode=grow:protect=prompt@5", "must evict while decoding to protect the prompt, got h2o:decode=grow"),
        ("full:protect=prompt", "must evict while decoding to protect the prompt, got full"),
        ("kivi:protect=prompt", "options of 'kivi' must be among .*, got 'protect'"),
        ("uniform/adakv+h2o:protect=prompt@99", "to be combined with adakv"),
        ("uniform/duo+h2o:protect=prompt@99", "to be combined with duo"),
        ("h2o:protect=prompt+mikv@99", "to be combined with mikv"),
        ("h2o:protect@3", "got 'protect'"),
    ],
)
def test_what_cannot_be_is_refused(spec: str, message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        Policy.parse(spec)


@pytest.mark.parametrize("name", [name for name in SELECTORS if name != "full"])
def test_every_selector_that_evicts_takes_it(name: str) -> None:
    policy = Policy.parse(f"{name}:protect=prompt@512")
    selector: Any = policy.selector
    assert isinstance(selector, Protected) and isinstance(selector.base, lookup(name)[1])
    assert str(policy) == f"{name}:protect=prompt@512"
    assert Policy.parse(str(policy)) == policy == Policy.from_dict(policy.to_dict())
