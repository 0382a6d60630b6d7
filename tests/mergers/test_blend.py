"""MergingPress: the vector of its law, its gate, and values without a length."""

from __future__ import annotations

import pytest
import torch

from kvpolicy import Blend, Policy
from kvpolicy.text.errors import KVPolicyError
from tests.mergers.test_merge import KEYS, VALUES, candidates


def test_vector() -> None:
    """Tokens 0, 2 and 3 stay; 1 goes to 0 with the weight .385056, and no key changes."""
    result = Blend().merge_prompt((), candidates(KEYS, VALUES, [0, 2, 3]))
    assert result.keys is None and result.counts is None
    torch.testing.assert_close(result.values[0, 0, 0], torch.tensor([8.887969, 0.556015]), atol=1e-6, rtol=0)
    assert torch.equal(result.values[0, 0, 1:], VALUES[2:])


def test_two_sources_of_one_target() -> None:
    """Both weights are from the value before, and the law divides by one and their sum."""
    keys = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.8, 0.2]])
    values = torch.tensor([[3.0, 4.0], [5.0, 0.0], [0.0, 15.0]])
    result = Blend().merge_prompt((), candidates(keys, values, [0]))
    cosines = torch.nn.functional.cosine_similarity(keys[1:], keys[:1])
    weights = cosines * torch.tensor([5 / 10, 15 / 20])
    want = (values[0] + (weights[:, None] * values[1:]).sum(0)) / (1 + weights.sum())
    torch.testing.assert_close(result.values[0, 0, 0], want)


@pytest.mark.parametrize(("least", "merges"), [(0.9938, True), (0.9939, False)])
def test_the_gate(least: float, merges: bool) -> None:
    given = candidates(KEYS, VALUES, [0, 2, 3])
    result = Blend(least=least).merge_prompt((), given)
    assert torch.equal(result.values, given.at_targets(given.values)) is not merges


def test_opposite_keys_are_dropped() -> None:
    keys = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    result = Blend().merge_prompt((), candidates(keys, VALUES[:3], [0]))
    assert torch.equal(result.values[0, 0], VALUES[:1])


def test_values_without_a_length() -> None:
    """Two of them have no share; one evicted into a value of zeros has all of it."""
    nothing = torch.zeros(2, 2)
    result = Blend().merge_prompt((), candidates(torch.ones(2, 2), nothing, [0]))
    assert torch.equal(result.values[0, 0], nothing[:1])
    result = Blend().merge_prompt((), candidates(torch.ones(2, 2), torch.tensor([[0.0, 0.0], [4.0, 2.0]]), [0]))
    torch.testing.assert_close(result.values[0, 0, 0], torch.tensor([2.0, 1.0]))


def test_refusals() -> None:
    with pytest.raises(KVPolicyError, match=r"Blend.least must be between 0 and 1, got -0.5"):
        Policy.parse("snapkv+blend:least=-0.5@0.2")
