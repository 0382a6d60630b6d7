"""Selectors by what a value does to an output: dropkv, caote, critical and defensive."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from kvpolicy import KVPolicyError, Policy
from kvpolicy.protocols import HeadShape, View, rerank_every
from kvpolicy.selectors.caote import CAOTE
from kvpolicy.selectors.common import head_sum, shares
from kvpolicy.selectors.critical import CriticalKV, CriticalState
from kvpolicy.selectors.dropkv import squared_losses
from kvpolicy.selectors.h2o import H2O
from kvpolicy.selectors.keydiff import KeyDiff
from kvpolicy.selectors.snapkv import SnapKV
from kvpolicy.selectors.tova import TOVA
from kvpolicy.statistics import Results, Vectors
from tests.conformance.bench import Bench, draw


def removed(weights: Tensor, values: Tensor, j: int) -> Tensor:
    """The output without a token, renormalized."""
    rest = weights.clone()
    rest[j] = 0
    return (rest / rest.sum()) @ values


def test_the_closed_form_is_the_loss_of_one_token() -> None:
    generator = torch.Generator().manual_seed(0)
    for sharp in (0.1, 1.0, 6.0):
        weights = torch.softmax(torch.randn(9, generator=generator).double() * sharp, 0)
        values = torch.randn(9, 4, generator=generator).double()
        got = squared_losses(weights[None, None, None], values[None, None])[0, 0, 0]
        brute = torch.stack([(weights @ values - removed(weights, values, j)).square().sum() for j in range(9)])
        torch.testing.assert_close(got, brute, rtol=1e-6, atol=1e-12)


def test_the_only_token_that_is_attended_to_is_the_last_to_go() -> None:
    """In fp32 its weight is 1, and that of all others together 0."""
    weights = torch.tensor([[[[0.0, 1.0, 0.0]]]]).double()
    got = squared_losses(weights, torch.randn(1, 1, 3, 4, generator=torch.Generator().manual_seed(0)).double())
    assert int(got.argmax()) == 1


def test_nearly_all_attention_is_the_whole_output() -> None:
    """What is left without the token is too little to be told from rounding."""
    weights = torch.tensor([[[[1e-6, 1 - 2e-6, 1e-6]]]]).double()
    values = torch.randn(1, 1, 3, 4, generator=torch.Generator().manual_seed(0)).double()
    assert float(squared_losses(weights, values)[0, 0, 0, 1]) == float(values[0, 0, 1].square().sum())


def test_equal_values_are_no_loss() -> None:
    weights = torch.softmax(torch.randn(1, 1, 5, 7, generator=torch.Generator().manual_seed(0)), -1).double()
    assert not squared_losses(weights, torch.full((1, 1, 7, 4), 0.3).double()).any()


def test_learned_sinks_keep_their_share() -> None:
    """They are in the softmax and have no value, so that nothing but the tokens is renormalized."""
    weights = torch.softmax(torch.randn(6, generator=torch.Generator().manual_seed(1)).double(), 0)
    values = torch.randn(6, 3, generator=torch.Generator().manual_seed(2)).double()
    values[0] = 0  # as a token of value 0 that is never dropped
    whole = squared_losses(weights[None, None, None], values[None, None])[0, 0, 0, 1:]
    sink = squared_losses(weights[None, None, None, 1:], values[None, None, 1:])[0, 0, 0]
    torch.testing.assert_close(whole, sink)


@pytest.mark.parametrize("wrapper", [CriticalKV, CAOTE])
def test_bases_without_attention_are_refused(wrapper: Any) -> None:
    with pytest.raises(KVPolicyError, match=r"base must hold the attention of each token .* try snapkv, h2o or probe"):
        wrapper(base=KeyDiff())
    with pytest.raises(KVPolicyError, match="base must"):
        wrapper(base=TOVA())
    with pytest.raises(KVPolicyError, match="base must be a selector, got 3"):
        wrapper(base=3)


def test_critical_has_a_budget_for_each_row() -> None:
    bench = Bench("critical:split=0.5/h2o", [20, 6])
    bench.forward(*draw(30, 0, batch=2))
    state = bench.layer.tensors.state
    assert isinstance(state, CriticalState)
    assert state.first.sum(-1).tolist() == [[10, 10], [3, 3]]
    bench.check()


def test_values_without_attention_count_by_their_size() -> None:
    """That is what epsilon is for: tokens of equal attention are ranked by what their values add."""
    bench = Bench("critical:split=0.0/h2o:recent=0.0", [4])
    q, k, v = draw(12, 0, heads=1, group=1)
    v[:, :, 5] *= 100
    bench.forward(torch.zeros_like(q), torch.zeros_like(k), v)
    assert 5 in bench.turns[-1].kept[0][0]
    bench.check()


def test_shares_of_a_head_without_attention() -> None:
    attention = torch.tensor([[[0.0, 0.0], [1.0, 3.0]]])
    assert shares(attention, torch.ones_like(attention).bool()).tolist() == [[[0.0, 0.0], [0.25, 0.75]]]
    assert shares(attention, torch.tensor([[[True, True], [True, False]]])).tolist() == [[[0.0, 0.0], [1.0, 0.0]]]


def view_of(positions: list[list[int]], alike: bool) -> View:
    where = torch.tensor([positions], dtype=torch.int32)
    return View(where, torch.tensor([int(where.max()) + 1]), torch.tensor([2]), 0, alike=alike)


def test_sums_over_heads_are_by_position() -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]]])
    assert head_sum(x, view_of([[0, 1, 2], [0, 1, 2]], True)).tolist() == [[[11, 22, 33], [11, 22, 33]]]
    found = head_sum(x, view_of([[0, 1, 2], [-1, 0, 2]], False))
    assert found.tolist() == [[[21, 2, 33], [0, 21, 33]]]


def test_the_mass_of_attention_decides_how_many_tokens_come_first() -> None:
    """All of it takes every token that is attended to, up to the budget; none of it takes none."""
    for mass, first in ((0.0, 0), (1.0, 6)):
        bench = Bench(f"defensive:window=4:mass={mass}", [10])
        bench.forward(*draw(40, 0))
        score = bench.layer.tensors.state.score
        assert (score >= 1).sum(-1).tolist() == [[first, first]]
        bench.check()


def test_norms_are_asked_for_after_prompts_alone() -> None:
    for spec in ("defensive", "critical/h2o", "dropkv"):
        selector = Policy.parse(spec).selector
        assert any(each.reads_vectors for each in selector.statistics) and rerank_every(selector) == 0
        assert not any(isinstance(each, Vectors) and each.generated for each in selector.statistics)


def test_caote_needs_the_width_of_a_value() -> None:
    state: Any = CAOTE(base=H2O()).alloc(1, 2, 3, "cpu", HeadShape(2, 5))
    assert state.output.shape == (1, 2, 5)
    assert CAOTE(base=SnapKV(), every=9).rerank_every == 9
    assert CAOTE(base=CriticalLike(), every=9).rerank_every == 4


class CriticalLike(H2O):  # a base that ranks again more often
    """H2O that is ranked again."""

    rerank_every: ClassVar[int] = 4

    def rerank(self, state: Any, seen: Results, view: View) -> Any:
        return state
