"""Time of the prefill under a policy over that of the same model with plain SDPA."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvpolicy
from kvpolicy_eval.bench.floor import prefill_work
from kvpolicy_eval.bench.models import llama, tokens
from kvpolicy_eval.bench.timing import Ratio, Row, compare

LAYERS = 4
LIMITS: dict[str, float | None] = {
    "window@0.2": 1.01,
    "streaming@0.2": None,
    "snapkv@0.2": 1.04,
    "kvcrush@0.2": 1.04,
    "tova@0.2": None,
    "h2o@0.2": 1.4,
    "squeeze+snapkv@0.2": None,
    "snapkv+kivi@0.2": None,
}
"""Largest ratio that passes, by policy; None if there is no limit."""


def measure(length: int = 4096, rounds: int = 11) -> Iterator[Row]:
    """Time one prompt under each policy."""
    stock = llama(layers=LAYERS)
    ours = llama(layers=LAYERS)
    ids = tokens(length)
    work = prefill_work(stock, length)
    for policy, limit in LIMITS.items():
        with kvpolicy.attach(ours, policy):
            yield Row(f"prefill {length}", policy, _ratio(stock, ours, rounds, ids), limit, work, work)


PADDED = (0, 1, 8, 64)
"""Pad tokens on the left of each row: few, since the work on padding is saved and would flatter the ratio."""

PADDED_LIMITS: dict[str, float | None] = {
    "window@0.2": 1.1,
    "snapkv@0.2": 1.1,
    "h2o@0.2": None,
    "snapkv+kivi@0.2": None,
}


def measure_padded(length: int = 2048, rounds: int = 11) -> Iterator[Row]:
    """Time a batch with padding under each policy, over the stock model with the same padding."""
    stock = llama(layers=LAYERS)
    ours = llama(layers=LAYERS)
    ids = tokens(length).expand(len(PADDED), -1)
    mask = torch.ones_like(ids)
    for row, count in enumerate(PADDED):
        mask[row, :count] = 0
    work = prefill_work(stock, length, len(PADDED))
    for policy, limit in PADDED_LIMITS.items():
        with kvpolicy.attach(ours, policy):
            ratio = _ratio(stock, ours, rounds, ids, mask)
        yield Row(f"padded prefill {len(PADDED)} x {length}", policy, ratio, limit, work, work)


def noise(length: int = 4096, rounds: int = 11) -> Iterator[Row]:
    """Time the stock model against a copy of itself: the noise of a ratio on this machine."""
    stock = llama(layers=LAYERS)
    copy = llama(layers=LAYERS)
    ids = tokens(length)
    work = prefill_work(stock, length)
    yield Row(f"prefill {length}, stock against stock", "", _ratio(stock, copy, rounds, ids), None, work, work)


def _ratio(
    stock: PreTrainedModel, ours: PreTrainedModel, rounds: int, ids: Tensor, mask: Tensor | None = None
) -> Ratio:
    """Time of a prompt in one model over that in another."""
    with torch.inference_mode():
        return compare(
            lambda: stock(ids, attention_mask=mask, logits_to_keep=1),
            lambda: ours(ids, attention_mask=mask, logits_to_keep=1),
            rounds,
        )
