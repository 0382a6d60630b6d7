"""D2O: the vector of its law, and its threshold."""

from __future__ import annotations

import pytest
import torch

from kvpolicy import D2O
from kvpolicy.mergers.d2o import D2OState
from kvpolicy.protocols import Tokens
from tests.mergers.test_merge import KEYS, VALUES, candidates


def test_vector() -> None:
    """Tokens 0, 2 and 3 stay; 1 is its own threshold and goes to 0, weighted by the cosine .993884."""
    state = D2O().alloc(1, 1, "cpu")
    result = D2O().merge_prompt(state, candidates(KEYS, VALUES, [0, 2, 3]))
    assert result.keys is not None and result.counts is None
    torch.testing.assert_close(result.keys[0, 0, 0], torch.tensor([0.947248, 0.049694]), atol=1e-6, rtol=0)
    torch.testing.assert_close(result.values[0, 0, 0], torch.tensor([7.981651, 0.993884]), atol=1e-6, rtol=0)
    assert torch.equal(result.keys[0, 0, 1:], KEYS[2:]) and torch.equal(result.values[0, 0, 1:], VALUES[2:])
    torch.testing.assert_close(state.threshold, torch.tensor([[0.993884]]), atol=1e-6, rtol=0)


def test_two_sources_of_one_target() -> None:
    """(.9, .1) of weight .99 and (.8, .2) of .97 on (1, 0), about: the law divides by three."""
    keys = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.8, 0.2]])
    state = D2OState(torch.full((1, 1), -9.0), torch.ones(1, 1))
    result = D2O(decay=1.0).merge_prompt(state, candidates(keys, keys, [0]))
    cosines = torch.nn.functional.cosine_similarity(keys[1:], keys[:1])
    want = (keys[0] + (cosines[:, None] * keys[1:]).sum(0)) / 3
    torch.testing.assert_close(result.values[0, 0, 0], want)
    torch.testing.assert_close(want, torch.tensor([0.889, 0.0977]), atol=2e-3, rtol=0)


@pytest.mark.parametrize("count", [2, 3, 5, 7, 40])
def test_equal_cosines_are_at_their_mean(count: int) -> None:
    """However their mean is rounded: all of them are merged."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        kept, evicted = torch.randn(2, 4, generator=generator)
        evicted = evicted + 2 * kept
        keys = torch.stack([kept, *[evicted] * count])
        result = D2O().merge_prompt(D2O().alloc(1, 1, "cpu"), candidates(keys, keys, [0]))
        cosine = torch.nn.functional.cosine_similarity(kept, evicted, dim=0)
        torch.testing.assert_close(result.values[0, 0, 0], (kept + count * cosine * evicted) / (1 + count))


def test_the_threshold_follows() -> None:
    state = D2O().alloc(1, 1, "cpu")
    slots = Tokens(
        torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]]),
        torch.ones(1, 1, 2, 2),
        torch.tensor([[[0, 1]]]),
        None,
        torch.ones(1, 1, 2, dtype=torch.bool),
    )
    seen: list[tuple[float, bool]] = []
    for cosine, there in ((0.8, True), (0.9, True), (0.2, False), (0.75, True)):
        key = torch.tensor([[[[cosine, -((1 - cosine**2) ** 0.5)]]]])
        victim = Tokens(key, key, torch.tensor([[[5]]]), None, torch.tensor([[[there]]]))
        merge = D2O().merge_token(state, victim, slots)
        seen.append((round(float(state.threshold), 4), bool(merge.write_mask)))
        assert int(merge.slot) == 0
    assert seen == [(0.8, True), (0.85, True), (0.85, False), (0.8, False)]
