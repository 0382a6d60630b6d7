"""`python -m kvpolicy_eval.pictures`: draw the pictures of the docs, from runs of the engine on the embedded model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from kvpolicy_eval.pictures.common import pictures, svg


def main(argv: list[str] | None = None) -> None:
    """Write the pictures asked for, or all."""
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.pictures", description="Draw the docs' pictures.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="which pictures; all by default")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"), help="the folder to write them to")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # the same sums, so the same picture, on any machine of one kind
    known = pictures()
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"There is no picture {unknown[0]!r}: choose from {', '.join(known)}.")
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.names or known:
        content = svg(known[name])
        (args.out / f"{name}.svg").write_bytes(content)
        print(f"{args.out / name}.svg: {len(content) / 1024:.0f} KiB", file=sys.stderr)


if __name__ == "__main__":
    main()
