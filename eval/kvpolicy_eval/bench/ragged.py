"""Time of decode steps of a batch of many lengths under a codec with blocks, over those of a batch of equal lengths.

Rows of different lengths fill their full-precision buffers at different steps: at most of them, some row is encoded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import kvpolicy
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy_eval.bench.timing import Row, compare

POLICIES = ("full+gear", "full+kivi:residual_length=32", "full+staircase", "full+tokenwise")
ROWS = 48
LENGTH = 200
SHORTER = 64
"""Rows of a batch of many lengths are shorter than the longest by less than this."""
STEPS = 16
LIMIT = 2
"""The largest ratio with many lengths, over that with equal ones."""


def measure(rounds: int = 5) -> Iterator[Row]:
    """Time steps under each policy over those of `full`, with equal lengths and with many."""
    for policy in POLICIES:
        same = _row(f"{STEPS} steps of {ROWS} rows of equal lengths", policy, torch.zeros(ROWS), rounds)
        yield same
        shorter = torch.arange(ROWS) * 7 % SHORTER
        mixed = _row(f"{STEPS} steps of {ROWS} rows of {ROWS} lengths", policy, shorter, rounds)
        yield mixed._replace(limit=round(LIMIT * same.ratio.median, 2))


def _row(what: str, policy: str, shorter: Tensor, rounds: int) -> Row:
    mask = (torch.arange(LENGTH) >= shorter[:, None]).long()
    with torch.inference_mode():
        base, ours = (_steps(spec, mask, rounds) for spec in ("full", policy))
        # Of the process, since the ratio of two short times suffers from whatever else runs.
        return Row(what, policy, compare(base, ours, rounds, clock=time.process_time), None)


def _steps(policy: str, mask: Tensor, rounds: int) -> Callable[[], None]:
    """A function that decodes the steps after the prompt of a batch under a policy, of another cache each time.

    So each round encodes the same rows: equal lengths, which are all due at one step, are due in each round or in none.
    """
    model, _ = kvpolicy.tiny()
    kvpolicy.attach(model, policy)
    ids = torch.randint(5, 300, mask.shape, generator=torch.Generator().manual_seed(0))
    caches = [kvpolicy.PolicyCache(model, prompt=mask.sum(-1), new=STEPS) for _ in range(rounds + 1)]
    for cache in caches:
        _forward(model, ids, mask, cache)

    def run() -> None:
        cache = caches.pop()
        seen = mask
        for _ in range(STEPS):
            seen = torch.cat([seen, seen.new_ones(ROWS, 1)], 1)
            _forward(model, ids[:, :1], seen, cache)

    return run


def _forward(model: Any, ids: Tensor, mask: Tensor, cache: kvpolicy.PolicyCache) -> None:
    places = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    model(ids, attention_mask=mask, position_ids=places, logits_to_keep=1, **cache_argument(model, cache))
