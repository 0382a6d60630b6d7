"""`python -m kvpolicy_eval.pictures`: draw the pictures of the documentation from runs of the engine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from kvpolicy.text.formats import replace_file
from kvpolicy.text.output import check_output
from kvpolicy_eval.common.results import add_force_argument
from kvpolicy_eval.pictures.catalog import pictures
from kvpolicy_eval.pictures.style import is_own, svg


def main(argv: list[str] | None = None) -> None:
    """Write all pictures, or those named."""
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.pictures", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of pictures; all by default")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"), help="output folder")
    add_force_argument(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # sums in a fixed order, so that machines of one kind draw identical pictures
    known = pictures()
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"There is no picture {unknown[0]!r}; choose from {', '.join(known)}.")
    try:
        for name in args.names or known:
            check_output(args.out / f"{name}.svg", "a picture of ours", is_own=is_own, force=args.force)
    except ValueError as error:
        parser.error(str(error))
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.names or known:
        path = args.out / f"{name}.svg"
        content = svg(known[name])
        replace_file(path, content)
        print(f"{path}: {len(content) / 1024:.0f} KiB", file=sys.stderr)


if __name__ == "__main__":
    main()
