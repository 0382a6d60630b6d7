"""Content of a request's cache at its end."""

from __future__ import annotations

from dataclasses import asdict, dataclass
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

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers, as they stand in `usage.kvpolicy` of an answer."""
        return asdict(self)
