"""Decode attends to codes a chunk at a time: no codec makes a dense copy of what it holds."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.registry import names
from kvpolicy_eval.bench.codecs import DIM, HEADS, Case
from tests.engine.live import Alive

TOKENS = 16384
DENSE = TOKENS * HEADS * DIM * 4
"""Bytes of all keys, or all values, in fp32."""


@pytest.fixture(scope="module", params=[name for name in names("codec") if name != "plain"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A codec that holds many tokens; writing them takes longer than reading."""
    with torch.inference_mode():
        return Case(request.param, TOKENS, tmp_path_factory.mktemp("calibration"))


@pytest.mark.parametrize("what", ["score", "mix"])
def test_no_dense_copy(case: Case, what: str) -> None:
    with torch.inference_mode(), Alive(torch.nn.Identity()) as watch:
        out = getattr(case, what)()
    assert sum(part.nbytes for part in out) < watch.peak < DENSE * 2 / 3
