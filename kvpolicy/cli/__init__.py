"""The `kvpolicy` command."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; see `kvpolicy.cli.app.main`."""
    from kvpolicy.cli.app import main as run

    return run(argv)
