"""The cost of a run, for each task and request type: KV bytes, bytes of the full cache, tokens per second."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class Tally:
    """Sums over the requests of one task and type.

    Args:
        requests: The number of answered requests.
        prompt_tokens: Tokens of their contexts. A shared context counts for each request.
        new_tokens: Scored or generated tokens.
        seconds: Time in the model, prefill included.
        sequences: Rows of the measured caches. They are fewer than the requests if some share a prefill.
        kv_bytes: Bytes held by these caches.
        full_kv_bytes: Bytes of the stock cache for the same tokens.
    """

    requests: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    sequences: int = 0
    kv_bytes: int = 0
    full_kv_bytes: int = 0

    def add_cache(self, sequences: int, kv_bytes: int, full_kv_bytes: int) -> None:
        """Add the bytes of one cache."""
        self.sequences += sequences
        self.kv_bytes += kv_bytes
        self.full_kv_bytes += full_kv_bytes

    def merge(self, other: Tally) -> None:
        """Add the sums of another process."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    def report(self) -> dict[str, Any]:
        """Return the entries of the results file: bytes as means per sequence, and rates per second."""
        sequences = max(self.sequences, 1)
        seconds = self.seconds or float("inf")
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "kv_bytes": round(self.kv_bytes / sequences),
            "full_kv_bytes": round(self.full_kv_bytes / sequences),
            "kv_share": round(self.kv_bytes / self.full_kv_bytes, 4) if self.full_kv_bytes else None,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round((self.prompt_tokens + self.new_tokens) / seconds, 1),
            "new_tokens_per_second": round(self.new_tokens / seconds, 1),
        }


@dataclass(slots=True)
class Stats:
    """The tallies of a run.

    Attributes:
        tallies: The tally of each task and request type, by `task/type`.
        current: The key of the task and request type in progress.
        is_told: Whether the results of a run have them: what comes next is another run.
    """

    tallies: defaultdict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    current: str = "unknown"
    is_told: bool = False

    @property
    def now(self) -> Tally:
        """The tally of the task and request type in progress."""
        return self.tallies[self.current]

    def begin(self) -> None:
        """Forget the tallies of a run whose results have them: a model may be evaluated several times."""
        if self.is_told:
            self.tallies.clear()
            self.is_told = False

    @contextmanager
    def clock(self, device: torch.device) -> Generator[Tally]:
        """Add the time of the block to the current tally, including all its work on `device`."""
        tally = self.now
        start = _synchronized_time(device)
        yield tally
        tally.seconds += _synchronized_time(device) - start

    def replace(self, parts: Iterable[dict[str, Tally]]) -> None:
        """Replace the tallies by the sums over several processes."""
        total: defaultdict[str, Tally] = defaultdict(Tally)
        for part in parts:
            for name, tally in part.items():
                total[name].merge(tally)
        self.tallies = total

    def report(self) -> dict[str, dict[str, Any]]:
        """Return the report of each tally, by `task/type`."""
        return {name: tally.report() for name, tally in self.tallies.items()}


def _synchronized_time(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
