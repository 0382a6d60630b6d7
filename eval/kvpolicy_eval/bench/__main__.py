"""`python -m kvpolicy_eval.bench`: print a table of ratios, ours over the stock cache's or the base's."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import torch

from kvpolicy_eval.bench import crush, decode, prefill
from kvpolicy_eval.bench.common import Row
from kvpolicy_eval.markdown import fill, table

HEAD = ["what", "policy", "time ratio, median (quartiles)", "bar", "seconds, stock or base", "seconds, ours"]
ALL = {"prefill": prefill.measure, "decode": decode.measure, "kvcrush": crush.measure}


def show(row: Row, bars: str) -> list[str]:
    """One line of the table."""
    ratio = row.ratio
    times = f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
    return [row.what, f"`{row.policy}`", times, bars, f"{ratio.theirs:.3f}", f"{ratio.ours:.3f}"]


def lines(rows: Iterable[Row]) -> Iterator[list[str]]:
    """A line for each measurement, with all of its bars."""
    for _, same in groupby(rows, key=lambda row: (row.what, row.policy)):
        found = list(same)
        yield show(found[0], " and ".join(row.bar for row in found if row.bar))


def main() -> None:
    """Measure, print, and fill the README's table where asked."""
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.bench", description=__doc__)
    parser.add_argument("which", nargs="*", default=list(ALL), help="prefill, decode, kvcrush; all by default")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch; its own choice by default")
    parser.add_argument("--fill", type=Path, help="a page with a place for the table 'bench'")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    rows: list[list[str]] = []
    for name in args.which:
        for line in lines(ALL[name]()):
            rows.append(line)
            print(" | ".join(line), flush=True)
    text = table(HEAD, rows) + f"\n\ntorch {torch.__version__}, CPU, {torch.get_num_threads()} thread(s), fp32."
    print("\n" + text)
    if args.fill:
        fill(args.fill, "bench", text)


if __name__ == "__main__":
    main()
