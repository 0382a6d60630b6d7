"""Times of a small model under each policy: `pytest tests/benchmarks --benchmark-enable`.

The bars are held by `python -m kvpolicy_eval.bench ratios`, which runs the stock cache beside ours; these are for
watching one engine over time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy_eval.bench.models import llama, tokens

POLICIES = ["full", "window@0.2", "h2o@0.2", "snapkv@0.2", "kvcrush@0.2", "squeeze+snapkv@0.2", "snapkv+kivi@0.2"]


@pytest.mark.parametrize("policy", POLICIES)
def test_prefill(benchmark: Any, policy: str) -> None:
    model = llama(layers=2, hidden=128)
    ids = tokens(512)
    with torch.inference_mode(), kvpolicy.attach(model, policy) as handle:
        out = benchmark(lambda: model(ids, logits_to_keep=1))
        assert handle.cache is not None
    assert out.logits.isfinite().all()


@pytest.mark.parametrize("policy", POLICIES)
def test_step(benchmark: Any, policy: str) -> None:
    model = llama(layers=2, hidden=128)
    ids = tokens(512)
    with torch.inference_mode(), kvpolicy.attach(model, policy):
        cache = kvpolicy.PolicyCache(model)
        model(ids, cache=cache)
        out = benchmark(lambda: model(tokens(1), cache=cache))
    assert out.logits.isfinite().all()
