"""What a step cannot do without: bytes that must move, operations that must be done, and how fast this machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Machine(NamedTuple):
    """What this machine reaches at its best: bytes read per second, and operations of fp32 matrices per second."""

    bandwidth: float
    rate: float

    def __str__(self) -> str:
        """As a note below a table."""
        return f"{self.bandwidth / 1e9:.1f} GB/s read, {self.rate / 1e9:.0f} GFLOP/s in fp32 matrices, measured before"


class Work(NamedTuple):
    """Bytes that must move and operations that must be done."""

    nbytes: int
    operations: int

    def floor(self, machine: Machine) -> float:
        """Seconds that it must take, whichever of the two takes longer."""
        return max(self.nbytes / machine.bandwidth, self.operations / machine.rate)

    def __add__(self, other: object) -> Work:
        """One after the other."""
        assert isinstance(other, Work)
        return Work(self.nbytes + other.nbytes, self.operations + other.operations)

    def times(self, count: int) -> Work:
        """The same several times over."""
        return Work(self.nbytes * count, self.operations * count)


def measure_machine(nbytes: int = 1 << 28, size: int = 1536, rounds: int = 8) -> Machine:
    """Measure memory bandwidth and matrix rate, the best of some rounds; takes a few seconds.

    Args:
        nbytes: Of the matrix that is read, more than any cache holds.
        size: Of the square matrices that are multiplied.
        rounds: How often.
    """
    wide = torch.ones(nbytes // 4096 // 4, 4096)
    vector, square = torch.ones(4096), torch.ones(size, size)
    read = min(_seconds(lambda: wide @ vector, rounds), _seconds(wide.sum, rounds))
    return Machine(nbytes / read, 2 * size**3 / _seconds(lambda: square @ square, rounds))


def _seconds(run: Callable[[], object], rounds: int) -> float:
    times: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def weight_numbers(model: Any) -> tuple[int, int]:
    """Numbers in the matrices of a model's layers, and in its head's."""
    head = model.get_output_embeddings().weight
    table = model.get_input_embeddings().weight
    own = {id(head), id(table)}
    return sum(p.numel() for p in model.parameters() if id(p) not in own), head.numel()


def decode_work(model: Any, kv_bytes: int, kv_numbers: int, rows: int = 1) -> Work:
    """One step: every weight and every kept key and value is read once, and used once for each row.

    Args:
        model: A causal language model.
        kv_bytes: Bytes of its cache, of all rows.
        kv_numbers: Numbers of the keys and values that a row attends to, in all layers.
        rows: Of the batch.
    """
    layers, head = weight_numbers(model)
    size = next(model.parameters()).element_size()
    config = model.config
    group = config.num_attention_heads // config.num_key_value_heads
    return Work((layers + head) * size + kv_bytes, 2 * rows * (layers + head + group * kv_numbers))


def prefill_work(model: Any, tokens: int) -> Work:
    """A prompt of one row: every weight is used for every token, every key and value by those behind it; one logit."""
    layers, head = weight_numbers(model)
    size, config = next(model.parameters()).element_size(), model.config
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * tokens
    group = config.num_attention_heads // config.num_key_value_heads
    attention = 2 * group * kv * (tokens + 1) // 2
    return Work((layers + head + kv) * size, 2 * (layers * tokens + head) + attention)
