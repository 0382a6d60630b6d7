"""`python -m kvpolicy_eval.bench NAME [options] [--fill [PAGE ...]]`: print a table of times or of memory."""

from __future__ import annotations

from collections.abc import Sequence

from kvpolicy_eval.common.table_command import run

TABLES = (
    "bars",
    "codecs",
    "generate",
    "kernel_start",
    "launches",
    "long_prompts",
    "longrun",
    "parts",
    "peak",
    "prefix",
    "ratios",
    "serve",
    "start_file",
    "steps",
    "throughput",
    "vllm_documents",
    "vllm_prompts",
)
"""Modules of this package that have a table."""


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table, and fill pages with it on request."""
    run("kvpolicy_eval.bench", TABLES, argv)


if __name__ == "__main__":
    main()
