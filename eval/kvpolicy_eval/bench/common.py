"""A model of random weights, and ratios of times that were taken in turn."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from kvpolicy_eval.bench.floor import Machine, Work

FLOORS = ["bytes that must move, stock / ours", "operations", "stock over its floor", "ours over its floor"]
"""Heads of the cells of `Row.floors`."""


class Ratio(NamedTuple):
    """How many times as long `ours` takes as `theirs`: the median over rounds, the quartiles, median seconds."""

    median: float
    low: float
    high: float
    theirs: float
    ours: float


class Row(NamedTuple):
    """One measurement.

    Attributes:
        what: What was timed.
        policy: Under which policy.
        ratio: Our time over the stock cache's, or over the base's.
        most: The bar: what the ratio may be at most; None where there is none.
        theirs: What the stock cache, or the base, cannot do without.
        ours: What we cannot do without; None where a part of a run was timed.
        why: Where the bar comes from.
    """

    what: str
    policy: str
    ratio: Ratio
    most: float | None
    theirs: Work | None = None
    ours: Work | None = None
    why: str = ""

    @property
    def bar(self) -> str:
        """The bar in words."""
        return "" if self.most is None else f"<= {f'{self.most:.3f}'.rstrip('0')}x"

    @property
    def verdict(self) -> str:
        """Whether the median passes."""
        return "" if self.most is None else "pass" if self.ratio.median <= self.most else "miss"

    def floors(self, machine: Machine) -> list[str]:
        """Cells: bytes that must move, operations, and both sides' time over the floor of these."""
        if self.theirs is None or self.ours is None:
            return ["", "", "", ""]
        theirs, ours = self.ratio.theirs / self.theirs.floor(machine), self.ratio.ours / self.ours.floor(machine)
        return [
            f"{self.theirs.nbytes / 1e6:,.0f} / {self.ours.nbytes / 1e6:,.0f} MB",
            f"{self.theirs.operations / 1e9:,.2f} / {self.ours.operations / 1e9:,.2f} G",
            f"{theirs:.1f}x", f"{ours:.1f}x",
        ]  # fmt: skip


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


def resident_memory() -> int:
    """Bytes of memory that this process holds now; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class Quantity(NamedTuple):
    """Something measured by itself, several times, in a unit, with a bar or None."""

    what: str
    policy: str
    values: list[float]
    unit: str
    most: float | None
    note: str = ""

    @property
    def verdict(self) -> str:
        """Whether the median passes."""
        return "" if self.most is None else "pass" if statistics.median(self.values) <= self.most else "miss"

    def __str__(self) -> str:
        """The median and the quartiles."""
        low, middle, high = (f"{value:.3g}" for value in statistics.quantiles(self.values, n=4))
        return f"{middle} {self.unit} ({low} to {high})"
