"""`python -m kvpolicy_eval.bench`: times under a policy over those of the stock cache or of a base policy."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from itertools import chain, groupby

from kvpolicy_eval.bench import crush, decode, prefill
from kvpolicy_eval.bench.output import add_threads_argument, collect, set_threads, torch_note
from kvpolicy_eval.bench.timing import Row
from kvpolicy_eval.common.markdown import add_fill_argument, publish, table

COLUMNS = ["what", "policy", "time ratio, median (quartiles)", "bar", "seconds, stock or base", "seconds, ours"]
ALL = {"prefill": prefill.measure, "padded": prefill.measure_padded, "decode": decode.measure, "kvcrush": crush.measure}


def show(row: Row, bars: str) -> list[str]:
    """One row of the table."""
    ratio = row.ratio
    times = f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
    return [row.what, f"`{row.policy}`", times, bars, f"{ratio.base:.3f}", f"{ratio.ours:.3f}"]


def lines(rows: Iterable[Row]) -> Iterator[list[str]]:
    """One row per measurement, with all of its limits, and whether it is within each."""
    for _, group in groupby(rows, key=lambda row: (row.what, row.policy)):
        same = list(group)
        yield show(same[0], "; ".join(f"{row.bar}: {row.verdict}" for row in same if row.bar))


def main() -> None:
    """Measure, print the table, and fill a page with it on request."""
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.bench", description=__doc__)
    parser.add_argument("which", nargs="*", default=list(ALL), help="prefill, padded, decode, kvcrush; all by default")
    add_threads_argument(parser)
    add_fill_argument(parser, "bench")
    args = parser.parse_args()
    set_threads(args.threads)
    rows = collect(chain.from_iterable(lines(ALL[name]()) for name in args.which))
    # A page has a place for the whole table, and may have one for a part of it, such as bench-padded.
    place = "bench" if args.which == list(ALL) else "-".join(["bench", *args.which])
    publish(f"{table(COLUMNS, rows)}\n\n{torch_note()}, fp32.", place, args.fill)


if __name__ == "__main__":
    main()
