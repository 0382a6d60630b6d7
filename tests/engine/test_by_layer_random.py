"""Caches of random layers, lengths and budgets hold what their plan says, and no more than their budget."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import KVPolicyError, Policy, PolicyCache
from kvpolicy.hf.model_spec import describe
from kvpolicy.testing import check_cache
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch
from tests.conformance.policies import words
from tests.sampling import product

KIVI = "kivi:group_size=4:residual_length=4"
CODED = "tokenwise:group_size=4:residual_length=4:block_size=4"
PLAIN = ("h2o", "snapkv", "window", "tova", "streaming", "expected", "kvcrush", "keydiff", "scissorhands")
EVICTING = [
    *map(words, PLAIN),
    words("snapkv", "merge"),
    *(words("h2o", codec) for codec in ("kivi", "kvquant", "csr", "rotate", "zipcache", "mikv", "gear", "staircase")),
    "uniform/adakv+h2o@0.5",
    f"uniform/adakv+h2o+{CODED}@0.5",
    "d2o+h2o@0.5",
    "regress+snapkv:window=4:kernel=3@0.5",
    "h2o+quest:read=6:page=2:dense=0@0.5",
    "h2o+labels:read=5:channels=3:dense=1@0.5",
    "h2o+exact:read=5:dense=0@0.5",
]
GROWING = [
    "full",
    KIVI,
    CODED,
    "h2o:decode=grow@0.5",
    "snapkv:window=4:kernel=3:decode=grow@0.4",
    f"h2o:decode=grow+{KIVI}@0.5",
    "uniform/adakv+h2o:decode=grow@0.5",
]


def drawn(dice: Random, depth: int) -> Policy:
    """A policy of `depth` random layers with random shares."""
    pool = dice.choice([EVICTING, EVICTING, GROWING])
    specs = [dice.choice(pool) for _ in range(depth)]
    layers = [f"{spec.partition('@')[0]}@{dice.uniform(0.05, 0.99):.2f}" if "@" in spec else spec for spec in specs]
    budget: Any = dice.choice([round(dice.uniform(0.3, 0.99), 2), dice.randint(5, 60), f"{dice.randint(3, 120)}KB"])
    return Policy.by_layer(layers, budget=budget)


@product("seed", range(200), sample=[(seed,) for seed in range(20)])
def test_held_planned_and_allowed(seed: int) -> None:
    dice = Random(seed)
    model = build(dice.choice(["llama", "gemma2", "gpt_oss", "gemma3"]))
    policy = drawn(dice, model.config.get_text_config().num_hidden_layers)
    rows = dice.choice([1, 1, 2, 3])
    new = dice.randint(0, 9)
    lengths = [dice.randint(8, 60) for _ in range(rows)]
    ids, mask = make_batch(lengths, [max(lengths), max(new, 1)])
    shape = describe(model.config, torch.float32)
    with kvpolicy.attach(model, policy), torch.no_grad():
        cache = PolicyCache(model, new=new)
        try:
            planned = kvpolicy.plan(model, policy, batch=rows, prompt=lengths, new=new)
        except KVPolicyError as error:
            with pytest.raises(KVPolicyError, match="must be at least"):
                forward(model, ids, mask, 0, max(lengths), cache)
            assert "must be at least" in str(error)
            return
        most = start = 0
        for end in range(max(lengths), max(lengths) + new + 1):
            forward(model, ids, mask, start, end, cache)
            check_cache(cache)
            most = max(most, cache.nbytes)
            start = end
    assert planned.nbytes == cache.nbytes
    assert planned.resident_nbytes == cache.resident_nbytes
    if isinstance(policy.budget, str):
        assert most <= int(policy.budget[:-2]) * 1000
    elif len({*lengths}) == 1:  # else each row has the slots of the longest one in each layer
        token = shape.token_bytes() * len(shape.evictable) * rows
        assert isinstance(policy.budget, int | float)
        tokens = (lengths[0] + new) * policy.budget if isinstance(policy.budget, float) else policy.budget
        assert most - sum(cache.unmanaged_bytes().values()) <= token * tokens + 1e-6
