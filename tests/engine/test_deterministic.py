"""Rule 11: the same policy, model and prompt keep the same tokens; what is random has a seed."""

from __future__ import annotations

import pytest
import torch

import kvpolicy
from kvpolicy import PolicyCache
from tests.conformance.access import kept_positions
from tests.conformance.models import build
from tests.conformance.play import TURNS, make_batch, talk
from tests.conformance.policies import CODECS, SELECTORS, words
from tests.sampling import each_once, product

CHOSEN = [*SELECTORS, "kvcrush:pick=random:buckets=distance/h2o"]
Kept = list[list[list[list[int]]]]


def kept(policy: str) -> Kept:
    model = build("llama")
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model)
        talk(model, *make_batch([26, 17]), TURNS, cache)
    return [kept_positions(layer) for layer in cache.policy_layers]


@product("selector,codec", CHOSEN, CODECS, sample=each_once(CHOSEN, CODECS))
def test_twice_the_same(selector: str, codec: str) -> None:
    policy = words("squeeze", selector, codec)
    first = kept(policy)
    torch.manual_seed(1234)
    torch.rand(7)
    assert kept(policy) == first


@pytest.mark.parametrize("option", ["anchor=random", "pick=random", "pick=random:anchor=mean"])
def test_seeds(option: str) -> None:
    found = [kept(f"kvcrush:{option}:seed={seed}/h2o@0.5") for seed in range(4)]
    assert any(one != found[0] for one in found[1:])


def test_no_seed_is_drawn_from_the_world() -> None:
    """A policy must not disturb sampling."""
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    kept("kvcrush:pick=random/h2o@0.5")
    assert torch.equal(torch.rand(3), want)


def test_layers_have_anchors_of_their_own() -> None:
    from kvpolicy.selectors._crush import anchor_bits

    bits = torch.zeros(1, 32, 4, dtype=torch.bool)
    drawn = [anchor_bits("random", bits, bits, seed) for seed in (0, 1, 1000003)]
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
