"""Elastic Cache: the mean of a kept token and of those that are nearest to it."""

from __future__ import annotations

import torch

from kvpolicy import Elastic, Policy
from kvpolicy.protocols import Tokens
from tests.mergers.test_merge import KEYS, VALUES, candidates


def test_vector() -> None:
    """Tokens 0, 2 and 3 stay, and 1 goes to 0, the earlier of two neighbors."""
    result = Elastic().merge_prompt((), candidates(KEYS, VALUES, [0, 2, 3]))
    assert result.keys is not None and result.counts is None
    torch.testing.assert_close(result.keys[0, 0, 0], torch.tensor([0.95, 0.05]))
    torch.testing.assert_close(result.values[0, 0, 0], torch.tensor([8.0, 1.0]))
    assert torch.equal(result.keys[0, 0, 1:], KEYS[2:]) and torch.equal(result.values[0, 0, 1:], VALUES[2:])


def test_several_tokens_weigh_alike_at_once() -> None:
    """Positions 1 and 2 are nearest to 0, and 3 to 5 to 6, of seven tokens in any order."""
    torch.manual_seed(0)
    keys = torch.randn(7, 4)
    values = torch.randn(7, 4)
    result = Elastic().merge_prompt((), candidates(keys, values, [0, 6], order=[4, 6, 0, 2, 5, 1, 3]))
    assert result.keys is not None
    # Position 3 is as near to 0 as to 6.
    for held, every in ((result.keys, keys), (result.values, values)):
        torch.testing.assert_close(held[0, 0, 0], every[:4].mean(0))
        torch.testing.assert_close(held[0, 0, 1], every[4:].mean(0))


def test_a_victim_takes_half_of_the_nearest_slot() -> None:
    keys = torch.randn(1, 1, 4, 4)
    values = torch.randn(1, 1, 4, 4)
    there = torch.ones(1, 1, 3, dtype=torch.bool)
    slots = Tokens(keys[:, :, :3], values[:, :, :3], torch.tensor([[[9, 2, 4]]]), None, there)
    victim = Tokens(keys[:, :, 3:], values[:, :, 3:], torch.tensor([[[6]]]), None, there[..., :1])
    merge = Elastic().merge_token((), victim, slots)
    assert merge.slot.item() == 2 and merge.write_mask.item() and merge.keys is not None
    torch.testing.assert_close(merge.keys[0, 0, 0], keys[0, 0, 2:].mean(0))
    torch.testing.assert_close(merge.values[0, 0, 0], values[0, 0, 2:].mean(0))
    nowhere = Elastic().merge_token((), victim, slots._replace(there=~there))
    assert not nowhere.write_mask.item()


def test_spec() -> None:
    assert str(Policy.parse("h2o+elastic@0.2")) == "h2o+elastic@0.2"
