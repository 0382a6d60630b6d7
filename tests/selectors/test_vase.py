"""VaSE: wide values stay, and the others are a sample by attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpolicy import KVPolicyError, Policy
from kvpolicy.selectors import vase
from tests.conformance.bench import Bench, draw


def kept(spec: str, budget: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    bench = Bench(spec, [budget] * q.shape[0], new=1)
    bench.forward(q, k, v, None)
    return bench.layer.tensors.positions.sort(-1).values


def test_wide_values_and_sinks_are_kept() -> None:
    """However little is attended to them: four of eight slots are for the widest values, the first token included."""
    q, k, v = draw(60, 0)
    v = v.clamp(-1, 1)
    for position in (17, 30, 41):
        v[:, :, position, 0] = 50.0
        k[:, :, position] = 0.0
    found = kept("vase:large=0.5:sinks=1:window=2", 8, q, k, v)
    for head in found[0].tolist():
        assert {0, 17, 30, 41, 58, 59} <= set(head)


def test_what_is_attended_to_needs_no_wide_value() -> None:
    """Wide values have their share of the budget only."""
    q, k, v = draw(60, 5)
    q = torch.ones_like(q)
    k = torch.zeros_like(k)
    k[:, :, 20] = 50.0
    v[:, :, 20] = 0.0
    found = kept("vase:large=0.25:sinks=0:window=2:kernel=1", 8, q, k, v)
    assert all(20 in head for head in found[0].tolist())


def test_a_constant_added_to_a_value_does_not_widen_it() -> None:
    q, k, v = draw(40, 1)
    shifted = v.clone()
    shifted[:, :, 7] += 100.0
    assert torch.equal(kept("vase:large=1.0", 10, q, k, v), kept("vase:large=1.0", 10, q, k, shifted))


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
        found = kept(f"vase:large=0.0:sinks=0:window=2:kernel=1:seed={seed}", 4, q, k, v)
        drawn = found[found < n - 2]
        first += int((drawn < (n - 2) // 2).sum())
        total += drawn.numel()
    share = torch.tensor(1.0).exp() / (1 + torch.tensor(1.0).exp())
    # Without replacement, the second of two draws is a little nearer to even.
    assert abs(first / total - share) < 0.05


def test_rankings_draw_anew() -> None:
    """Tokens that all have the same attention are drawn again after `every` tokens, and differ by head and layer."""
    q, k, v = draw(80, 3)
    found = kept("vase:large=0.0:sinks=0:window=2", 30, torch.zeros_like(q), k, v)
    assert not torch.equal(found[0, 0], found[0, 1])
    longer = kept("vase:large=0.0:sinks=0:window=2", 30, *(torch.cat([t, t[:, :, :1]], 2) for t in (q * 0, k, v)))
    assert not torch.equal(found, longer)


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


def test_a_window_that_no_memory_holds() -> None:
    with pytest.raises(KVPolicyError, match=r"window must be between 1 and 32767, got 1000000000; try 64\."):
        Policy.parse("vase:window=1000000000@0.5")
