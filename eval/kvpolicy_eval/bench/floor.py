"""Lower bounds of times, as in a roofline model: bytes that must be moved, operations, and the machine's rates."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Machine(NamedTuple):
    """The highest rates of a machine.

    Attributes:
        bandwidth: Bytes read per second.
        rate: Operations of fp32 matrix products per second.
    """

    bandwidth: float
    rate: float

    def __str__(self) -> str:
        """As a note below a table."""
        return f"{self.bandwidth / 1e9:.1f} GB/s read, {self.rate / 1e9:.0f} GFLOP/s in fp32 matrices, measured before"


class Work(NamedTuple):
    """Bytes that must be moved, and operations that must be done."""

    nbytes: int
    operations: int

    def floor(self, machine: Machine) -> float:
        """Least seconds on a machine: the longer of moving the bytes and doing the operations."""
        return max(self.nbytes / machine.bandwidth, self.operations / machine.rate)

    def __add__(self, other: object) -> Work:
        """The sum of both."""
        assert isinstance(other, Work)
        return Work(self.nbytes + other.nbytes, self.operations + other.operations)

    def times(self, count: int) -> Work:
        """The same work `count` times."""
        return Work(self.nbytes * count, self.operations * count)


def measure_machine(nbytes: int = 1 << 28, size: int = 1536, rounds: int = 8) -> Machine:
    """Measure memory bandwidth and matrix rate, the best of several rounds; takes a few seconds.

    Args:
        nbytes: Size of the matrix that is read, larger than any CPU cache.
        size: Rows and columns of the matrices that are multiplied.
        rounds: Number of rounds.
    """
    wide = torch.ones(nbytes // 4096 // 4, 4096)
    vector = torch.ones(4096)
    square = torch.ones(size, size)
    read = min(_best_seconds(lambda: wide @ vector, rounds), _best_seconds(wide.sum, rounds))
    return Machine(nbytes / read, 2 * size**3 / _best_seconds(lambda: square @ square, rounds))


def _best_seconds(run: Callable[[], object], rounds: int) -> float:
    times: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def weight_numbers(model: Any) -> tuple[int, int]:
    """Number of parameters of a model's layers, and of its output embedding."""
    head = model.get_output_embeddings().weight
    table = model.get_input_embeddings().weight
    embeddings = {id(head), id(table)}
    return sum(p.numel() for p in model.parameters() if id(p) not in embeddings), head.numel()


def decode_work(model: Any, kv_bytes: int, kv_numbers: int, rows: int = 1) -> Work:
    """Work of one decode step: all weights and all kept keys and values are read once, and used once per row.

    Args:
        model: A causal language model.
        kv_bytes: Bytes of the cache, of all rows.
        kv_numbers: Elements of the keys and values that a row attends to, in all layers.
        rows: Rows of the batch.
    """
    layers, head = weight_numbers(model)
    size = next(model.parameters()).element_size()
    config = model.config
    group = config.num_attention_heads // config.num_key_value_heads
    return Work((layers + head) * size + kv_bytes, 2 * rows * (layers + head + group * kv_numbers))


def prefill_work(model: Any, tokens: int, rows: int = 1) -> Work:
    """Work of a prompt: all weights for all tokens, causal attention, and the logits of one token per row."""
    layers, head = weight_numbers(model)
    size = next(model.parameters()).element_size()
    config = model.config
    kv_numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * tokens
    group = config.num_attention_heads // config.num_key_value_heads
    attention = 2 * group * kv_numbers * (tokens + 1) // 2
    nbytes = (layers + head + rows * kv_numbers) * size
    return Work(nbytes, rows * (2 * (layers * tokens + head) + attention))
