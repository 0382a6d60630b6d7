"""A2SF: attention that is forgotten, from H2O's sums to the newest query alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpolicy import KVPolicyError, Policy
from kvpolicy.engine import attention
from kvpolicy.selectors.a2sf import A2SF
from kvpolicy.testing import check
from tests.conformance.bench import Bench, draw, padding
from tests.selectors.walks import walks


@pytest.mark.parametrize(
    "spec",
    ["a2sf:factor=0.8:recent=4", "a2sf:factor=1.0", "a2sf:factor=0.01:recent=1", "a2sf:decode=grow", "kvcrush/a2sf"],
)
def test_as_the_slow_version(spec: str) -> None:
    assert walks(spec) > 0.8


@pytest.mark.parametrize("selector", [A2SF(), A2SF(factor=1.0), A2SF(factor=0.5, recent=1)], ids=str)
def test_keeps_the_rules(selector: A2SF) -> None:
    check(selector)


def scores(spec: str, *sizes: int) -> Any:
    bench = Bench(spec, [60, 60])
    for number, size in enumerate(sizes):
        bench.forward(*draw(size, number, batch=2), padding(size, size, 9) if number == 0 else None)
    order = bench.layer.tensors.positions.argsort(-1)
    state: Any = bench.layer.tensors.state
    return state.score.gather(-1, order)


def test_a_factor_of_one_is_h2o() -> None:
    torch.testing.assert_close(scores("a2sf:factor=1.0", 30, 1, 1, 7, 1), scores("h2o", 30, 1, 1, 7, 1))


def test_a_factor_near_one_is_near() -> None:
    """Its queries are another statistic."""
    torch.testing.assert_close(scores("a2sf:factor=0.9999999", 30, 1, 7), scores("h2o", 30, 1, 7), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tile", [1, 1 << 20])
def test_chunks_are_as_one_prompt(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of a chunk follows from the tokens of the next one, of each row."""
    monkeypatch.setattr(attention, "TILE_ELEMENTS", tile)
    q, k, v = draw(40, 0, batch=2)
    mask = padding(40, 40, 22)
    found: list[Any] = []
    for cuts in ([40], [25, 15], [25, 1, 14]):
        bench = Bench("a2sf:factor=0.9", [60, 60])
        start = 0
        for size in cuts:
            at = slice(start, start + size)
            bench.forward(q[:, :, at], k[:, :, at], v[:, :, at], mask[:, at])
            start += size
        state: Any = bench.layer.tensors.state
        positions = bench.layer.tensors.positions
        found.append(state.score.gather(-1, positions.argsort(-1))[..., -20:])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


@pytest.mark.parametrize("factor", [0.0, 1.5, -1.0])
def test_factors_out_of_range(factor: float) -> None:
    with pytest.raises(KVPolicyError, match=r"A2SF.factor must be above 0 and at most 1, got .*; try 0.95"):
        A2SF(factor=factor)


def test_it_is_a_base() -> None:
    assert str(Policy.parse("critical/a2sf@0.2")) == "critical/a2sf@0.2"
