"""A file of results, one JSON object a line, with which an interrupted run continues."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvpolicy.text.json_lines import append_line, read_lines
from kvpolicy_eval.common.markdown import check_places

Result = dict[str, Any]
Known = dict[str, Result]
"""Results by their keys."""


def add_results_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments `--results` and `--page-only` to a parser."""
    parser.add_argument("--results", type=Path, required=True, help="file of results, with which a run continues")
    parser.add_argument("--page-only", action="store_true", help="measure nothing, and show the results of the file")


def add_force_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--force` to a command that writes files, for `kvpolicy.text.output.check_output`."""
    parser.add_argument("--force", action="store_true", help="replace files that the command did not write")


def parse_checked(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, check: Callable[[argparse.Namespace], None]
) -> argparse.Namespace:
    """Parse arguments and check them, before anything is measured or written; what fails ends the command."""
    args = parser.parse_args(argv)
    try:
        check(args)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return args


def check_results(args: argparse.Namespace, *places: str) -> None:
    """Check the file of results and the page of `--fill`.

    Raises:
        ValueError: If nothing is to be measured and the file does not exist, if it is another file, or the page lacks
            one of the places.
    """
    check_places([args.fill] if args.fill else [], *places)
    read_results(args.results)
    if args.page_only and not args.results.is_file():
        raise ValueError(f"--results must be an existing file with --page-only, got {args.results}.")


def read_results(path: Path) -> Known:
    """The results of a file; none if it does not exist yet.

    Raises:
        ValueError: If it is another file, to which no result should be appended.
    """
    try:
        return {found.pop("key"): found for found in read_lines(path, '{"key": ')}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--results must be absent, or a file of results, got {path}; try another file.") from error


def keep_result(path: Path | None, known: Known, key: str, result: Result) -> None:
    """Remember a result: in `known`, at the end of the file if there is one, and as a line of the log."""
    known[key] = result
    line = {"key": key, **result}
    print(json.dumps(line), file=sys.stderr, flush=True)
    if path is not None:
        append_line(path, line)
