"""Rule 11: what is random has a seed. `test_conversations.py` has that every method does the same twice."""

from __future__ import annotations

import pytest
import torch

import kvpolicy
from kvpolicy import PolicyCache
from tests.conformance.access import kept_positions
from tests.conformance.models import build
from tests.conformance.play import TURNS, make_batch, talk

Kept = list[list[list[list[int]]]]


def kept(policy: str) -> Kept:
    model = build("llama", layers=2)
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model)
        talk(model, *make_batch([26, 17]), TURNS, cache)
    return [kept_positions(layer) for layer in cache.policy_layers]


@pytest.mark.parametrize("option", ["anchor=random", "pick=random", "pick=random:anchor=mean"])
def test_seeds(option: str) -> None:
    found = [kept(f"kvcrush:{option}:seed={seed}/h2o@0.5") for seed in range(4)]
    assert any(one != found[0] for one in found[1:])


def test_layers_have_anchors_of_their_own() -> None:
    from kvpolicy.selectors.crush import anchor_bits

    bits = torch.zeros(1, 32, 4, dtype=torch.bool)
    drawn = [anchor_bits("random", bits, bits, seed) for seed in (0, 1, 1000003)]
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
