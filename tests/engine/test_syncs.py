"""An eager decode step reads little back from the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvpolicy
from kvpolicy import PolicyCache
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch

PROMPT = 24
STEPS = 12


class Reads(TorchDispatchMode):
    """Counts what waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        self.count += name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "policy",
    [
        "squeeze+h2o@0.5",
        "kvcrush@0.5",
        "snapkv+kivi:group_size=4:residual_length=4@0.5",
        "uniform/adakv+h2o+tokenwise:residual_length=4:block_size=4@0.5",
        "uniform/adakv+h2o+compensate@0.5",
        "uniform/adakv+h2o+compensate+tokenwise:residual_length=4:block_size=4@0.5",
    ],
)
def test_an_eager_step_waits_for_little(policy: str) -> None:
    """Twice, for the offset and the width of a mask, which transformers asks for; never once per layer."""
    model = build("llama")
    ids, mask = make_batch([PROMPT], [PROMPT] + [1] * STEPS)
    with kvpolicy.attach(model, policy), torch.no_grad():
        cache = PolicyCache(model, new=STEPS)
        forward(model, ids, mask, 0, PROMPT, cache)
        counts: list[int] = []
        for column in range(PROMPT, PROMPT + STEPS):
            with Reads() as reads:
                model(ids[:, column, None], position_ids=torch.tensor([[column]]), cache=cache)
            counts.append(reads.count)
    assert min(counts) <= 2
