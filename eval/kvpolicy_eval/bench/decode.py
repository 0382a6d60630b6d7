"""Decode time per step under a policy against the stock cache, at a long prompt."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers.cache_utils import DynamicCache

import kvpolicy
from kvpolicy.attention import Kernel
from kvpolicy_eval.bench.common import Row, compare, llama, tokens

BARS: dict[str, str] = {
    "window@0.1": "<= 0.125x",
    "snapkv@0.1": "<= 0.125x",
    "kvcrush@0.1": "<= 0.125x",
    "h2o@0.1": "<= 0.125x",
    "snapkv+kivi:bits=4@0.1": "",
}
STEPS = 8


def measure(length: int = 16384, rounds: int = 7) -> Iterator[Row]:
    """Time decode steps after a prompt whose keys and values are random."""
    model, ours = llama(layers=8), llama(layers=8)
    one = tokens(1)
    stock = DynamicCache(config=model.config)
    for layer in range(8):
        stock.update(torch.randn(1, 8, length, 64), torch.randn(1, 8, length, 64), layer)
    for policy, bar in BARS.items():
        with torch.inference_mode(), kvpolicy.attach(ours, policy):
            cache = _filled(ours, length)
            ratio = compare(lambda: _steps(model, one, stock), lambda cache=cache: _steps(ours, one, cache), rounds)
        yield Row(f"decode at {length}", policy, ratio, bar)


def _steps(model: torch.nn.Module, one: torch.Tensor, cache: DynamicCache | kvpolicy.PolicyCache) -> None:
    for _ in range(STEPS):
        model(one, past_key_values=cache)


def _filled(model: torch.nn.Module, length: int) -> kvpolicy.PolicyCache:
    """A cache after a prompt that only the attention layers saw: the rest of the model would take minutes."""
    cache = kvpolicy.PolicyCache(model)
    for layer in cache.slots:
        q, k, v = (torch.randn(1, 8, length, 64) for _ in range(3))
        layer.forward(q, k, v, None, Kernel(0.125))
    return cache
