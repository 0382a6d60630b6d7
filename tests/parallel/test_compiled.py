"""A decode step compiles once and whole on ranks too, with what they ask each other inside."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy.parallel.runtime import share
from tests.conformance.access import kept_positions
from tests.parallel.ranks import run_ranks
from tests.parallel.sliced import Heads, divided, model_of
from tests.sampling import product

PROMPT = 20
STEPS = 10
CODED = "tova+tokenwise:bits=4:group_size=4:residual_length=2:block_size=3@0.5"
POLICIES = ["kvcrush/tova@0.5", "h2o:decode=grow@0.5", CODED]
DIVIDED = {"even": Heads(4, 2), "twins": Heads(4, 1, replicas=2), "none": Heads(2, 1)}


def _steps(rank: int, world: int, heads: Heads, backend: str, policies: list[str]) -> list[str]:
    """What differs between compiled and eager steps on these ranks."""
    torch.manual_seed(0)
    model = model_of(heads, layers=1)
    wrong = list[str]()
    share(model, replicas=heads.replicas)
    tokens = torch.randint(3, 64, (2, PROMPT + STEPS))
    for policy in policies:
        torch.compiler.reset()
        counter = CompileCounterWithBackend(backend)
        with torch.no_grad(), divided(heads, rank, world), kvpolicy.attach(model, policy):
            kept: list[list[object]] = []
            for run in (model, torch.compile(model, backend=counter, fullgraph=True)):
                cache = PolicyCache(model, new=STEPS)
                model(tokens[:, :PROMPT], cache=cache)
                for column in range(PROMPT, PROMPT + STEPS):
                    place = torch.full((2, 1), column)
                    token = tokens[:, column : column + 1].clone()
                    run(token, position_ids=place, cache=cache, use_cache=True)
                    if run is not model:
                        cache.tick()
                kept.append([kept_positions(layer) for layer in cache.policy_layers])
        if counter.frame_count != 1:
            wrong.append(f"{policy}: {counter.frame_count} graphs")
        if kept[0] != kept[1]:
            wrong.append(f"{policy}: kept other tokens than eager steps")
    return wrong


@product("heads,policy", [*DIVIDED], POLICIES, sample=[("twins", POLICIES[0])])
def test_one_graph_without_breaks(heads: str, policy: str) -> None:
    assert run_ranks(_steps, 2, DIVIDED[heads], "eager", [policy]) == [[], []]


@pytest.mark.slow
def test_one_graph_by_inductor() -> None:
    assert run_ranks(_steps, 2, Heads(4, 2), "inductor", POLICIES, limit=600) == [[], []]
