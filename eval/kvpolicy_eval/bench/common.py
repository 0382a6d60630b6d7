"""A model of random weights, and ratios of times that were taken in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM


class Ratio(NamedTuple):
    """How many times as long `ours` takes as `theirs`: the median over rounds, and the quartiles."""

    median: float
    low: float
    high: float
    theirs: float
    ours: float


def llama(
    layers: int = 8, hidden: int = 512, heads: int = 8, kv_heads: int = 8, positions: int = 32768
) -> LlamaForCausalLM:
    """A Llama of random weights on the CPU, fp32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=1024, max_position_embeddings=positions, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def seconds(run: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(theirs: Callable[[], object], ours: Callable[[], object], rounds: int) -> Ratio:
    """Time both in turn, after one round of warming up; neighbours in time share the machine's noise."""
    theirs()
    ours()
    pairs: list[tuple[float, float]] = []
    for number in range(rounds):
        if number % 2:
            after = seconds(ours)
            pairs.append((seconds(theirs), after))
        else:
            pairs.append((seconds(theirs), seconds(ours)))
    ratios = sorted(after / before for before, after in pairs)
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    before, after = (statistics.median(side) for side in zip(*pairs, strict=True))
    return Ratio(statistics.median(ratios), low, high, before, after)
