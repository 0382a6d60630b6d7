"""Two conversations on one attached model do not mix."""

from __future__ import annotations

import copy

import pytest
import torch

import kvpolicy
from kvpolicy import PolicyCache
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch, talk
from tests.conformance.policies import CODECS, SELECTORS, every, words

TURNS = [24, *[1] * 8, 5, 1, 1]


@pytest.mark.parametrize(
    ("allocator", "selector", "codec"), every(["uniform", "squeeze"], [*SELECTORS, "h2o:decode=grow"], CODECS)
)
def test_interleaved(allocator: str, selector: str, codec: str) -> None:
    model, policy = build("llama"), words(allocator, selector, codec)
    one, two = make_batch([24, 11], TURNS, seed=1), make_batch([19], TURNS, seed=2)
    with kvpolicy.attach(model, policy):
        apart = [talk(model, *batch, TURNS, PolicyCache(model)) for batch in (one, two)]
        caches, start = [PolicyCache(model), PolicyCache(model)], 0
        together: list[list[torch.Tensor]] = [[], []]
        for size in TURNS:
            for logits, batch, cache in zip(together, (one, two), caches, strict=True):
                logits.append(forward(model, *batch, start, start + size, cache))
            start += size
    for whole, pieces in zip(apart, together, strict=True):
        assert torch.equal(whole, torch.cat(pieces, 1))


def test_policies_of_their_own() -> None:
    """Each cache may have a policy of its own, as long as the attached one measures what it needs."""
    model = build("llama")
    batch = make_batch([24], TURNS)
    with kvpolicy.attach(model, "squeeze+window@0.5"):
        small, large = PolicyCache(model, "window@6"), PolicyCache(model, "squeeze+h2o@0.5")
        for cache in (small, large):
            talk(model, *batch, TURNS, cache)
        assert [layer.budget.tolist() for layer in small.slots] == [[6]] * 3
        assert len({int(layer.budget) for layer in large.slots}) > 1
    with kvpolicy.attach(model, "window@0.5"), pytest.raises(ValueError, match="attach a policy"):
        PolicyCache(model, "squeeze+h2o@0.5")


def test_the_models_own_caches_are_new_each_time() -> None:
    model = build("llama")
    ids, mask = make_batch([24], [24])
    with kvpolicy.attach(model, "h2o@0.5") as handle:
        first = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=5)
        cache = handle.cache
        assert torch.equal(model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=5), first)
        assert handle.cache is not cache


@pytest.mark.parametrize("policy", ["squeeze+h2o@0.5", "kvcrush/h2o+kivi:group_size=4:residual_length=4@0.5"])
def test_a_reset_cache_is_new(policy: str) -> None:
    model = build("llama")
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model)
        talk(model, *make_batch([24], TURNS, seed=1), TURNS, cache)
        cache.reset()
        again = talk(model, *make_batch([20, 9], TURNS, seed=2), TURNS, cache)
        fresh = talk(model, *make_batch([20, 9], TURNS, seed=2), TURNS, PolicyCache(model))
    assert torch.equal(again, fresh)


@pytest.mark.parametrize("policy", ["squeeze+h2o@0.5", "h2o+kivi:group_size=4:residual_length=4@0.5"])
def test_a_copied_cache_goes_its_own_way(policy: str) -> None:
    """One prefix, several answers."""
    model = build("llama")
    ids, mask = make_batch([24], TURNS)
    with kvpolicy.attach(model, policy):
        whole = talk(model, ids, mask, TURNS, PolicyCache(model))
        cache = PolicyCache(model)
        forward(model, ids, mask, 0, 24, cache)
        other = copy.deepcopy(cache)
        for column in range(24, 30):
            forward(model, ids.flip(0) * 0 + 5, mask, column, column + 1, cache)
        for column in range(24, 32):
            got = forward(model, ids, mask, column, column + 1, other)
            assert torch.equal(got[:, 0], whole[:, column])
