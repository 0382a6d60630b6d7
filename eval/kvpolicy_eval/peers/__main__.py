"""`python -m kvpolicy_eval.peers`: the same as `kvpolicy-eval peers`."""

from __future__ import annotations

import argparse
import sys

from kvpolicy_eval.peers import command


def main() -> int:
    """Run the command; errors that the user can fix are printed as one sentence.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.peers", description=command.__doc__)
    command.add(parser)
    try:
        return command.run(parser.parse_args())
    except (RuntimeError, ValueError, OSError) as error:
        print(f"kvpolicy-eval peers: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
