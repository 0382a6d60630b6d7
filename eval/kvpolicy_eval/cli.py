"""The command `kvpolicy-eval`: evaluate policies, report the results, compare with other libraries."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

COMMANDS = {
    "sweep": ("kvpolicy_eval.sweep.command", "measure policies x budgets x tasks x models through lm-eval"),
    "report": ("kvpolicy_eval.report.command", "write the results of a sweep as a page or as Markdown"),
    "peers": ("kvpolicy_eval.peers.command", "compare with kvpress and QuantizedCache, in separate environments"),
}
"""Module and help text of each subcommand; the module has functions `add(parser)` and `run(args)`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; errors that the user can fix are printed as one sentence.

    Args:
        argv: Arguments after the program's name; those of the process by default.

    Returns:
        The exit code: that of the subcommand, 2 for wrong usage, 130 after an interrupt.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser, module = _parser(next((argument for argument in arguments if argument in COMMANDS), ""))
    args = parser.parse_args(arguments)
    try:
        return int(module.run(args) or 0) if module else 2
    except (ImportError, RuntimeError, TypeError, ValueError, OSError) as error:
        if args.traceback:
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        advice = ": pip install 'kvpolicy[all]'." if isinstance(error, ImportError) else ""
        print(f"kvpolicy-eval: {message}{advice}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvpolicy-eval: interrupted; finished results are kept.", file=sys.stderr)
        return 130


def _parser(command: str) -> tuple[argparse.ArgumentParser, Any]:
    """The parser of all subcommands, and the module of `command`, which is the only one that is imported."""
    parser = argparse.ArgumentParser(prog="kvpolicy-eval", description=__doc__)
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    parsers = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    selected: Any = None
    for name, (module, description) in COMMANDS.items():
        subparser = parsers.add_parser(name, help=description, description=description)
        if name == command:
            selected = import_module(module)
            selected.add(subparser)
    return parser, selected


if __name__ == "__main__":
    sys.exit(main())
