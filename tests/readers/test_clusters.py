"""Clusters weigh what their tokens weigh together."""

from __future__ import annotations

from functools import partial

import torch

from kvpolicy.engine.reading import ReadShape, choose, need_of
from kvpolicy.protocols import SINGLE_RANK
from kvpolicy.readers.clusters import ClusterTokens, need_in_clusters


def test_a_cluster_weighs_as_many_tokens_as_it_holds() -> None:
    """Also those that a merged slot stands for; and what is read of it is not estimated."""
    assigned = torch.tensor([[[0, 1, 1, 0, 2]]])
    log_tokens = torch.tensor([[[1.0, 1.0, 3.0, 1.0, 0.0]]]).log()
    clusters = ClusterTokens.counted(assigned, log_tokens, 4)
    assert torch.allclose(clusters.total, torch.tensor([[[2.0, 4.0, 0.0, 0.0]]]))
    left = clusters.unread(torch.tensor([[[2, 0, 3]]]), torch.tensor([[[True, True, False]]]))
    assert torch.allclose(left, torch.tensor([[[1.0, 1.0, 0.0, 0.0]]]))
    score = torch.tensor([[[[0.0, 1.0, 9.0, 9.0], [2.0, 0.0, 9.0, 9.0]]]])
    need = need_in_clusters(score, clusters, SINGLE_RANK)[0, 0].exp()
    weights = torch.tensor([[1.0, 2.718281828], [7.389056099, 1.0]])
    weights = (weights / (weights * torch.tensor([2.0, 4.0])).sum(-1, keepdim=True)).amax(0)
    assert torch.allclose(need, weights[[0, 1, 1, 0, 0]] * torch.tensor([1.0, 1, 3, 1, 0]), atol=1e-6)
    nothing = ClusterTokens.counted(assigned, torch.full((1, 1, 5), -torch.inf), 4)
    assert bool(need_in_clusters(score, nothing, SINGLE_RANK).isfinite().all())


def test_tokens_at_the_first_positions_are_always_read() -> None:
    """Behind the newest and the first kept token, as far as they fit."""
    positions = torch.tensor([[[5, 4, 3, 2, 1, 0]]], dtype=torch.int32)
    score = torch.tensor([[[[0.0, 9.0, 8.0, 7.0, 6.0, 5.0]]]])
    for count, want in ((2, {0, 5}), (3, {0, 1, 5}), (4, {0, 1, 2, 5}), (5, {0, 1, 2, 4, 5})):
        shape = ReadShape(1, count, ((0, 6),))
        length = torch.tensor([6])
        needs = partial(need_of, score, ranks=SINGLE_RANK)
        found = choose(shape, torch.tensor([9]), needs, positions, length, 1, sinks=3)
        assert {int(positions[0, 0, slot]) for slot in found.slots[0, 0]} == want
