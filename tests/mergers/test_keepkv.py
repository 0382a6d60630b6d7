"""KeepKV: means by attention, counts in full, and the queries that see a token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvpolicy import KeepKV, Policy
from kvpolicy.protocols import Candidates
from kvpolicy.text.errors import KVPolicyError
from tests.mergers.test_merge import KEYS, VALUES, candidates
from tests.mergers.test_targets import held


def prompt(rows: Tensor, kept: list[int]) -> Candidates:
    """The four tokens, and the attention rows [Hq, W, 4] of the last queries."""
    return candidates(KEYS, VALUES, kept)._replace(attention=rows[None], length=torch.tensor([4]))


def test_weights_are_attention_and_counts_are_numbers() -> None:
    """Token 1 has three times the attention of 0, to which it goes."""
    rows = torch.tensor([[[0.1, 0.3, 0.6, 0.0], [0.1, 0.3, 0.2, 0.4]]])
    result = KeepKV(window=2).merge_prompt((), prompt(rows, [0, 2, 3]))
    assert result.keys is not None and result.counts is not None
    torch.testing.assert_close(result.keys[0, 0, 0], (KEYS[0] + 3 * KEYS[1]) / 4)
    torch.testing.assert_close(result.values[0, 0, 0], (VALUES[0] + 3 * VALUES[1]) / 4)
    assert torch.equal(result.keys[0, 0, 1:], KEYS[2:]) and torch.equal(result.values[0, 0, 1:], VALUES[2:])
    torch.testing.assert_close(result.counts[0, 0], torch.tensor([math.log(2), 0.0, 0.0]))


def test_a_token_is_weighed_by_the_queries_that_see_it() -> None:
    """Two query heads of two queries each: token 3 is seen by the last one of both alone, and weighs 0.4, not 0.2."""
    rows = torch.tensor([[[0.2, 0.2, 0.6, 0.0], [0.2, 0.2, 0.2, 0.4]]]).expand(2, -1, -1)
    result = KeepKV(window=2).merge_prompt((), prompt(rows, [0, 1, 2]))
    torch.testing.assert_close(result.values[0, 0, 2], (0.4 * VALUES[2] + 0.4 * VALUES[3]) / 0.8)


def test_queries_that_there_are_not_do_not_count() -> None:
    rows = torch.tensor([[[0.2, 0.2, 0.6, 0.0], [0.2, 0.2, 0.2, 0.4]]])
    padded = prompt(torch.cat([torch.zeros(1, 3, 4), rows], 1), [3])._replace(keys=torch.ones(1, 1, 4, 2))
    got = KeepKV(window=5).merge_prompt((), padded)
    weights = torch.tensor([[0.2], [0.2], [0.4], [0.4]])
    torch.testing.assert_close(got.values[0, 0, 0], (weights * VALUES).sum(0) / 1.2)
    want = KeepKV(window=2).merge_prompt((), prompt(rows, [0, 1, 2]))
    more = torch.cat([torch.rand(1, 3, 4), rows], 1)  # a selector may ask for more queries
    assert torch.equal(KeepKV(window=2).merge_prompt((), prompt(more, [0, 1, 2])).values, want.values)


def test_tokens_without_attention_weigh_alike() -> None:
    rows = torch.tensor([[[0.0, 0.0, 0.5, 0.5]]])
    result = KeepKV(window=1).merge_prompt((), prompt(rows, [0, 2, 3]))
    torch.testing.assert_close(result.values[0, 0, 0], (VALUES[0] + VALUES[1]) / 2)


@pytest.mark.parametrize(("least", "merges"), [(0.9938, True), (0.9939, False)])
def test_the_gate(least: float, merges: bool) -> None:
    rows = torch.full((1, 1, 4), 0.25)
    result = KeepKV(window=1, least=least).merge_prompt((), prompt(rows, [0, 2, 3]))
    assert result.counts is not None and bool(result.counts.any()) is merges
    merge = KeepKV(least=least).merge_token((), held(KEYS[1:2], [1]), held(KEYS[[0, 2, 3]], [0, 2, 3]))
    assert merge.slot.item() == 0 and merge.write_mask.item() is merges


def test_decoding_weighs_by_counts() -> None:
    slots = held(KEYS[[0, 2]], [0, 2], VALUES[[0, 2]])
    victim = held(KEYS[1:2], [1], VALUES[1:2])
    slots = slots._replace(counts=torch.tensor([[[3.0, 1.0]]]).log())
    merge = KeepKV().merge_token((), victim, slots)
    assert merge.keys is not None and merge.counts is not None
    torch.testing.assert_close(merge.keys[0, 0, 0], (3 * KEYS[0] + KEYS[1]) / 4)
    torch.testing.assert_close(merge.values[0, 0, 0], (3 * VALUES[0] + VALUES[1]) / 4)
    torch.testing.assert_close(merge.counts.exp().item(), 4.0)


def test_refusals() -> None:
    assert str(Policy.parse("snapkv+keepkv@0.2")) == "snapkv+keepkv@0.2"
    with pytest.raises(KVPolicyError, match="window must be at least 1"):
        KeepKV(window=0)
    with pytest.raises(KVPolicyError, match=r"KeepKV.least must be between -1 and 1"):
        KeepKV(least=2.0)
