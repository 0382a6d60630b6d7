"""The command `kvpolicy-eval`: sweep policies, report what was measured, compare with peers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

COMMANDS = {
    "sweep": ("kvpolicy_eval.sweep.command", "measure policies x budgets x tasks x models through lm-eval"),
    "report": ("kvpolicy_eval.report.command", "turn the results of a sweep into a page or Markdown"),
    "peers": ("kvpolicy_eval.peers.command", "compare with kvpress and QuantizedCache, each in its environment"),
}
"""Name of each subcommand: its module, which has `add(parser)` and `run(args)`, and its line of help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; what the user can put right is told in one sentence, and the exit code is 2.

    Args:
        argv: Words after the command's name; the process's own by default.

    Returns:
        The exit code: what the subcommand's `run` gives back, 0 where that is nothing, 2 for a wrong use.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser, module = _parser(next((word for word in words if word in COMMANDS), ""))
    args = parser.parse_args(words)
    try:
        return int(module.run(args) or 0) if module else 2
    except (ImportError, RuntimeError, TypeError, ValueError, OSError) as error:
        if args.traceback:
            raise
        said = " ".join(str(error).split()) or type(error).__name__
        said += ": pip install 'kvpolicy[all,report]'." if isinstance(error, ImportError) else ""
        print(f"kvpolicy-eval: {said}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvpolicy-eval: interrupted; what was finished is kept.", file=sys.stderr)
        return 130


def _parser(command: str) -> tuple[argparse.ArgumentParser, Any]:
    """All names, and the arguments of the one that is asked for: no other module is imported."""
    parser = argparse.ArgumentParser(prog="kvpolicy-eval", description=__doc__)
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    parsers = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    found: Any = None
    for name, (module, line) in COMMANDS.items():
        part = parsers.add_parser(name, help=line, description=line)
        if name == command:
            found = import_module(module)
            found.add(part)
    return parser, found


if __name__ == "__main__":
    sys.exit(main())
