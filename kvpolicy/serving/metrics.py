"""The numbers of an answer's cache, and the counters of a server, as Prometheus text."""

from __future__ import annotations

import threading
import weakref
from dataclasses import asdict, dataclass, field
from typing import Any

from kvpolicy.reporting.report import mean_kept


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheUsage:
    """The cache of one answer, once its last token is generated.

    Attributes:
        kept_tokens: Tokens held, as a mean over layers and KV heads.
        cache_nbytes: Bytes held.
        full_nbytes: Bytes of the full cache for the same tokens.
    """

    kept_tokens: float
    cache_nbytes: int
    full_nbytes: int

    @classmethod
    def of(cls, cache: Any) -> CacheUsage:
        """Measure a `PolicyCache` of one row."""
        return cls(kept_tokens=mean_kept(cache), cache_nbytes=cache.nbytes, full_nbytes=cache.full_nbytes)

    @classmethod
    def of_row(cls, cache: Any, row: int) -> CacheUsage:
        """Measure a row of a `PolicyCache` with several, which share its bytes evenly."""
        other = sum(cache.unmanaged_bytes().values()) // cache.batch_size
        full = sum(int(layer.length[row]) * layer.store.shape.token_nbytes for layer in cache.policy_layers)
        return cls(
            kept_tokens=mean_kept(cache, row), cache_nbytes=cache.nbytes // cache.batch_size, full_nbytes=full + other
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers, as they stand in `usage.kvpolicy` of an answer."""
        return asdict(self)


OUTCOMES = ("answered", "refused", "cancelled", "failed")
"""How an answer ends: exactly one of them for each. A request that is refused before its answers wait counts once.

`answered`: its last token was generated. `refused`: it asked for something that it cannot have (status 400 to 415).
`cancelled`: its client left before, while it sent the body, while it waited, or while the model generated.
`failed`: the server could not answer (status 500 or 503). A connection that closes without a request is none of them.
"""


@dataclass(eq=False, slots=True)
class Metrics:
    """Counters since the server started, and what it holds now.

    Attributes:
        requests: Requests by outcome.
        prompt_tokens: Tokens of prompts.
        cached_tokens: Those of them that were not computed again.
        generated_tokens: Tokens generated.
        evicted_tokens: Tokens of answers and their prompts that were not kept, as means over layers and KV heads.
        first_seconds: Seconds from requests to their first tokens, in all.
        first_tokens: How many first tokens these were.
        last: The cache of the last answered request.
        prefix_nbytes: Bytes of the caches that requests start from.
    """

    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    evicted_tokens: float = 0.0
    first_seconds: float = 0.0
    first_tokens: int = 0
    last: CacheUsage | None = None
    prefix_nbytes: int = 0
    _scheduler: Any = None
    _cache: Any = None
    _nbytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, outcome: str) -> None:
        """Count a request that ended; called by the thread that generates and by the event loop."""
        with self._lock:
            self.requests[outcome] += 1

    def end(self, outcome: str, job: Any) -> None:
        """Count an answer that has ended, which the rows' thread alone does."""
        self.count(outcome)
        self.generated_tokens += len(job.tokens)
        if job.times.first is not None:
            self.first_seconds += job.times.first
            self.first_tokens += 1
        if job.usage is not None:
            self.last = job.usage
            self.evicted_tokens += max(len(job.text) - 1 - job.usage.kept_tokens, 0)

    def watch(self, scheduler: Any) -> None:
        """Show what waits and what is in flight in a scheduler."""
        self._scheduler = scheduler

    def hold(self, cache: Any) -> None:
        """Note the cache of the rows in flight, which has its slots."""
        self._nbytes = cache.nbytes
        self._cache = weakref.ref(cache)

    @property
    def waiting(self) -> int:
        """Requests that wait for a row."""
        return 0 if self._scheduler is None else self._scheduler.waiting

    @property
    def running(self) -> int:
        """Requests that have a row, or whose prompt is being read."""
        return 0 if self._scheduler is None else self._scheduler.running

    @property
    def tokens(self) -> int:
        """Generated tokens, with those of the answers in flight."""
        rows = [] if self._scheduler is None else [*self._scheduler.rows]
        return self.generated_tokens + sum(len(answer.tokens) for answer in rows if answer is not None)

    @property
    def rows(self) -> int:
        """Rows for requests."""
        return 0 if self._scheduler is None else len(self._scheduler.rows)

    @property
    def cache_nbytes(self) -> int:
        """Bytes of the cache of the rows; 0 once the cache is gone, whoever held it."""
        return self._nbytes if self._cache is not None and self._cache() is not None else 0

    def text(self) -> str:
        """Return all of them in the text format of Prometheus."""
        last = self.last or CacheUsage(kept_tokens=0.0, cache_nbytes=0, full_nbytes=0)
        lines = ["# HELP kvpolicy_requests_total Requests by outcome.", "# TYPE kvpolicy_requests_total counter"]
        lines += [f'kvpolicy_requests_total{{outcome="{name}"}} {number}' for name, number in self.requests.items()]
        for name, kind, value, what in (
            ("prompt_tokens_total", "counter", self.prompt_tokens, "Tokens of prompts."),
            ("cached_tokens_total", "counter", self.cached_tokens, "Tokens of prompts that were not computed again."),
            ("generated_tokens_total", "counter", self.generated_tokens, "Generated tokens."),
            (
                "evicted_tokens_total",
                "counter",
                self.evicted_tokens,
                "Tokens not kept to the end of answers.",
            ),
            ("first_token_seconds_sum", "counter", self.first_seconds, "Seconds until the first tokens of answers."),
            ("first_token_seconds_count", "counter", self.first_tokens, "First tokens of answers."),
            ("requests_waiting", "gauge", self.waiting, "Requests that wait for a row."),
            ("requests_running", "gauge", self.running, "Requests being answered."),
            ("rows", "gauge", self.rows, "Requests that can be answered at a time."),
            ("cache_nbytes", "gauge", self.cache_nbytes, "Bytes of the cache of the rows."),
            ("prefix_nbytes", "gauge", self.prefix_nbytes, "Bytes of the caches that requests start from."),
            ("last_kept_tokens", "gauge", last.kept_tokens, "Tokens kept at the end of the last answer."),
            ("last_cache_nbytes", "gauge", last.cache_nbytes, "Bytes of its cache."),
            ("last_full_nbytes", "gauge", last.full_nbytes, "Bytes of the full cache for the same tokens."),
        ):
            lines += [f"# HELP kvpolicy_{name} {what}", f"# TYPE kvpolicy_{name} {kind}", f"kvpolicy_{name} {value}"]
        return "\n".join(lines) + "\n"
