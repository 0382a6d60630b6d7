"""KVMerger: runs of similar neighbors, their pivots, and the Gaussian of distances."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvpolicy import KVMerger, Policy
from kvpolicy.protocols import Candidates, Merged
from kvpolicy.text.errors import KVPolicyError
from tests.mergers.test_merge import KEYS, VALUES, candidates


def ranked(given: Candidates, priority: list[float]) -> Candidates:
    """Candidates whose priorities are given by position."""
    own = torch.tensor(priority)[given.positions.long()]
    return given._replace(priority=own)


def merged(keys: Tensor, values: Tensor, kept: list[int], priority: list[float], **how: list[int]) -> Merged:
    return KVMerger().merge_prompt((), ranked(candidates(keys, values, kept, **how), priority))  # pyright: ignore


def test_a_run_of_two() -> None:
    """Token 1 is its own mean distance away from 0, so that its weight is 1/e; the next run has no evicted token."""
    result = merged(KEYS, VALUES, [0, 2, 3], [0.0] * 4)
    weight = math.exp(-1)
    assert result.keys is not None and result.counts is None
    torch.testing.assert_close(result.keys[0, 0, 0], (KEYS[0] + weight * KEYS[1]) / (1 + weight))
    torch.testing.assert_close(result.values[0, 0, 0], (VALUES[0] + weight * VALUES[1]) / (1 + weight))
    assert torch.equal(result.keys[0, 0, 1:], KEYS[2:]) and torch.equal(result.values[0, 0, 1:], VALUES[2:])


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 2, 0, 4, 1, 3]])
def test_the_pivot_has_the_highest_priority_of_its_run(order: list[int]) -> None:
    """Of two runs of three: the first has two kept tokens, and the second none, so that its tokens are dropped."""
    keys = torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, 0.3], [0.0, 1.0], [0.1, 1.0], [0.0, 1.1]])
    values = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    result = merged(keys, values, [0, 2], [1.0, 0.0, 2.0, 9.0, 9.0, 9.0], order=order)
    weight = math.exp(-1)
    assert torch.equal(result.values[0, 0, 0], values[0])
    torch.testing.assert_close(result.values[0, 0, 1], (values[2] + weight * values[1]) / (1 + weight))
    tie = merged(keys, values, [0, 2], [2.0] * 6, order=order)
    assert torch.equal(tie.values[0, 0, 1], values[2]) and not torch.equal(tie.values[0, 0, 0], values[0])


def test_nearer_tokens_weigh_more() -> None:
    keys = torch.tensor([[1.0, 0.0], [1.0, 0.2], [1.0, 0.6]])
    result = merged(keys, keys, [0], [0.0] * 3)
    weights = [math.exp(-((d / 0.4) ** 2)) for d in (0.2, 0.6)]  # twice the variance is the mean distance squared
    want = (keys[0] + weights[0] * keys[1] + weights[1] * keys[2]) / (1 + sum(weights))
    torch.testing.assert_close(result.values[0, 0, 0], want)


def test_equal_keys_weigh_alike() -> None:
    result = merged(torch.ones(4, 2), VALUES, [1], [0.0] * 4)
    torch.testing.assert_close(result.values[0, 0, 0], VALUES.mean(0))


def test_an_unlike_neighbor_ends_a_run() -> None:
    """Token 2 is as the pivot, but 1 stands between them."""
    keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    result = merged(keys, VALUES[:3], [0], [0.0] * 3)
    assert torch.equal(result.values[0, 0], VALUES[:1])


def test_refusals() -> None:
    assert str(Policy.parse("h2o+kvmerger@0.2")) == "h2o+kvmerger@0.2"
    with pytest.raises(KVPolicyError, match=r"KVMerger.least must be between -1 and 1"):
        Policy.parse("h2o+kvmerger:least=2@0.2")
