"""Query heads of two layers stand together by their KV head, those of the second layer last."""

from __future__ import annotations

import torch

from kvpolicy.statistics.windows import together


def test_groups_grow() -> None:
    first = torch.tensor([[10, 11, 20, 21]])[..., None]
    second = torch.tensor([[100, 200]])[..., None]
    assert together(first, second, 2).squeeze(-1).tolist() == [[10, 11, 100, 20, 21, 200]]
