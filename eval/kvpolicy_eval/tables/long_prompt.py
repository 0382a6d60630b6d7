"""Memory of a long prompt on a large model, planned from its config."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from kvpolicy.text.tables import format_bytes
from kvpolicy_eval.common.long_prompt import CARD, PROMPT, peaks
from kvpolicy_eval.common.table import Grid, Section, Table


def rows() -> list[list[str]]:
    """One row for each way to read the prompt: the cache, the peak, and whether the card has room for it."""
    return [
        [
            peak.name,
            format_bytes(peak.cache),
            f"**{format_bytes(peak.nbytes)}**",
            "yes" if peak.nbytes <= CARD * 2**30 else "no",
        ]
        for peak in peaks()
    ]


def measure(_: argparse.Namespace) -> Iterator[Section]:
    """The table."""
    columns = [f"Llama-3.1-8B, {PROMPT:,} tokens", "cache", "peak while reading", f"fits in {CARD} GiB"]
    yield Section("long-prompt", [Grid(columns, rows())])


TABLE = Table(measure=measure, places={"long-prompt": ["README.md"]}, needs="the config of a shipped model")
