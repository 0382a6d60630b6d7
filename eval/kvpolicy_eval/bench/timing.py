"""Ratios of times that were measured alternately, and quantities with a limit."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

from kvpolicy_eval.bench.floor import Machine, Work

FLOORS = ["stock over its lower bound", "ours over its lower bound"]
"""Column names of `Row.floors`."""


class Ratio(NamedTuple):
    """Our time over the time of the base.

    Attributes:
        median: Median over the rounds.
        low: Lower quartile.
        high: Upper quartile.
        base: Median seconds of the base.
        ours: Median seconds of ours.
    """

    median: float
    low: float
    high: float
    base: float
    ours: float

    def __str__(self) -> str:
        """Median and quartiles."""
        return f"{self.median:.3f}x ({self.low:.3f}-{self.high:.3f})"


class Row(NamedTuple):
    """One measured ratio.

    Attributes:
        what: What was timed.
        policy: Spec of the policy.
        ratio: Our time over the stock cache's, or over a base policy's.
        limit: Largest ratio that passes; None if there is no limit.
        base_work: Least work of the stock cache or of the base.
        work: Our least work; None if only a part of a run was timed.
    """

    what: str
    policy: str
    ratio: Ratio
    limit: float | None
    base_work: Work | None = None
    work: Work | None = None

    @property
    def bar(self) -> str:
        """The limit as text."""
        return "" if self.limit is None else f"<= {self.limit:g}x"

    @property
    def verdict(self) -> str:
        """Whether the median is within the limit."""
        return verdict_of(self.ratio.median, self.limit)

    @property
    def judged(self) -> str:
        """The limit, and whether the median is within it; empty without a limit."""
        return f"{self.bar}: {self.verdict}" if self.bar else ""

    def floors(self, machine: Machine) -> list[str]:
        """Cells: the time of both sides over its floor."""
        if self.base_work is None or self.work is None:
            return ["", ""]
        return [
            f"{self.ratio.base / self.base_work.floor(machine):.1f}x",
            f"{self.ratio.ours / self.work.floor(machine):.1f}x",
        ]


class Quantity(NamedTuple):
    """A quantity that was measured several times.

    Attributes:
        what: What was measured.
        policy: Spec of the policy, or empty.
        values: The measurements.
        unit: Their unit.
        limit: Largest median that passes; None if there is no limit.
        note: Remark.
    """

    what: str
    policy: str
    values: list[float]
    unit: str
    limit: float | None
    note: str = ""

    @property
    def verdict(self) -> str:
        """Whether the median is within the limit."""
        return verdict_of(statistics.median(self.values), self.limit)

    def __str__(self) -> str:
        """Median and quartiles."""
        low, median, high = (f"{value:.3g}" for value in statistics.quantiles(self.values, n=4))
        return f"{median} {self.unit} ({low}-{high})"


def verdict_of(value: float, limit: float | None) -> str:
    """Whether a value is within its limit: `pass`, `miss`, or nothing without one."""
    if limit is None:
        return ""
    return "pass" if value <= limit else "miss"


def compare(
    base: Callable[[], object], ours: Callable[[], object], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> Ratio:
    """Time two functions alternately by a clock, after one call of each to warm up.

    Each round gives one ratio, so that both of its times were taken under nearly the same load of the machine.
    """
    base()
    ours()
    pairs = [_pair(base, ours, clock, ours_first=bool(number % 2)) for number in range(rounds)]
    ratios = sorted(our_time / base_time for base_time, our_time in pairs)
    low, _, high = statistics.quantiles(ratios, n=4)
    base_median, our_median = (statistics.median(times) for times in zip(*pairs, strict=True))
    return Ratio(statistics.median(ratios), low, high, base_median, our_median)


def _pair(
    base: Callable[[], object], ours: Callable[[], object], clock: Callable[[], float], *, ours_first: bool
) -> tuple[float, float]:
    """Seconds of the base and of ours."""
    if ours_first:
        our_time = _seconds(ours, clock)
        return _seconds(base, clock), our_time
    return _seconds(base, clock), _seconds(ours, clock)


def _seconds(run: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    run()
    return clock() - start


def resident_memory() -> int:
    """Bytes of memory that this process holds; 0 if the system does not report them."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
