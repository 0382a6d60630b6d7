"""What a run cost, per task and kind of request: KV bytes, the full cache's bytes, tokens per second."""

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
    """Sums over the requests of one task and kind.

    Args:
        requests: Requests answered.
        prompt_tokens: Tokens of their contexts, each request's counted in full.
        new_tokens: Tokens scored or generated.
        seconds: Wall time in the model, prefill included.
        sequences: Rows of the caches measured; fewer than requests where these share a prefill.
        kv_bytes: Bytes held by these caches.
        full_kv_bytes: Bytes the stock cache would hold for the same tokens.
    """

    requests: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    sequences: int = 0
    kv_bytes: int = 0
    full_kv_bytes: int = 0

    def held(self, sequences: int, kv_bytes: int, full_kv_bytes: int) -> None:
        """Add one cache."""
        self.sequences += sequences
        self.kv_bytes += kv_bytes
        self.full_kv_bytes += full_kv_bytes

    def merge(self, other: Tally) -> None:
        """Add the sums of another process."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    def report(self) -> dict[str, Any]:
        """What goes to the results file: bytes as means per sequence, rates per second."""
        rows, seconds = max(self.sequences, 1), self.seconds or float("inf")
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "kv_bytes": round(self.kv_bytes / rows),
            "full_kv_bytes": round(self.full_kv_bytes / rows),
            "kv_share": round(self.kv_bytes / self.full_kv_bytes, 4) if self.full_kv_bytes else None,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round((self.prompt_tokens + self.new_tokens) / seconds, 1),
            "new_tokens_per_second": round(self.new_tokens / seconds, 1),
        }


@dataclass(slots=True)
class Stats:
    """The tallies of a run; `current` is where the task and kind in progress is counted."""

    tallies: defaultdict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    current: str = "unknown"

    @property
    def now(self) -> Tally:
        """The tally of the task and kind in progress."""
        return self.tallies[self.current]

    @contextmanager
    def clock(self, device: torch.device) -> Generator[Tally]:
        """Count the time of the block, with all work on `device` done."""
        tally, start = self.now, _clock(device)
        yield tally
        tally.seconds += _clock(device) - start

    def replace(self, parts: Iterable[dict[str, Tally]]) -> None:
        """Become the sum of several processes' tallies."""
        total: defaultdict[str, Tally] = defaultdict(Tally)
        for part in parts:
            for name, tally in part.items():
                total[name].merge(tally)
        self.tallies = total

    def report(self) -> dict[str, dict[str, Any]]:
        """Every tally's report, by `task/kind`."""
        return {name: tally.report() for name, tally in self.tallies.items()}


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
