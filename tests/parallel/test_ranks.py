"""The harness itself: results come in order, and a rank that fails is heard at once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.parallel.ranks import RankError, run_ranks


def _sum(rank: int, world: int, more: int) -> tuple[int, int]:
    total = torch.tensor(rank + more)
    dist.all_reduce(total)
    return rank, int(total)


def _fail(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("the second rank has had enough")
    dist.all_reduce(torch.ones(1))


def test_ranks_answer_in_order() -> None:
    assert run_ranks(_sum, 2, 10) == [(0, 21), (1, 21)]


def test_a_failing_rank_is_heard_at_once() -> None:
    with pytest.raises(RankError, match="ValueError: the second rank has had enough"):
        run_ranks(_fail, 2)
