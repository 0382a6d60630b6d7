"""The harness itself: results come in order, and a rank that fails is heard at once."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests.parallel.ranks import RankError, run_ranks


def _sum(rank: int, world: int, more: int) -> tuple[int, int, int]:
    total = torch.tensor(rank + more)
    dist.all_reduce(total)
    return rank, int(total), os.getpid()


def _fail(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("the second rank has had enough")
    dist.all_reduce(torch.ones(1))


def _die(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(3)


def test_two_ranks_serve_many_calls_until_one_fails() -> None:
    """They answer in order; one that dies is noticed, and fresh ones are others."""
    first = run_ranks(_sum, 2, 10)
    assert [answer[:2] for answer in first] == [(0, 21), (1, 21)]
    with pytest.raises(RankError, match="rank 1 died, exit code 3"):
        run_ranks(_die, 2, fresh=True)
    assert run_ranks(_sum, 2, 10) == first and first[0][2] != first[1][2]
    with pytest.raises(RankError, match="ValueError: the second rank has had enough"):
        run_ranks(_fail, 2)
    assert not {*run_ranks(_sum, 2, 10)} & {*first}
