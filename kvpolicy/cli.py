"""The command `kvpolicy`: plan a model's memory, and calibrate codecs for it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvpolicy.commands import calibrate, plan


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; what the user can put right is told in one sentence, and the exit code is 2."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except ImportError as error:
        print(f"kvpolicy: {error}: pip install 'kvpolicy[hf]' scikit-learn.", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"kvpolicy: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvpolicy", description="Keep the KV cache of language models small.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    plan.add(commands)
    calibrate.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
