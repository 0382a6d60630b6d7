"""Times of codecs, and of a small model under each policy: `pytest tests/benchmarks --benchmark-enable`.

`-m "slow or not slow"` asks for 32,768 tokens too. The bars are held by `python -m kvpolicy_eval.bench ratios`, which
runs the stock cache beside ours, and `bench codecs` prints ratios; these are for watching one engine over time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy.registry import names
from kvpolicy_eval.bench.codecs import Case
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


CODECS = [name for name in names("codec") if name != "plain"]
LENGTHS = [4096, pytest.param(32768, marks=pytest.mark.slow)]


@pytest.fixture
def case(request: pytest.FixtureRequest, codec: str, tokens: int, tmp_path: Path) -> Case:
    with torch.inference_mode():
        return Case(codec, tokens if request.config.getoption("--benchmark-enable", False) else 512, tmp_path)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("what", ["encode", "score", "mix"])
def test_codec(benchmark: Any, case: Case, what: str) -> None:
    with torch.inference_mode():
        out = benchmark(getattr(case, what))
    if what != "encode":
        assert all(part.isfinite().all() for part in out)
