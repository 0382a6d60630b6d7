"""The most similar target among several blocks of them: of equal ones the first, and none that is hidden or a copy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpolicy.mergers.common import BLOCK, Nearest, Tile, in_blocks, similar_targets, unit
from tests.engine.parts import generator

ROWS = 2
HEADS = 2
TOKENS = 9
DIM = 4


def slow(keys: Tensor, targets: Tensor, is_target: Tensor) -> list[int]:
    """The first of the targets of largest cosine for each token, one after the other."""
    found: list[int] = []
    for b, h, n in torch.ones(keys.shape[:3]).nonzero().tolist():
        cosines = (targets[b, h] * keys[b, h, n]).sum(-1).tolist()
        allowed = [t for t, flag in enumerate(is_target[b, h].tolist()) if flag]
        found.append(max(allowed, key=lambda t, cosines=cosines: (round(cosines[t], 5), -t)))
    return found


@pytest.mark.parametrize("equal", ["none", "pairs", "all"])
@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("count", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_the_first_of_the_most_similar(count: int, hides: bool, equal: str) -> None:
    keys, targets = (unit(torch.randn(ROWS, HEADS, n, DIM, generator=generator(n))) for n in (TOKENS, count))
    if equal == "pairs":  # in different blocks, where there are several
        targets[:, :, count // 2 :] = targets[:, :, : count - count // 2].clone()
    elif equal == "all":
        targets[:] = targets[:, :, :1]
    is_target = torch.rand(ROWS, HEADS, count, generator=generator(0)) < (0.5 if hides else 2)
    is_target[..., count // 2] = True
    memory = torch.empty(ROWS * HEADS * TOKENS * (count + BLOCK))
    hidden = in_blocks(is_target) if hides else None
    found = similar_targets(keys, in_blocks(targets), hidden, memory)
    assert found.target.flatten().tolist() == slow(keys, targets, is_target)
    want = targets.gather(2, found.target[..., None].expand(-1, -1, -1, DIM))
    torch.testing.assert_close(found.cosine, (want * keys).sum(-1))


@pytest.mark.parametrize("device", ["cpu", "product"])
def test_sums_of_targets(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Added one by one on a CPU, and by a product elsewhere."""
    if device == "product":
        monkeypatch.setattr("kvpolicy.mergers.common.ADDS_IN_ORDER", ())
    vectors = torch.randn(ROWS, HEADS, TOKENS, DIM, generator=generator(1))
    target = torch.randint(0, 3, (ROWS, HEADS, TOKENS), generator=generator(2))
    none = torch.zeros(())
    total = torch.ones(ROWS, HEADS, 5, DIM)
    Tile(none, none, none, Nearest(target, none)).add_to(total, vectors)
    for b, h, t in torch.ones(ROWS, HEADS, 5).nonzero().tolist():
        want = 1 + vectors[b, h][target[b, h] == t].sum(0)
        torch.testing.assert_close(total[b, h, t], want)
