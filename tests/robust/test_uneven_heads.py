"""Models whose attention is as uneven as no trained model's, under budgets by head."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy.testing import check_cache
from tests.conformance.models import build
from tests.conformance.play import make_batch
from tests.sampling import product

PLACES = ["as it is", "one head", "flat head", "one layer", "flat layer"]


def concentrate(model: Any, where: str, place: int) -> None:
    """Let all attention but that of one head, or of one layer, be flat, or the other way round, in place."""
    layers = model.model.layers
    heads = model.config.num_key_value_heads
    with torch.no_grad():
        for number, layer in enumerate(layers):
            queries = layer.self_attn.q_proj.weight
            sharp = queries * 12
            kept = torch.ones(heads, dtype=torch.bool)
            if where.endswith("head"):
                kept = torch.arange(heads) == place % heads
            elif where.endswith("layer"):
                kept = kept & (number == place % len(layers))
            if where.startswith("flat"):
                kept = ~kept
            rows = kept.repeat_interleave(len(queries) // heads)[:, None]
            queries.copy_(torch.where(rows, queries if where == "as it is" else sharp, 0.0))


def drawn(dice: Random) -> str:
    """A policy with budgets by head."""
    allocator = dice.choice(["uniform", "pyramid", "squeeze"])
    heads = dice.choice(["adakv", "adakv", "adakv:safeguard=0.0", "adakv:safeguard=0.7", "even"])
    selector = dice.choice(["snapkv", "snapkv:window=4:kernel=3", "h2o", "h2o:recent=0.9"])
    codec = dice.choice(["", "", "+tokenwise:group_size=4:residual_length=4:block_size=4"])
    budget = dice.choice(["0.1", "0.25", "0.5", "0.9", "8", "13", "40"])
    merger = dice.choice(["", "+compensate", "+merge" if codec else "+kvmerger"])
    return f"{allocator}/{heads}+{selector}{merger}{codec}@{budget}"


def converse(model: Any, policy: str, lengths: list[int], dice: Random) -> None:
    """A padded prompt, steps, another turn and choices of rows, with a check after each."""
    ids, mask = make_batch(lengths, [max(lengths), 30], seed=len(lengths))
    with kvpolicy.attach(model, policy), torch.no_grad():
        cache = PolicyCache(model, new=dice.choice([None, 30]))
        start = 0
        for size in [max(lengths), *(dice.choice([1, 1, 1, 1, 4]) for _ in range(7))]:
            model(ids[:, start : start + size], attention_mask=mask[:, : start + size], cache=cache)
            start += size
            check_cache(cache)
            if dice.random() < 0.2:
                rows = torch.tensor([dice.randrange(len(ids)) for _ in ids])
                cache.batch_select_indices(rows)
                ids = ids[rows]
                mask = mask[rows]
                check_cache(cache)


@product("seed", range(2000), sample=[(seed,) for seed in range(12)])
def test_random_policies(seed: int) -> None:
    dice = Random(seed)
    model = copy.deepcopy(build("llama"))
    concentrate(model, dice.choice(PLACES), dice.randint(0, 3))
    policy = drawn(dice)
    try:
        converse(model, policy, [dice.randint(40, 69) for _ in range(dice.randint(1, 3))], dice)
    except kvpolicy.KVPolicyError as error:
        assert "must be at least" in str(error), "only a budget that is too small is refused"


@pytest.mark.parametrize(
    ("policy", "lengths"),
    [
        ("uniform/adakv+snapkv@0.1", [400]),
        ("uniform/adakv+snapkv@0.1", [45]),
        ("pyramid/adakv+snapkv@0.5", [63, 66, 69]),
        ("squeeze/adakv+snapkv+tokenwise@8", [60]),
    ],
)
def test_a_head_with_flat_attention_keeps_its_newest_tokens(policy: str, lengths: list[int]) -> None:
    """With default options, and the trained model."""
    model, _ = kvpolicy.tiny()
    concentrate(model, "flat head", 0)
    converse(model, policy, lengths, Random(0))
