"""A model of random weights, and ratios of times that were taken in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM


class Ratio(NamedTuple):
    """How many times as long `ours` takes as `theirs`: the median over rounds, the quartiles, median seconds."""

    median: float
    low: float
    high: float
    theirs: float
    ours: float


class Row(NamedTuple):
    """One measurement and its bar."""

    what: str
    policy: str
    ratio: Ratio
    bar: str


def llama(layers: int, hidden: int = 512, heads: int = 8) -> Any:
    """A Llama of random weights, fp32, the same each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=1024,
        max_position_embeddings=32768,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def tokens(length: int) -> Tensor:
    """One row of random token ids, [1, length]."""
    return torch.randint(1, 1024, (1, length), generator=torch.Generator().manual_seed(0))


def compare(theirs: Callable[[], object], ours: Callable[[], object], rounds: int) -> Ratio:
    """Time both in turn, after one call each to warm up; neighbours in time share the machine's noise."""
    theirs()
    ours()
    pairs = [_pair(theirs, ours, bool(number % 2)) for number in range(rounds)]
    ratios = sorted(after / before for before, after in pairs)
    low, _, high = statistics.quantiles(ratios, n=4)
    before, after = (statistics.median(side) for side in zip(*pairs, strict=True))
    return Ratio(statistics.median(ratios), low, high, before, after)


def _pair(theirs: Callable[[], object], ours: Callable[[], object], ours_first: bool) -> tuple[float, float]:
    if ours_first:
        after = _seconds(ours)
        return _seconds(theirs), after
    return _seconds(theirs), _seconds(ours)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
