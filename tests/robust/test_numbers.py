"""NaN and infinity: they stay in their row, they are seen, and no token is lost for them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import PolicyCache
from tests.conformance.access import kept_positions
from tests.conformance.bench import Bench, draw
from tests.conformance.models import build
from tests.conformance.play import TURNS, make_batch, talk
from tests.conformance.policies import CODECS, words
from tests.robust.hostile import SOME, converse, each
from tests.sampling import each_once, product

NAN = float("nan")
INF = float("inf")
PLACES: dict[str, Any] = {
    "first": (0, 0),
    "a token": (0, 10),
    "last": (0, -1),
    "a head": (0, slice(None), slice(0, 8)),
    "a channel": (0, slice(None), 3),
    "a step": 0,
}


PROJECTIONS = ["k_proj", "v_proj"]


@contextmanager
def spoiled(model: Any, place: Any, value: float, projection: str = "k_proj", call: int = 0) -> Generator[None]:
    """Layer 1 makes keys with `value` at `place`, in one call."""
    calls: list[int] = []

    def hook(_: Any, args: Any, out: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == call + 1:
            out = out.clone()
            out[place] = value
        return out

    handle = getattr(model.model.layers[1].self_attn, projection).register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def check(cache: PolicyCache) -> None:
    """Every head holds its budget, and no token twice."""
    for layer in cache.policy_layers:
        assert torch.equal((layer.positions >= 0).sum(-1), layer.budget[:, None].expand(-1, 2))
        for head in layer.positions.flatten(0, 1).tolist():
            held = [position for position in head if position >= 0]
            assert len(set(held)) == len(held)


@each("place,value", [*PLACES], [NAN, INF, -INF])
def test_a_prompt_or_a_step(policy: str, place: str, value: float) -> None:
    """Row 0 is spoiled and says so; row 1 gives the same numbers as ever."""
    model = build("llama")
    begin, call = (28, 3) if place == "a step" else (0, 0)
    with kvpolicy.attach(model, policy):
        want, _ = converse(model, [26, 17])
        with spoiled(model, PLACES[place], value, call=call):
            got, cache = converse(model, [26, 17])
    assert (got[1] - want[1]).abs().max() < 1e-5
    assert got[0, begin : begin + 26].isnan().any()
    check(cache)


@product("codec,projection", CODECS, PROJECTIONS, sample=each_once(CODECS, PROJECTIONS))
def test_a_codec_hides_nothing(codec: str, projection: str) -> None:
    """Where nothing is dropped, what is broken stays broken, as in a stock cache."""
    model = build("llama")
    turns = [26, *[1] * 6]
    for value in (NAN, INF):
        with kvpolicy.attach(model, words("h2o", codec, budget="40")), spoiled(model, (0, 10), value, projection):
            logits = talk(model, *make_batch([26, 17], turns), turns, PolicyCache(model, new=6))
        assert logits[0, 26:].isnan().any(-1).all()
        assert torch.isfinite(logits[1, 9:]).all()


@SOME
def test_a_model_of_nothing_but_nan(policy: str) -> None:
    """It ends, and the cache is whole."""
    model = build("llama")
    with kvpolicy.attach(model, policy), spoiled(model, slice(None), NAN):
        logits = talk(model, *make_batch([26, 17]), TURNS, PolicyCache(model, new=sum(TURNS[1:])))
    assert logits[:, 25].isnan().all()


@pytest.mark.parametrize("cap", [None, 20000.0])
@pytest.mark.parametrize(
    "policy", ["h2o@20", "tova@20", "h2o+tokenwise:bits=8:group_size=2:residual_length=2:block_size=2@20"]
)
def test_products_beyond_fp16(policy: str, cap: float | None) -> None:
    """Queries and keys whose products fp16 cannot hold unscaled answer as in fp32, and the same tokens stay."""
    outs = list[list[Tensor]]()
    layers = [Bench(policy, [20], softcap=cap) for _ in range(2)]
    for layer, dtype in zip(layers, (torch.float16, torch.float32), strict=True):
        outs.append([])
        keys = torch.linspace(400, 300, 48).split([40, 1, 1, 5, 1])
        for number, part in enumerate(keys):
            q, k, v = draw(len(part), number, dim=64, sharp=0.1)
            q[..., :2] = 120
            k[..., :2] = part[:, None]
            valid = torch.arange(len(part))[None] >= 3 if number == 0 else None
            q, k, v = (t.half().to(dtype) for t in (q, k, v))
            outs[-1].append(layer.forward(q, k, v, valid).float())
    assert all(torch.allclose(mine, its, atol=0.01) for mine, its in zip(*outs, strict=True))
    assert kept_positions(layers[0].layer) == kept_positions(layers[1].layer)
