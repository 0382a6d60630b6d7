"""Decode time per step under a policy against the stock cache, at a long prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

import kvpolicy
from kvpolicy.engine.attention import ScoreTransform
from kvpolicy_eval.bench.common import Row, compare, llama, tokens
from kvpolicy_eval.bench.floor import Work, decode_work

POLICIES: dict[str, bool] = {
    "window@0.1": True,
    "snapkv@0.1": True,
    "kvcrush@0.1": True,
    "h2o@0.1": True,
    "snapkv+kivi:bits=4@0.1": False,
}
"""Policies, and whether there are bars for them: codes are decoded, which is slower than reading."""
STEPS, LAYERS, WIDTH = 8, 8, 512
FASTER, OF_BYTES = 10, 0.7
"""Bars: a step is so many times as fast as the stock cache's, and so much of what the bytes read would allow."""


def measure(length: int = 16384, rounds: int = 7) -> Iterator[Row]:
    """Time decode steps after a prompt whose keys and values are random."""
    (model, stock, theirs), ours, one = stock_side(length), llama(layers=LAYERS), tokens(1)
    for policy, barred in POLICIES.items():
        with torch.inference_mode(), kvpolicy.attach(ours, policy):
            cache = filled(ours, length)
            ratio = compare(lambda: steps(model, one, stock), lambda cache=cache: steps(ours, one, cache), rounds)
            kept = 2 * WIDTH * sum(layer.layout.slots for layer in cache.policy_layers)
            own = decode_work(ours, cache.nbytes, kept)
        bytes_ratio, both = theirs.nbytes / own.nbytes, (theirs.times(STEPS), own.times(STEPS))
        what = f"decode {STEPS} steps at {length}"
        yield Row(what, policy, ratio, 1 / FASTER if barred else None, *both, f"{FASTER}x as fast")
        if barred:
            why = f"{OF_BYTES} of {bytes_ratio:.2f}x fewer bytes read"
            yield Row(what, policy, ratio, 1 / (OF_BYTES * bytes_ratio), *both, why)


def least(length: int = 16384, rounds: int = 7) -> Iterator[Row]:
    """Time the stock model with no past at all: what a step takes even if a cache cost nothing."""
    (model, stock, theirs), alone, one = stock_side(length), llama(layers=LAYERS), tokens(1)
    both = theirs.times(STEPS), decode_work(alone, 0, 0).times(STEPS)
    with torch.inference_mode():
        ratio = compare(
            lambda: steps(model, one, stock), lambda: steps(alone, one, DynamicCache(config=alone.config)), rounds
        )
    yield Row(f"decode {STEPS} steps, stock without a past", "", ratio, None, *both)


def stock_side(length: int) -> tuple[Any, DynamicCache, Work]:
    """A model, the stock cache after a prompt of random keys and values, and what a step must do."""
    model = llama(layers=LAYERS)
    cache = DynamicCache(config=model.config)
    for layer in range(LAYERS):
        cache.update(torch.randn(1, 8, length, 64), torch.randn(1, 8, length, 64), layer)
    full = 2 * LAYERS * WIDTH * length
    return model, cache, decode_work(model, 4 * full, full)


def steps(model: torch.nn.Module, one: torch.Tensor, cache: DynamicCache | kvpolicy.PolicyCache) -> None:
    """Decode a few tokens."""
    for _ in range(STEPS):
        model(one, past_key_values=cache)


def filled(model: torch.nn.Module, length: int) -> kvpolicy.PolicyCache:
    """A cache after a prompt that only the attention layers saw: the rest of the model would take minutes."""
    cache = kvpolicy.PolicyCache(model)
    for layer in cache.policy_layers:
        q, k, v = (torch.randn(1, 8, length, 64) for _ in range(3))
        layer.forward(q, k, v, None, ScoreTransform(0.125))
    return cache
