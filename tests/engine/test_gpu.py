"""Every method on a GPU: what it keeps and computes is what it keeps and computes on a CPU, eager and compiled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy.registry import lookup, names
from tests.conformance.access import head_positions
from tests.conformance.models import build, layers_for
from tests.conformance.play import TURNS, make_batch, talk
from tests.conformance.policies import words

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

_CENTER = {"allocator": "uniform", "selector": "h2o", "merger": "drop", "codec": "plain", "reader": "all"}


def policy_of(name: str) -> str:
    """A policy of one registered method and ordinary ones of the other kinds."""
    kind = lookup(name)[0]
    budget = "1.0" if name == "full" else "0.5"
    if kind == "head_allocator":
        return f"uniform/{words(name, 'h2o', budget=budget)}"
    parts = [center for other, center in _CENTER.items() if other not in (kind, "merger", "reader")]
    return words(*parts, name, budget=budget)


def keep(policy: str, model: Any, device: str) -> tuple[list[Tensor], Tensor]:
    """Positions of each layer, sorted, and the logits of a padded conversation."""
    ids, mask = (t.to(device) for t in make_batch([26, 17]))
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model, new=sum(TURNS[1:]))
        logits = talk(model, ids, mask, TURNS, cache)
    return [head_positions(layer).sort(-1).values.cpu() for layer in cache.policy_layers], logits.cpu()


NAMES = [name for name in names() if name != "duo"]
"""`duo` has heads of a model that was trained, and is `even` or `adakv` but for that."""

HOST = [
    "full+quest:read=8:page=2:dense=0:host=true",
    "h2o+labels:read=8:channels=4:dense=0:host=true@0.5",
    "snapkv+reuse:every=2:dense=0:host=true/exact:read=8@0.5",
]


@pytest.mark.parametrize("policy", [*(policy_of(name) for name in NAMES), *HOST])
def test_like_a_cpu(policy: str) -> None:
    model = build("llama", layers=layers_for(policy))
    wanted, want = keep(policy, model, "cpu")
    found, got = keep(policy, copy.deepcopy(model).cuda(), "cuda")
    for mine, other in zip(found, wanted, strict=True):
        assert mine.shape == other.shape
        assert (mine == other).float().mean() > 0.95  # near ties are ordered by the last bit
    close = (got - want).abs() < 1e-3 * want.abs().max()
    assert close.float().mean() > 0.95


@pytest.mark.parametrize("policy", HOST)
def test_host_memory(policy: str) -> None:
    """Keys and values are on the host and pinned, and a step gives what it gives with everything on the GPU."""
    model = copy.deepcopy(build("llama", layers=4)).cuda()
    ids, mask = (t.cuda() for t in make_batch([26, 17]))
    logits: list[Tensor] = []
    for spec in (policy, policy.replace(":host=true", "")):
        with kvpolicy.attach(model, spec):
            cache = PolicyCache(model, new=sum(TURNS[1:]))
            logits.append(talk(model, ids, mask, TURNS, cache))
        for layer in cache.policy_layers:
            assert layer.keys.device.type == layer.values.device.type == ("cpu" if layer.store.spec.host else "cuda")
            assert layer.keys.is_pinned() == layer.values.is_pinned() == layer.store.spec.host
            assert layer.positions.is_cuda
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_is_finite(name: str) -> None:
    policy = policy_of(name)
    model = copy.deepcopy(build("llama", layers=layers_for(policy))).to("cuda", torch.bfloat16)
    assert torch.isfinite(keep(policy, model, "cuda")[1]).all()


STEPS = [
    "window@0.5",
    "h2o+kivi:bits=4:group_size=4:residual_length=4@0.5",
    "kvcrush/snapkv@0.5",
    "uniform/adakv+snapkv@0.5",
]


@pytest.mark.parametrize("policy", STEPS)
def test_steps_as_cuda_graphs(policy: str) -> None:
    """Steps that are recorded and replayed give what eager steps give."""
    model = copy.deepcopy(build("llama", layers=2)).cuda()
    ids, mask = (t.cuda() for t in make_batch([26, 26], [26] + [1] * 12))

    def steps(step: Any) -> Tensor:
        cache = PolicyCache(model, new=12)
        logits = [talk(model, ids[:, :26], mask[:, :26], [26], cache)]
        with torch.no_grad():
            for place in range(26, 38):
                torch.compiler.cudagraph_mark_step_begin()
                positions = torch.full((2, 1), place, device="cuda")
                logits.append(step(ids[:, place, None], position_ids=positions, cache=cache).logits.clone())
                if step is not model:
                    cache.tick()
        return torch.cat(logits, 1)

    with kvpolicy.attach(model, policy):
        want = steps(model)
        step = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(steps(step), want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))
