"""What is done with caches whose layers differ: drafts, moves, crops, beams, and caches of other policies."""

from __future__ import annotations

import pytest
import torch

import kvpolicy
from kvpolicy import KVPolicyError, Policy, PolicyCache
from tests.conformance.models import build
from tests.conformance.policies import words

MIXES = [
    [words("h2o"), words("h2o", "kvquant"), words("expected")],
    [words("h2o"), words("h2o", "rotate"), words("window")],
    [words("h2o"), words("h2o", "merge"), words("snapkv")],
    [words("kvzip"), words("kvzip", "tokenwise"), words("kvzip", "kivi")],
    ["h2o:decode=grow@0.5", "snapkv:window=4:kernel=3:decode=grow@0.9", "full"],
    ["h2o+quest:read=6:page=2:dense=0:resort=3@0.5", "h2o@0.5", "h2o+labels:read=5:channels=3:dense=1@0.5"],
]


def ids(count: int, rows: int = 1) -> torch.Tensor:
    return (torch.arange(count * rows).reshape(rows, count) * 7) % 40 + 1


@pytest.mark.parametrize("specs", MIXES)
def test_chunks_turns_forks_drafts_and_beams(specs: list[str]) -> None:
    """Nothing of it fails, the plan is right to the byte, and a rollback leaves what was there."""
    model = build("llama", layers=3)
    policy = Policy.by_layer(specs, budget=0.75)
    with kvpolicy.attach(model, policy) as handle, torch.no_grad():
        cache = PolicyCache(model, prompt=40, new=30)
        model(ids(25), cache=cache)
        model(ids(15), cache=cache)
        for _ in range(3):
            model(ids(1), cache=cache)
        assert kvpolicy.plan(model, policy, prompt=40, new=30).nbytes == cache.nbytes
        model(ids(5), cache=cache)
        two = cache.fork([0, 0])
        two.reorder_cache(torch.tensor([1, 0]))
        own = model(ids(1), cache=cache.fork()).logits
        logits = model(ids(1).expand(2, 1), cache=two).logits
        assert (logits - own).abs().max() < 1e-4
        cache.mark(most=4)
        for _ in range(4):
            model(ids(1), cache=cache)
        cache.rollback(0)
        assert torch.equal(model(ids(1), cache=cache).logits, own)
        cache.reset()
        model(ids(30), cache=cache)
        out = model.generate(ids(30, 2), max_new_tokens=5, num_beams=3, do_sample=False, pad_token_id=0)
        assert out.shape == (2, 35) and handle.cache is not None
        assert kvpolicy.plan(model, policy, batch=6, prompt=30, new=5).nbytes == handle.cache.nbytes
        drafted = kvpolicy.speculate(model, policy, ids(30), max_new_tokens=8)
    assert isinstance(drafted, torch.Tensor)
    wanted = model.generate(ids(30), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(drafted, wanted)


def test_the_part_that_forbids_a_move_is_named() -> None:
    """Of whichever layer has it."""
    model = build("llama", layers=3)
    for specs, shift, crop in (
        (["window@0.5", words("expected"), "window@0.5"], "got expected", "the selector expected"),
        (["full", "full", "kivi:group_size=4:residual_length=4"], "got kivi", "the codec kivi"),
        (["h2o@0.5", "h2o+merge@0.5", "h2o@0.5"], "got the merger merge", "the selector h2o"),
    ):
        budget = 1.0 if specs[0] == "full" else 0.9
        with kvpolicy.attach(model, Policy.by_layer(specs, budget=budget)), torch.no_grad():
            cache = PolicyCache(model, new=9)
            model(ids(30), cache=cache)
            with pytest.raises(KVPolicyError, match=shift):
                cache.shift(5, 2)
            with pytest.raises(KVPolicyError, match=crop):
                cache.crop(-1)


def test_moves_where_every_layer_allows_them() -> None:
    """A cropped cache goes on as one that never saw what was cropped."""
    model = build("llama", layers=3)
    with kvpolicy.attach(model, Policy.by_layer(["window@0.5", "streaming@0.9", "window@0.4"], budget=1.0)):
        caches = [PolicyCache(model, new=9) for _ in range(2)]
        with torch.no_grad():
            for cache, length in zip(caches, (20, 23), strict=True):
                model(ids(length), cache=cache)
            caches[1].crop(-3)
            one, other = (model(ids(1), cache=cache).logits for cache in caches)
            assert (one - other).abs().max() < 1e-5
            caches[0].shift(4, 3)
            model(ids(1), cache=caches[0])


def test_a_cache_of_another_policy_than_the_attached_one() -> None:
    """It works if the attached policy has the hooks that the cache's layers need, or says what is missing."""
    model = build("llama", layers=3)
    plain = words("h2o")
    quant = words("h2o", "kvquant")
    pins = words("h2o", "rotate")
    in_one = [plain, quant, plain], [plain, pins, plain]
    with kvpolicy.attach(model, plain):
        PolicyCache(model, Policy.by_layer([plain, words("tova"), plain], budget=0.7))
        for specs, message in zip(in_one, ("must store unrotated keys", "must store unrotated keys"), strict=True):
            with pytest.raises(KVPolicyError, match=message):
                PolicyCache(model, Policy.by_layer(specs, budget=0.7))
    with kvpolicy.attach(model, Policy.by_layer(in_one[1], budget=0.7)), torch.no_grad():
        PolicyCache(model, plain)
        PolicyCache(model, quant)
        with pytest.raises(KVPolicyError, match="must read hidden states"):
            PolicyCache(model, pins)
    with kvpolicy.attach(model, pins), torch.no_grad():
        cache = PolicyCache(model, Policy.by_layer(in_one[1], budget=0.7), new=9)
        for count in (20, 3, 1):
            model(ids(count), cache=cache)
