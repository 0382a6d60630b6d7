"""A model that is compiled as a whole: prompts and chunks, which are no plain steps, run as if it were not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import PolicyCache
from tests.conformance.models import build
from tests.engine.live import tensors_of

pytestmark = pytest.mark.usefixtures("fresh_compiler")

CASES = [
    ("llama", "squeeze+kvzip@0.5", {}),
    ("gpt2", "lava:window=6:kernel=3+scissorhands@60KB", {"chunks": "hold"}),
    ("gemma3", "snapkv:window=4@0.5", {"tile": 4}),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "policy", "how"), CASES)
def test_every_cache_is_that_of_uncompiled_forwards(family: str, policy: str, how: dict[str, Any]) -> None:
    """Not only the first one: what PyTorch compiled for one cache must not be run for another."""
    model = build(family, layers=2)
    with kvpolicy.attach(model, policy, **how), torch.no_grad():
        compiled = torch.compile(model, backend="eager")
        for rows, prompt in ((1, 12), (1, 12), (2, 15)):
            ids = torch.randint(3, 40, (rows, prompt + 3), generator=torch.Generator().manual_seed(prompt))
            mask = torch.ones_like(ids)
            mask[0, : 2 * (rows - 1)] = 0
            ours, theirs = (PolicyCache(model, prompt=prompt + 2, new=2) for _ in range(2))
            for start, end in ((0, prompt), (prompt, prompt + 2), (prompt + 2, prompt + 3)):
                given = {"attention_mask": mask[:, :end]}
                want = model(ids[:, start:end], cache=theirs, **given).logits
                got = compiled(ids[:, start:end], cache=ours, **given).logits
                torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
            mine = dict(tensors_of(ours))
            for name, tensor in tensors_of(theirs):
                torch.testing.assert_close(mine[name], tensor, rtol=0, atol=1e-4, equal_nan=True, msg=name)
