"""Keyformer: noise that depends on places alone, and a temperature that rises."""

from __future__ import annotations

import pytest
import torch

from kvpolicy import KVPolicyError, Policy
from kvpolicy.kernels.draws import exponentials, mixed
from kvpolicy.selectors.keyformer import Keyformer, perturbed
from tests.selectors.walks import scores


def test_the_mass_of_every_query_stays() -> None:
    found = scores("keyformer", 30, 1, 1, 7)
    torch.testing.assert_close(found.sum(-1), scores("h2o", 30, 1, 1, 7).sum(-1))
    assert not torch.allclose(found, scores("h2o", 30, 1, 1, 7), atol=0.1)
    assert not torch.allclose(found, scores("keyformer:seed=1", 30, 1, 1, 7), atol=0.1)


def test_draws_have_their_distribution() -> None:
    places = mixed(mixed(3, torch.arange(200))[:, None], torch.arange(500))
    found = exponentials(places, torch.tensor(7)).double()
    assert bool((found > 0).all()) and bool(found.isfinite().all())
    assert abs(found.mean() - 1) < 0.02 and abs(found.var() - 1) < 0.05
    # Neighbors, in either direction, tell nothing of each other.
    for one, other in ((found[1:], found[:-1]), (found[:, 1:], found[:, :-1])):
        assert abs(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]) < 0.01
    assert int(mixed(2**32 - 1, torch.tensor(2**31 - 1))) in range(2**32)


@pytest.mark.parametrize("tau", [1, 0.01, 100.0])
def test_perturbed_attention_is_a_softmax(tau: float) -> None:
    scores = torch.randn(3, 8).double() * 3
    noise = exponentials(torch.arange(3)[:, None], torch.arange(8))
    expected = ((scores - noise.double().log()) / tau).softmax(-1)
    found = perturbed(scores.softmax(-1).float(), noise, tau)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-3)
    assert not perturbed(torch.zeros(3, 8), noise, tau).any()


def test_temperatures_out_of_order() -> None:
    with pytest.raises(KVPolicyError, match=r"Keyformer.tau_end must be at least tau_init, got 2.0 and 3.0; try"):
        Keyformer(tau_init=3.0)


def test_it_is_a_base() -> None:
    assert str(Policy.parse("critical/keyformer@0.2")) == "critical/keyformer@0.2"
