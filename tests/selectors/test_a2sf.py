"""A2SF: attention that is forgotten, from H2O's sums to the newest query alone."""

from __future__ import annotations

import pytest
import torch

from kvpolicy import KVPolicyError, Policy
from kvpolicy.selectors.a2sf import A2SF
from tests.selectors.walks import scores


def test_a_factor_of_one_is_h2o() -> None:
    torch.testing.assert_close(scores("a2sf:factor=1.0", 30, 1, 1, 7, 1), scores("h2o", 30, 1, 1, 7, 1))


def test_a_factor_near_one_is_near() -> None:
    """Its queries are another statistic."""
    torch.testing.assert_close(scores("a2sf:factor=0.9999999", 30, 1, 7), scores("h2o", 30, 1, 7), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("factor", [0.0, 1.5, -1.0])
def test_factors_out_of_range(factor: float) -> None:
    with pytest.raises(KVPolicyError, match=r"A2SF.factor must be above 0 and at most 1, got .*; try 0.95"):
        A2SF(factor=factor)


def test_it_is_a_base() -> None:
    assert str(Policy.parse("critical/a2sf@0.2")) == "critical/a2sf@0.2"
