"""`python -m kvpolicy_eval.tables NAME [options] [--fill [PAGE ...]]`: print a measured table of the documentation."""

from __future__ import annotations

from collections.abc import Sequence

from kvpolicy_eval.common.table_command import run

TABLES = (
    "acceptance",
    "accuracy",
    "answers",
    "bits",
    "csr",
    "files",
    "frontier",
    "long_prompt",
    "memory",
    "moved",
    "papers",
    "requantize",
    "tuned",
)
"""Modules of this package that have a table."""


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table, and fill pages with it on request."""
    run("kvpolicy_eval.tables", TABLES, argv)


if __name__ == "__main__":
    main()
