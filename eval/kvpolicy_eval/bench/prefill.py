"""Prefill time under a policy against the same model with plain SDPA."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import kvpolicy
from kvpolicy_eval.bench.common import Row, compare, llama, tokens
from kvpolicy_eval.bench.floor import prefill_work

BARS: dict[str, float | None] = {
    "window@0.2": 1.01,
    "streaming@0.2": None,
    "snapkv@0.2": 1.04,
    "kvcrush@0.2": 1.04,
    "tova@0.2": None,
    "h2o@0.2": 1.4,
    "squeeze+snapkv@0.2": None,
    "snapkv+kivi@0.2": None,
}
"""Policies, and the most that a prefill may take of the stock one's time (None: no bar)."""


def measure(length: int = 4096, rounds: int = 11) -> Iterator[Row]:
    """Time one prompt, policy by policy."""
    stock, ours = llama(layers=4), llama(layers=4)
    ids, work = tokens(length), prefill_work(stock, length)
    for policy, bar in BARS.items():
        with torch.inference_mode(), kvpolicy.attach(ours, policy):
            ratio = compare(lambda: stock(ids, logits_to_keep=1), lambda: ours(ids, logits_to_keep=1), rounds)
        yield Row(f"prefill {length}", policy, ratio, bar, work, work)


def noise(length: int = 4096, rounds: int = 11) -> Iterator[Row]:
    """Time the stock model against a copy of itself: what the machine makes of a ratio of one."""
    stock, copy = llama(layers=4), llama(layers=4)
    ids, work = tokens(length), prefill_work(stock, length)
    with torch.inference_mode():
        ratio = compare(lambda: stock(ids, logits_to_keep=1), lambda: copy(ids, logits_to_keep=1), rounds)
    yield Row(f"prefill {length}, stock against stock", "", ratio, None, work, work)
