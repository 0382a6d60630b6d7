"""Time of decode steps under a policy over those of the stock cache, after a long prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

import kvpolicy
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy.statistics.windows import ScoreTransform
from kvpolicy_eval.bench.floor import Work, decode_work
from kvpolicy_eval.bench.models import llama, tokens
from kvpolicy_eval.bench.timing import Row, compare

POLICIES: dict[str, bool] = {
    "window@0.1": True,
    "snapkv@0.1": True,
    "kvcrush@0.1": True,
    "h2o@0.1": True,
    "snapkv+kivi:bits=4@0.1": False,
}
"""Policies, and whether limits apply to them; decoding codes is slower than reading dense tensors, so none applies."""
STEPS = 8
LAYERS = 8
HEADS = 8
WIDTH = 512
SPEEDUP = 10
"""Limit: a step is this many times as fast as with the stock cache."""
BYTES_SHARE = 0.7
"""Limit: the speedup is at least this share of the ratio of bytes read."""


def measure(length: int = 16384, rounds: int = 7) -> Iterator[Row]:
    """Time decode steps after a prompt with random keys and values."""
    stock_model, stock_cache, stock_step = _stock(length)
    model = llama(layers=LAYERS)
    token = tokens(1)
    for policy, limited in POLICIES.items():
        with torch.inference_mode(), kvpolicy.attach(model, policy):
            cache = filled(model, length)
            ratio = compare(
                lambda: steps(stock_model, token, stock_cache), lambda cache=cache: steps(model, token, cache), rounds
            )
            kept = 2 * WIDTH * sum(layer.layout.slots for layer in cache.policy_layers)
            step = decode_work(model, cache.nbytes, kept)
        bytes_ratio = stock_step.nbytes / step.nbytes
        row = Row(
            what=f"decode {STEPS} steps at {length}",
            policy=policy,
            ratio=ratio,
            limit=1 / SPEEDUP if limited else None,
            base_work=stock_step.times(STEPS),
            work=step.times(STEPS),
        )
        yield row
        if limited:
            yield row._replace(limit=1 / (BYTES_SHARE * bytes_ratio))


def without_past(length: int = 16384, rounds: int = 7) -> Iterator[Row]:
    """Time the stock model with an empty cache: what a step takes even if the cache cost nothing."""
    stock_model, stock_cache, stock_step = _stock(length)
    model = llama(layers=LAYERS)
    token = tokens(1)
    with torch.inference_mode():
        ratio = compare(
            lambda: steps(stock_model, token, stock_cache),
            lambda: steps(model, token, DynamicCache(config=model.config)),
            rounds,
        )
    yield Row(
        what=f"decode {STEPS} steps, stock without a past",
        policy="",
        ratio=ratio,
        limit=None,
        base_work=stock_step.times(STEPS),
        work=decode_work(model, 0, 0).times(STEPS),
    )


def _stock(length: int) -> tuple[Any, DynamicCache, Work]:
    """A model, the stock cache after a prompt with random keys and values, and the work of a step."""
    model = llama(layers=LAYERS)
    cache = DynamicCache(config=model.config)
    for layer in range(LAYERS):
        cache.update(
            torch.randn(1, HEADS, length, WIDTH // HEADS), torch.randn(1, HEADS, length, WIDTH // HEADS), layer
        )
    elements = 2 * LAYERS * WIDTH * length
    return model, cache, decode_work(model, 4 * elements, elements)


def steps(
    model: torch.nn.Module, token: torch.Tensor, cache: DynamicCache | kvpolicy.PolicyCache, count: int = STEPS
) -> None:
    """Decode a few tokens."""
    for _ in range(count):
        model(token, **cache_argument(model, cache))


def filled(model: PreTrainedModel, length: int) -> kvpolicy.PolicyCache:
    """A cache after a prompt that only the attention layers processed: the whole model would take minutes."""
    cache = kvpolicy.PolicyCache(model)
    kv_heads = model.config.num_key_value_heads
    for layer in cache.policy_layers:
        q, k, v = (torch.randn(1, heads, length, WIDTH // HEADS) for heads in (HEADS, kv_heads, kv_heads))
        cache.attend(layer.layer_idx, q, k, v, None, ScoreTransform(0.125))
    return cache
