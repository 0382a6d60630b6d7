"""`python -m kvpolicy_eval.methods`: measure methods on the embedded model, for the tables on their pages."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from kvpolicy import registry
from kvpolicy_eval.common.markdown import publish
from kvpolicy_eval.common.measure import Bench
from kvpolicy_eval.methods.plan import measured, methods
from kvpolicy_eval.methods.tables import budget_tables, codec_table, reader_table


def main(argv: list[str] | None = None) -> None:
    """Print the tables, and fill the pages with them on request."""
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.methods", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of methods; by default all that have tables")
    parser.add_argument("--n", type=int, default=32, help="prompts per task for allocators and selectors")
    parser.add_argument("--n-codecs", type=int, default=8, help="prompts per task for codecs and readers")
    parser.add_argument("--cache", type=Path, help="folder for results, with which an interrupted run continues")
    parser.add_argument(
        "--also", nargs="+", default=[], metavar="CODEC", help="specs of further codecs for the table of a codec"
    )
    parser.add_argument("--by-task", action="store_true", help="add a table by task, at a budget of 20%%")
    parser.add_argument(
        "--fill",
        type=Path,
        metavar="FOLDER",
        help="folder with a page NAME.md for each method, to write its table to, between 'table:measured' and '/table'",
    )
    args = parser.parse_args(argv)
    if unknown := [name for name in args.names if name not in methods()]:
        parser.error(f"There is no method {unknown[0]!r}; choose from {', '.join(methods())}.")
    selections = Bench(args.n, torch.float32, args.cache)
    codecs = Bench(args.n_codecs, torch.bfloat16, args.cache, text=True)
    readers = Bench(args.n_codecs, torch.float32, args.cache)
    for name in args.names or measured():
        kind, _ = registry.lookup(name)
        if kind == "codec":
            text = codec_table(codecs, name, args.also)
        elif kind == "reader":
            text = reader_table(readers, name)
        else:
            text = budget_tables(selections, name, args.by_task)
        print(f"{name}\n")
        try:
            publish(text, "measured", args.fill and args.fill / f"{name}.md")
        except (OSError, ValueError) as error:
            parser.error(str(error))
        print()


if __name__ == "__main__":
    main()
