"""Selectors that draw: `random` by seed, layer and head, VaSE by attention, and the noise of Keyformer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpolicy.kernels.draws import exponentials, mixed
from kvpolicy.selectors import vase
from tests.conformance.bench import Bench, draw
from tests.selectors.walks import scores


def kept(spec: str, *, heads: int = 2, layer: int = 0, prompt: int = 200, steps: int = 0, budget: int = 50) -> Any:
    """The positions that each head of a row keeps, as sets."""
    bench = Bench(spec, [budget], new=steps, layer_idx=layer)
    for number, size in enumerate([prompt, *[1] * steps]):
        bench.forward(*draw(size, number, batch=1, heads=heads))
    return [set(head.tolist()) for head in bench.layer.tensors.positions[0]]


def test_heads_layers_and_seeds_draw_by_themselves() -> None:
    one, other = kept("random")
    assert 199 in one & other
    sets = [one, other, *kept("random:seed=1"), *kept("random", layer=1)]
    shared = [len(a & b) - 1 for n, a in enumerate(sets) for b in sets[:n]]
    # Of 49 tokens, a quarter is expected to be shared, with a standard deviation of 2.6.
    assert max(shared) < 26 and min(shared) > 2
    assert kept("random") == [one, other]


def test_prompt_and_generated_tokens_have_the_same_chance() -> None:
    found = torch.zeros(240)
    for seed in range(5):
        for head in kept(f"random:seed={seed}", heads=64, prompt=120, steps=120, budget=60):
            found[list(head)] += 1
    assert found[-1] == 320
    # Each token is kept in a quarter of 320 draws: 80 with a standard deviation of 7.7, and 0.7 for the mean of 120.
    assert abs(found[:120].mean() - 79) < 3
    assert abs(found[120:-1].mean() - 79) < 3
    assert found[:-1].min() > 45 and found[:-1].max() < 115


def kept_by_vase(spec: str, budget: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    bench = Bench(spec, [budget] * q.shape[0], new=1)
    bench.forward(q, k, v, None)
    return bench.layer.tensors.positions.sort(-1).values


def test_a_constant_added_to_a_value_does_not_widen_it() -> None:
    q, k, v = draw(40, 1)
    shifted = v.clone()
    shifted[:, :, 7] += 100.0
    assert torch.equal(kept_by_vase("vase:large=1.0", 10, q, k, v), kept_by_vase("vase:large=1.0", 10, q, k, shifted))


def test_tokens_are_drawn_as_often_as_they_are_attended_to() -> None:
    """Of two classes of tokens, one with e times the attention of the other, one token is drawn of many seeds."""
    n = 34
    q, k, v = draw(n, 2)
    q = torch.zeros_like(q)
    q[..., 0] = k.shape[-1] ** 0.5
    k = torch.zeros_like(k)
    k[:, :, : (n - 2) // 2, 0] = 1.0
    first = 0
    total = 0
    for seed in range(150):
        found = kept_by_vase(f"vase:large=0.0:sinks=0:window=2:kernel=1:seed={seed}", 4, q, k, v)
        drawn = found[found < n - 2]
        first += int((drawn < (n - 2) // 2).sum())
        total += drawn.numel()
    share = torch.tensor(1.0).exp() / (1 + torch.tensor(1.0).exp())
    # Without replacement, the second of two draws is a little nearer to even.
    assert abs(first / total - share) < 0.05


@pytest.mark.parametrize("tile", [1, 1 << 22])
def test_attention_in_tiles(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vase, "TILE_ELEMENTS", tile)
    q, k, v = draw(50, 4)
    bench = Bench("vase:window=7", [20], new=1)
    bench.forward(q, k, v, None)
    state: Any = bench.layer.tensors.state
    monkeypatch.undo()
    whole = Bench("vase:window=7", [20], new=1)
    whole.forward(q, k, v, None)
    expected: Any = whole.layer.tensors.state
    torch.testing.assert_close(state.score, expected.score)


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


def test_wide_values_and_sinks_are_kept() -> None:
    """However little is attended to them: four of eight slots are for the widest values, the first token included."""
    q, k, v = draw(60, 0)
    v = v.clamp(-1, 1)
    for position in (17, 30, 41):
        v[:, :, position, 0] = 50.0
        k[:, :, position] = 0.0
    found = kept_by_vase("vase:large=0.5:sinks=1:window=2", 8, q, k, v)
    for head in found[0].tolist():
        assert {0, 17, 30, 41, 58, 59} <= set(head)


def test_what_is_attended_to_needs_no_wide_value() -> None:
    """Wide values have their share of the budget only."""
    q, k, v = draw(60, 5)
    q = torch.ones_like(q)
    k = torch.zeros_like(k)
    k[:, :, 20] = 50.0
    v[:, :, 20] = 0.0
    found = kept_by_vase("vase:large=0.25:sinks=0:window=2:kernel=1", 8, q, k, v)
    assert all(20 in head for head in found[0].tolist())


def test_rankings_draw_anew() -> None:
    """Tokens that all have the same attention are drawn again after `every` tokens, and differ by head and layer."""
    q, k, v = draw(80, 3)
    found = kept_by_vase("vase:large=0.0:sinks=0:window=2", 30, torch.zeros_like(q), k, v)
    assert not torch.equal(found[0, 0], found[0, 1])
    longer = kept_by_vase(
        "vase:large=0.0:sinks=0:window=2", 30, *(torch.cat([t, t[:, :, :1]], 2) for t in (q * 0, k, v))
    )
    assert not torch.equal(found, longer)
