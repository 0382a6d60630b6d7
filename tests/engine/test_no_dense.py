"""Decode attends to codes a chunk at a time: no codec makes a dense copy of what it holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvpolicy.registry import names
from kvpolicy_eval.bench.codecs import DIM, HEADS, Case
from tests.engine.live import Alive

TOKENS = 16384
DENSE = TOKENS * HEADS * DIM * 4
"""Bytes of all keys, or all values, in fp32."""


@pytest.mark.parametrize("codec", [name for name in names("codec") if name != "plain"])
@pytest.mark.parametrize("what", ["score", "mix"])
def test_no_dense_copy(codec: str, what: str, tmp_path: Path) -> None:
    with torch.inference_mode():
        case = Case(codec, TOKENS, tmp_path)
        with Alive(torch.nn.Identity()) as watch:
            out = getattr(case, what)()
    assert sum(part.nbytes for part in out) < watch.peak < DENSE * 2 / 3
