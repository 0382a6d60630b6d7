"""An eager decode step has few operations, and none that waits for the device."""

from __future__ import annotations

import pytest
import torch

from kvpolicy_eval.bench.launches import POLICIES
from kvpolicy_eval.bench.operations import LAYERS, Operations, step_operations

LIMITS = {
    "full": 41,
    "window@0.2": 46,
    "streaming@0.2": 50,
    "snapkv@0.2": 49,
    "h2o@0.2": 52,
    "tova@0.2": 50,
    "expected@0.2": 80,
    "keydiff@0.2": 60,
    "squeeze+kvcrush/snapkv@0.2": 52,
    "h2o+merge@0.2": 113,
    "tokenwise:bits=4": 59,
    "kivi:bits=4": 58,
    "snapkv+kivi:bits=4@0.5": 71,
    "snapkv+tokenwise:bits=4@0.5": 72,
    "uniform/adakv+snapkv@0.2": 70,
    "uniform/adakv+h2o@0.2": 73,
    "uniform/adakv+snapkv+tokenwise:bits=4@0.5": 93,
    "full+quest:read=64:dense=0": 78,
    "snapkv+quest:read=64:dense=0@0.5": 136,
    "uniform/adakv+kvzip+tokenwise:bits=4@0.5": 95,
}
"""The most operations per layer of a step that encodes no block; lower them when a step needs fewer."""


def test_every_policy_of_the_table_has_a_limit() -> None:
    assert tuple(LIMITS) == POLICIES


@pytest.mark.filterwarnings("ignore:The budget")
@pytest.mark.parametrize("policy", POLICIES)
def test_operations_of_a_step(policy: str) -> None:
    """And the limit is the least one, so that a saving is noted."""
    counted = step_operations(policy)
    assert -(-counted.operations // LAYERS) == LIMITS[policy]
    assert counted.waits == 0


def test_views_are_not_counted_and_reads_wait() -> None:
    numbers = torch.ones(4, 4)
    row = torch.tensor([1])
    with Operations() as operations:
        numbers.view(2, 8).T.add(1)  # an operation, and two views of it
        numbers[numbers[0] > 0]  # a comparison, and an index that waits
        numbers.index_copy_(0, row, numbers[:1].clone())
        numbers.sum().item()
    assert operations.counted.operations == 7
    assert operations.counted.waits == 2


def test_bytes_are_those_that_an_operation_touches() -> None:
    numbers = torch.ones(4, 4)
    row = torch.tensor([1])
    other = torch.zeros(1, 4)
    with Operations() as operations:
        numbers.index_copy_(0, row, other)  # a row is read and written
        other.expand(4, 4).neg()  # the same row is read, and four are written
    assert operations.counted.nbytes == 2 * 16 + 16 + 64
