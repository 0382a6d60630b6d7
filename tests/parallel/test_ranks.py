"""The harness itself: results come in order, and a rank that fails is heard at once."""

from __future__ import annotations

import os

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


def _process(rank: int, world: int) -> int:
    return os.getpid()


def _die(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(3)


def test_ranks_answer_in_order() -> None:
    assert run_ranks(_sum, 2, 10) == [(0, 21), (1, 21)]


def test_two_ranks_serve_many_calls_until_one_fails() -> None:
    first = run_ranks(_process, 2)
    assert run_ranks(_process, 2) == first and len(set(first)) == 2
    with pytest.raises(RankError, match="ValueError: the second rank has had enough"):
        run_ranks(_fail, 2)
    assert not {*run_ranks(_process, 2)} & {*first}


def test_a_rank_that_dies_is_noticed_and_fresh_ones_are_others() -> None:
    kept = run_ranks(_process, 2)
    with pytest.raises(RankError, match="rank 1 died, exit code 3"):
        run_ranks(_die, 2, fresh=True)
    assert run_ranks(_process, 2) == kept
