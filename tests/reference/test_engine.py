"""The reference engine against identities, and its codec against known errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from . import codecs, selectors
from .codecs import kivi
from .coding import Given
from .engine import ReferenceLayer
from .stages import Part
from .versions import names, version

Step = tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]


PROJECTION = torch.randn(6, 4 * 8, generator=torch.Generator().manual_seed(0))


def _layer(selector: str | dict[str, Any], budget: int, **more: Any) -> ReferenceLayer:
    return ReferenceLayer(selector, budget, num_heads=4, num_kv_heads=2, projection=PROJECTION, **more)


def _tokens(n: int, seed: int, dim: int = 8) -> Step:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(h, n, dim, generator=generator) for h in (4, 2, 2))
    return q, k, v, dim**-0.5


def _exact(steps: list[Step]) -> torch.Tensor:
    """Outputs of ordinary causal attention over everything."""
    q, k, v = (torch.cat(parts, dim=1).double() for parts in list(zip(*steps, strict=True))[:3])
    k, v = (x.repeat_interleave(2, dim=0) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=steps[0][3])


@pytest.mark.parametrize("name", names("selector"))
def test_a_full_budget_is_exact(name: str) -> None:
    steps = [_tokens(n, n + i) for i, n in enumerate([20, 1, 1, 7, 1])]
    layer = _layer(name, 30)
    out = torch.cat([layer.forward(*step) for step in steps], dim=1)
    torch.testing.assert_close(out, _exact(steps))
    assert layer.positions == [list(range(30))] * 2


def test_a_method_without_a_slow_version_is_told() -> None:
    with pytest.raises(AssertionError, match=r"write tests/reference/selectors/h3o\.py, the slow version of 'h3o'"):
        version("selector", "h3o")


def test_snapkv_over_all_queries_is_h2o() -> None:
    step = _tokens(24, 0)
    snapkv = _layer({"name": "snapkv", "window": 24, "kernel": 1}, 48)
    h2o = _layer("h2o", 48)
    snapkv.forward(*step)
    h2o.forward(*step)
    assert snapkv.scores == [pytest.approx(head) for head in h2o.scores]
    assert sum(h2o.scores[0]) == pytest.approx(24)  # each query hands out one unit of attention


def test_streaming_keeps_sinks_and_the_newest() -> None:
    layer = _layer({"name": "streaming", "sinks": 4}, 10)
    layer.forward(*_tokens(30, 0))
    assert layer.positions == [[*range(4), *range(24, 30)]] * 2
    for i in range(3):
        layer.forward(*_tokens(1, i))
    assert layer.positions == [[*range(4), *range(27, 33)]] * 2


def test_grow_keeps_what_is_generated() -> None:
    layer = _layer("window", 5, decode="grow")
    layer.forward(*_tokens(12, 0))
    for i in range(3):
        layer.forward(*_tokens(1, i))
    assert layer.positions == [list(range(7, 15))] * 2


def test_snapkv_drops_generated_tokens_that_leave_its_window() -> None:
    layer = _layer({"name": "snapkv", "window": 4}, 10)
    layer.forward(*_tokens(30, 0))
    chosen = layer.positions
    assert all(head[-4:] == [26, 27, 28, 29] for head in chosen)
    for i in range(10):
        layer.forward(*_tokens(1, i))
    kept_of_prompt = [[p for p in head if p < 30] for head in layer.positions]
    assert all(len(head) == 6 and set(head) < set(old) for head, old in zip(kept_of_prompt, chosen, strict=True))
    assert all(head[-4:] == [36, 37, 38, 39] for head in layer.positions)


def test_pooling_damps_the_ends() -> None:
    assert selectors.pool([5.0, 5.0, 5.0, 5.0, 5.0], 5, "avg") == [3.0, 4.0, 5.0, 4.0, 3.0]
    assert selectors.pool([1.0, 2.0, 9.0, 0.0, 0.0], 3, "max") == [2.0, 9.0, 9.0, 9.0, 0.0]


def test_tova_is_the_same_for_every_head() -> None:
    layer = _layer("tova", 8)
    layer.forward(*_tokens(20, 0))
    for i in range(6):
        layer.forward(*_tokens(1, i))
    assert layer.positions[0] == layer.positions[1]
    assert len(layer.positions[0]) == 8


@pytest.mark.parametrize("base", [name for name in names("selector") if name not in ("kvcrush", "full")])
def test_kvcrush_without_representatives_is_its_base(base: str) -> None:
    crushed = _layer({"name": "kvcrush", "base": base, "split": 0.0}, 12)
    plain = _layer(base, 12)
    for i, n in enumerate([30, 1, 1, 9, 1]):
        out = [layer.forward(*_tokens(n, i)) for layer in (crushed, plain)]
        torch.testing.assert_close(*out)
        assert crushed.positions == plain.positions


@pytest.mark.parametrize("anchor", ["random", "mean", "alternate", "zeros", "ones"])
@pytest.mark.parametrize(("buckets", "pick"), [("rank", "first"), ("rank", "best"), ("distance", "random")])
def test_kvcrush_fills_its_budget(anchor: str, buckets: str, pick: str) -> None:
    layer = _layer({"name": "kvcrush", "base": "h2o", "anchor": anchor, "buckets": buckets, "pick": pick}, 12)
    layer.forward(*_tokens(40, 3))
    assert [len(head) for head in layer.positions] == [12, 12]
    standing = layer.representatives
    assert [len(head) for head in standing] == [3, 3]
    for i in range(8):
        layer.forward(*_tokens(1, i))
    assert layer.representatives == standing


# ---- KIVI


@pytest.mark.parametrize(("bits", "error"), [(2, 0.155), (4, 0.0061)])
def test_kivi_error_on_white_noise(bits: int, error: float) -> None:
    noise = torch.randn(100, 32, generator=torch.Generator().manual_seed(0))
    read = torch.stack([kivi.coded_value(row, bits, 32) for row in noise])
    assert float((read - noise).square().mean() / noise.square().mean()) == pytest.approx(error, rel=0.1)


def test_kivi_constant_group_and_clipping() -> None:
    assert kivi.stand_in(0.5, kivi.frame([0.5] * 4, 2), 2) == 0.5
    by = kivi.frame([0.0, 1.0, 2.0, 3.0], 2)
    assert [kivi.encode(x, by, 2) for x in (-9.0, 0.4, 1.5, 2.5, 9.0)] == [0, 0, 2, 2, 3]  # half to even
    assert kivi.value_group(80, 32) == 20


CODEC = codecs.make("kivi", {"bits": 8, "group_size": 4, "residual_length": 8})


def test_kivi_codes_the_earliest_and_keeps_a_residual() -> None:
    layer = _layer("window", 22, codec=CODEC)
    layer.forward(*_tokens(21, 0))
    assert layer.coded_slots[0] == [*range(12), None, None, None, None]
    for i in range(3):  # 9 exact tokens become 12; the fourth step codes four of them first
        layer.forward(*_tokens(1, i))
    assert layer.coded_slots[0][:2] == [None, None]
    layer.forward(*_tokens(1, 3))
    assert layer.coded_slots[0] == [None, None, None, *range(3, 12), 12, 13, 14, 15]
    assert layer.positions[0] == list(range(3, 25))


def test_kivi_overwrites_dead_slots_with_frozen_frames() -> None:
    part = Part(kivi.Head({"bits": 2, "group_size": 4}), 4)
    part.grow(12)
    keys = [torch.tensor([float(i)]) for i in range(4)]

    def write(positions: list[int], keys: list[torch.Tensor]) -> list[torch.Tensor]:
        slots = part.dead()[:4]
        live = [p is not None for p in part.slots]
        for slot, position in zip(slots, positions, strict=True):
            part.slots[slot] = position
        return [key for key, _ in part.coder.write(slots, [(key, key) for key in keys], live, Given())]

    for start in (0, 4, 8):
        write(list(range(start, start + 4)), keys)
    for gone in (0, 5, 6, 7, 9, 10):
        part.slots[gone] = None
    read = write([20, 21, 22, 23], [torch.tensor([9.0])] * 4)
    assert part.slots == [None, 1, 2, 3, 4, 20, 21, 22, 8, 23, None, 11]  # the emptiest group first
    assert [float(key) for key in read] == [3.0] * 4  # clipped


def test_kivi_does_not_change_a_prefill() -> None:
    plain = _layer("h2o", 20)
    coded = _layer("h2o", 20, codec=CODEC)
    outs = [layer.forward(*_tokens(40, 0)) for layer in (plain, coded)]
    torch.testing.assert_close(*outs)
    assert plain.positions == coded.positions
    outs = [layer.forward(*_tokens(1, 1)) for layer in (plain, coded)]
    assert not torch.equal(*outs)
    torch.testing.assert_close(*outs, atol=0.05, rtol=0.05)


def test_kivi_continuation_with_a_raised_budget() -> None:
    layer = _layer("h2o", 20, codec=CODEC)
    layer.forward(*_tokens(40, 0))
    for i in range(6):
        layer.forward(*_tokens(1, i))
    layer.forward(*_tokens(9, 9), budget=26)
    for head, slots in zip(layer.positions, layer.coded_slots, strict=True):
        coded = {p for p in slots if p is not None}
        assert len(head) == 26
        assert coded <= set(head)
        assert 8 <= len(head) - len(coded) < 12
        assert len(slots) == 20
