"""How a cache and a handle show themselves: on one line, and as HTML in a notebook."""

from __future__ import annotations

from html import escape

from kvpolicy.reporting.report import make_report, report_html
from kvpolicy.reporting.sources import CacheSource, HandleSource
from kvpolicy.text.tables import count, section, size_summary


def cache_words(cache: CacheSource) -> str:
    """One line: a cache's policy, rows and bytes."""
    return f"PolicyCache({cache.policy}, {_state(cache)})"


def handle_words(handle: HandleSource, model: str, attached: bool) -> str:
    """One line: a handle's policy and model, and what its newest cache holds."""
    state = "no cache yet" if handle.cache is None else _state(handle.cache)
    return f"Handle({handle.policy} on {model}, {state}{'' if attached else ', detached'})"


def cache_html(cache: CacheSource) -> str:
    """The report of a cache, or its policy before the first prompt."""
    if cache.batch_size < 0:
        return section("cache that has seen no prompt yet", cache.policy.to_html())
    return report_html(make_report(cache))


def handle_html(handle: HandleSource, model: str, attached: bool) -> str:
    """The state of a handle, and the report of its newest cache."""
    state = "attached to" if attached else "detached from"
    if handle.cache is None:
        return section(f"{state} {escape(model)}, no cache yet", handle.policy.to_html())
    return section(f"{state} {escape(model)}", cache_html(handle.cache))


def _state(cache: CacheSource) -> str:
    if cache.batch_size < 0:
        return "no prompt yet"
    return f"{count(cache.batch_size, 'row')}, {size_summary(cache.nbytes, cache.full_nbytes)}"
