"""Two conversations on one attached model do not mix, and neither draws from the random state of the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy.engine.invariants import check_invariants
from kvpolicy.registry import names
from tests.conformance.access import kept_positions
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch, talk
from tests.conformance.policies import CODECS, GROUPING, SELECTORS, words
from tests.engine.filled import attached
from tests.engine.live import tensors_of
from tests.sampling import each_once, product
from tests.walks.life import changes, state_of

LAYERS = 2
"""The first, and one behind it."""

TURNS = [24, *[1] * 8, 5, 1, 1]
RANKINGS = [*SELECTORS, "h2o:decode=grow", "kvcrush:pick=random:buckets=distance/h2o"]
PARTS = (["uniform", "squeeze"], RANKINGS, CODECS)


@product("allocator,selector,codec", *PARTS, sample=each_once(*PARTS))
def test_interleaved(allocator: str, selector: str, codec: str) -> None:
    model = build("llama", layers=LAYERS)
    policy = words(allocator, selector, codec)
    one = make_batch([24, 11], TURNS, seed=1)
    two = make_batch([19], TURNS, seed=2)
    with kvpolicy.attach(model, policy):
        world = torch.get_rng_state()
        apart = [talk(model, *batch, TURNS, PolicyCache(model)) for batch in (one, two)]
        assert torch.equal(torch.get_rng_state(), world), "what is random has a seed of its own"
        torch.rand(7)
        caches = [PolicyCache(model), PolicyCache(model)]
        start = 0
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
        small = PolicyCache(model, "window@6")
        large = PolicyCache(model, "squeeze+h2o@0.5")
        for cache in (small, large):
            talk(model, *batch, TURNS, cache)
        assert [layer.budget.tolist() for layer in small.policy_layers] == [[6]] * 3
        assert len({int(layer.budget) for layer in large.policy_layers}) > 1
    with kvpolicy.attach(model, "window@0.5"), pytest.raises(ValueError, match="attach a policy"):
        PolicyCache(model, "squeeze+h2o@0.5")


@pytest.mark.parametrize("spec", ["h2o:decode=grow@9000B", "uniform/even+h2o:decode=grow@9000B", "h2o:decode=grow@9"])
def test_a_growing_cache_stays_within_its_budget_in_later_turns(spec: str) -> None:
    """Slots for generated tokens are those that the budget of the turn contains, also if a turn is one token."""
    with attached(spec, [60], [60], layers=LAYERS) as (model, ids, _):
        cache = PolicyCache(model)
        for columns in (20, 33, 60):
            model.generate(ids[:, :columns], cache=cache, do_sample=False, max_new_tokens=12, min_new_tokens=12)
            assert cache.plan is not None and cache.nbytes == cache.plan.nbytes
        seen = cache.get_seq_length()
        longer = torch.cat([ids, ids], 1)[:, : seen + 1]
        model.generate(longer, cache=cache, do_sample=False, max_new_tokens=30, min_new_tokens=30)
        store = cache.policy_layers[0].store
        assert cache.get_seq_length() == seen + 30 and max(store.contents.expected_len) >= int(store.tensors.budget)


APART = [name for name in CODECS if name not in GROUPING]


@pytest.mark.parametrize("codec", APART)
def test_no_token_is_lost_where_a_turn_has_a_smaller_budget(codec: str) -> None:
    """The end is announced late: stages hold more than their share then, and give way to as many tokens as come."""
    with attached(words("h2o", codec, budget="1.0"), [30], [30], layers=1) as (model, ids, mask), torch.no_grad():
        cache = PolicyCache(model)
        layer = cache.policy_layers[0]
        forward(model, ids, mask, 0, 26, cache)
        cache.expect(None, 4)
        forward(model, ids, mask, 26, 30, cache)
        assert kept_positions(layer)[0][0] == [*range(30)]
        for end in range(31, 40):
            longer = torch.cat([ids, ids], 1)[:, :end]
            forward(model, longer, torch.ones_like(longer), end - 1, end, cache)
            check_invariants(layer.store)
            assert len(kept_positions(layer)[0][0]) == min(end, int(layer.budget))


SPECS = [
    "snapkv:window=4:decode=grow@2048",
    "h2o:decode=grow+merge@60",
    "h2o:decode=grow+kivi:group_size=4:residual_length=4@60",
    "squeeze+snapkv:window=4:decode=grow@1MiB",
    "uniform/even+h2o:decode=grow@60",
    "h2o:decode=grow@12",
]
SIZES = [[10] + [1] * 40, [10, 8] + [1] * 40, [20] + [1] * 6 + [5] + [1] * 40]


@product("spec,sizes", SPECS, SIZES, sample=each_once(SPECS, SIZES))
def test_a_growing_cache_grows_behind_its_announcement(spec: str, sizes: list[int]) -> None:
    """Also where the budget exceeds all that was announced, so that slots run out before it does."""
    model = build("llama", layers=LAYERS)
    ids, _ = make_batch([90], [90])
    with kvpolicy.attach(model, spec), torch.no_grad():
        cache = PolicyCache(model, new=4)
        start = 0
        for size in sizes:
            model(ids[:, start : start + size], cache=cache)
            start += size
            layer = cache.policy_layers[0]
            held = layer.store.geometry.tokens_by_head().amax(-1)
            assert bool((held <= layer.budget).all())
        assert cache.get_seq_length() == start
        if "@12" not in spec and "squeeze" not in spec:  # whose budgets hold all tokens
            assert cache.policy_layers[0].store.geometry.tokens_by_head().amax(-1).tolist() == [start]


@pytest.mark.parametrize("codec", ["plain", "tokenwise"])
def test_pages_return_behind_an_announced_end(codec: str, tmp_path: Path) -> None:
    """A turn of a known end gets fewer pages than the budget has, and what follows behind it gets the others."""
    model = build("llama", layers=LAYERS)
    ids, _ = make_batch([64], [64])
    with kvpolicy.attach(model, words("uniform/adakv+h2o", codec, budget="80")), torch.no_grad():
        cache = PolicyCache(model)
        model(ids[:, :21], cache=cache)
        cache.expect(24, 1)
        model(ids[:, 21:24], cache=cache)
        cache.save(tmp_path / "turn.safetensors")
        loaded = PolicyCache.load(model, tmp_path / "turn.safetensors")
        for column in range(24, 64):
            both = [model(ids[:, column : column + 1], cache=each).logits for each in (cache, loaded)]
            assert torch.equal(*both)
        for layer in cache.policy_layers:
            check_invariants(layer.store)
            assert layer.store.geometry.tokens_by_head().tolist() == [[64, 64]]


@pytest.mark.parametrize("given", [9, 28])
def test_generate_wants_the_whole_conversation(given: int) -> None:
    """Of fewer tokens than the cache has seen, transformers would run none, or those behind some offset."""
    with attached("h2o@0.5", [24], [24, 10], layers=LAYERS) as (model, ids, mask):
        cache = PolicyCache(model)
        model.generate(ids[:, :24], cache=cache, do_sample=False, max_new_tokens=5, min_new_tokens=5)
        before = cache.nbytes, cache.get_seq_length()
        with pytest.raises(kvpolicy.KVPolicyError, match=rf"the cache has seen 28 tokens, got .* of {given}; try"):
            model.generate(ids[:, :given], attention_mask=mask[:, :given], cache=cache, max_new_tokens=5)
        assert (cache.nbytes, cache.get_seq_length()) == before
        assert model.generate(ids, cache=cache, max_new_tokens=5, min_new_tokens=5).shape == (1, 39)


@pytest.mark.parametrize("part", [*CODECS, *names("reader"), "global", "cake"])
def test_a_reset_cache_is_a_new_one(part: str) -> None:
    with attached(words(part, "h2o"), [24, 11], TURNS, layers=4) as (model, ids, mask):
        cache = PolicyCache(model, prompt=[24, 11], new=50)
        talk(model, ids, mask, TURNS, cache)
        assert sum(tensor.nbytes for _, tensor in tensors_of(cache))
        cache.reset()
        left = changes(state_of(PolicyCache(model)), state_of(cache))
    stock = ("is_shared", ".device:", ".tile_size:")  # what transformers keeps, and the size of tiles
    assert [change for change in left if not any(name in change for name in stock)] == []
    assert cache.nbytes == 0


def test_every_chunk_of_a_second_turn_knows_the_whole_of_it() -> None:
    model = build("llama", layers=LAYERS)
    ids, _ = make_batch([44], [44])
    chunked: dict[str, Any] = {"do_sample": False, "max_new_tokens": 2, "min_new_tokens": 2, "prefill_chunk_size": 5}
    with kvpolicy.attach(model, "window@0.5"):
        cache = PolicyCache(model)
        budgets = list[int]()
        model.generate(ids[:, :20], cache=cache, **chunked)
        finish = cache.finish
        cache.finish = lambda decoder: (finish(decoder), budgets.append(int(cache.policy_layers[0].budget)))[0]
        model.generate(ids, cache=cache, **chunked)
    assert budgets and set(budgets) == {22}


def test_beams_of_a_cache_that_was_told_its_rows() -> None:
    with attached("window@0.5", [24, 17], [24], layers=LAYERS) as (model, ids, mask):
        cache = PolicyCache(model, prompt=[24, 17])
        beams: dict[str, Any] = {"num_beams": 2, "do_sample": False, "max_new_tokens": 3}
        told = model.generate(ids, attention_mask=mask, cache=cache, **beams)
        assert torch.equal(told, model.generate(ids, attention_mask=mask, **beams))
