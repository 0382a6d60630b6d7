"""The arithmetic of ranks, on one process; what they ask each other is tested in tests/parallel."""

import torch

from kvpolicy.parallel.runtime import sharing_of
from kvpolicy.protocols.ranks import SINGLE_RANK, Ranks


def _ranks(rank: int, queries: tuple[int, ...], heads: tuple[int, ...], replicas: int = 1) -> Ranks:
    return Ranks(rank=rank, size=len(heads), group="none", replicas=replicas, queries=queries, heads=heads)


def test_one_rank_is_arithmetic_alone() -> None:
    x = torch.randn(2, 6, 5)
    assert (
        SINGLE_RANK.total(x) is x and SINGLE_RANK.largest(x) is x and SINGLE_RANK.mine(x) is x and SINGLE_RANK.agree(x)
    )
    assert torch.equal(SINGLE_RANK.head_mean(x), x.double().mean(1).float())
    assert torch.equal(SINGLE_RANK.group_mean(x.unflatten(1, (3, 2))), x.double().unflatten(1, (3, 2)).mean(2).float())
    assert (SINGLE_RANK.held, SINGLE_RANK.query_heads(6), SINGLE_RANK.most_heads(3)) == (slice(None), 6, 3)


def test_a_mean_does_not_depend_on_the_order_of_heads() -> None:
    x = torch.rand(1, 64, 300) * 10.0 ** torch.randint(-6, 1, (1, 64, 1))
    assert torch.equal(SINGLE_RANK.head_mean(x), SINGLE_RANK.head_mean(x.flip(1)))
    assert not torch.equal(x.mean(1), x.flip(1).mean(1))


def test_uneven_heads_stand_behind_each_other() -> None:
    ranks = [_ranks(rank, (4, 2), (2, 1)) for rank in range(2)]
    assert [some.held for some in ranks] == [slice(0, 2), slice(2, 3)]
    assert [some.mine(torch.arange(6)).tolist() for some in ranks] == [[0, 1, 2, 3], [4, 5]]
    assert [some.query_heads(9) for some in ranks] == [6, 6] and ranks[1].most_heads(1) == 2


def test_twins_hold_the_same_head_and_other_queries() -> None:
    ranks = [_ranks(rank, (2, 2, 2, 2), (1, 1, 1, 1), replicas=2) for rank in range(4)]
    assert [some.held for some in ranks] == [slice(0, 1), slice(0, 1), slice(1, 2), slice(1, 2)]
    assert [some.mine(torch.arange(8)).tolist() for some in ranks] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_rank_without_heads_has_a_phantom_one() -> None:
    last = _ranks(3, (2, 2, 2, 0), (1, 1, 1, 0))
    assert last.phantom and last.held == slice(0, 1) and last.mine(torch.arange(6)).shape == (1,)
    assert not _ranks(2, (2, 2, 2, 0), (1, 1, 1, 0)).phantom and last.query_heads(1) == 6


def test_a_whole_model_is_not_shared() -> None:
    assert sharing_of(torch.nn.Linear(2, 2)) is None
