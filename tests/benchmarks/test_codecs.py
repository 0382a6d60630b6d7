"""Times of encode, score and mix of every codec: `pytest tests/benchmarks/test_codecs.py --benchmark-enable`.

`-m "slow or not slow"` asks for 32,768 tokens too. `python -m kvpolicy_eval.bench codecs` prints ratios to dense keys
and values; these are for watching one codec over time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvpolicy.registry import names
from kvpolicy_eval.bench.codecs import Case

CODECS = [name for name in names("codec") if name != "plain"]
LENGTHS = [4096, pytest.param(32768, marks=pytest.mark.slow)]


@pytest.fixture
def case(request: pytest.FixtureRequest, codec: str, tokens: int, tmp_path: Path) -> Case:
    with torch.inference_mode():
        return Case(codec, tokens if request.config.getoption("--benchmark-enable", False) else 512, tmp_path)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("what", ["encode", "score", "mix"])
def test_speed(benchmark: Any, case: Case, what: str) -> None:
    with torch.inference_mode():
        out = benchmark(getattr(case, what))
    if what != "encode":
        assert all(part.isfinite().all() for part in out)
