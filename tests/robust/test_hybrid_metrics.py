"""Measured layer budgets of models whose sliding-window layers are not managed."""

from __future__ import annotations

import pytest

import kvpolicy
from kvpolicy import PolicyCache
from tests.conformance.models import build
from tests.conformance.play import make_batch, talk


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_rows_that_begin_in_a_later_chunk_are_measured_then(family: str) -> None:
    """One row has padding alone in the first chunk, so that measured and held cosines meet in the second."""
    model = build(family)
    turns = [12, 14, 1, 1]
    ids, mask = make_batch([12, 12], turns)
    mask[1, :12] = 0
    with kvpolicy.attach(model, "squeeze+window@0.5"):
        cache = PolicyCache(model, new=4)
        talk(model, ids, mask, turns, cache)
        assert cache.plan is not None and cache.plan.measured
        managed = {layer.layer_idx for layer in cache.policy_layers}
        assert 0 not in managed, "the first layer of these models is a sliding window"
