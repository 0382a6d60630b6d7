"""`python -m kvpolicy_eval.methods`: measure each method on the embedded model, for the table of its page."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from kvpolicy import registry
from kvpolicy_eval.markdown import fill
from kvpolicy_eval.methods.measure import Bench
from kvpolicy_eval.methods.plan import methods
from kvpolicy_eval.methods.tables import budget_tables, codec_table


def main(argv: list[str] | None = None) -> None:
    """Print the tables, and fill pages with them where asked."""
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.methods", description="Measure the methods.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="which methods; all by default")
    parser.add_argument("--n", type=int, default=32, help="prompts per task for allocators and selectors")
    parser.add_argument("--n-codecs", type=int, default=8, help="prompts per task for codecs")
    parser.add_argument("--cache", type=Path, help="a folder for results: a run that was stopped goes on from there")
    parser.add_argument("--fill", type=Path, help="a folder of pages, each with a place for the table 'measured'")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.names if name not in methods()]:
        parser.error(f"There is no method {unknown[0]!r}: choose from {', '.join(methods())}.")
    choosing = Bench(args.n, torch.float32, args.cache)
    storing = Bench(args.n_codecs, torch.bfloat16, args.cache, text=True)
    for name in args.names or methods():
        text = codec_table(storing, name) if name in registry.CODECS else budget_tables(choosing, name)
        print(f"{name}\n\n{text}\n", flush=True)
        if args.fill:
            try:
                fill(args.fill / f"{name}.md", "measured", text)
            except (OSError, ValueError) as error:
                parser.error(str(error))


if __name__ == "__main__":
    main()
