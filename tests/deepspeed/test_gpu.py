"""Two ranks on one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import PolicyCache
from tests.conformance.access import ranks_of
from tests.deepspeed.checkpoints import make, save
from tests.parallel.ranks import run_ranks

pytest.importorskip("deepspeed")
PROMPT = 25
STEPS = 8
POLICIES = ["full", "squeeze+kvcrush@0.5", "tova@0.5", "h2o+kivi:group_size=4:residual_length=4@0.5"]


def _play(model: Any, policy: str) -> tuple[PolicyCache, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, model.config.vocab_size, (2, PROMPT + STEPS), generator=draw).to(model.device)
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = PolicyCache(model, new=STEPS)
        logits = model(tokens[:, :PROMPT], cache=cache).logits
        for at in range(PROMPT, PROMPT + STEPS):
            logits = model(tokens[:, at : at + 1], cache=cache).logits
    return cache, logits.float()


def _compare(rank: int, world: int, folder: str) -> dict[str, tuple[float, float]]:
    """For each policy, the fraction of positions that a single rank keeps too, and the largest difference of logits."""
    import kvpolicy_deepspeed

    torch.backends.cuda.matmul.allow_tf32 = False
    model = kvpolicy_deepspeed.load(folder, dtype="float32")
    alone = make("llama").to(model.device)
    found = dict[str, tuple[float, float]]()
    for policy in POLICIES:
        some, mine = _play(model, policy)
        one, whole = _play(alone, policy)
        pairs = [
            (b.positions[:, ranks_of(a).held], a.positions)
            for a, b in zip(some.policy_layers, one.policy_layers, strict=True)
        ]
        same = [float((left.sort(-1).values == right.sort(-1).values).float().mean()) for left, right in pairs]
        found[policy] = (min(same), float((mine - whole).abs().max()))
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_two_ranks_on_one_gpu(tmp_path: Path) -> None:
    for found in run_ranks(_compare, 2, save("llama", tmp_path)):
        assert all(share > 0.95 for share, _ in found.values()), found
        assert found["full"][1] < 1e-4
