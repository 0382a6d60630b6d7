"""Times under a policy over those of the stock cache or of a base policy."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from itertools import chain, groupby

from kvpolicy_eval.bench import crush, decode, latent, prefill, ragged
from kvpolicy_eval.bench.timing import Row
from kvpolicy_eval.common.table import Grid, Section, Table, collect, parts, threads, torch_note

COLUMNS = ["what", "policy", "time ratio, median (quartiles)", "target", "seconds, stock or base"]
PARTS = {
    "prefill": prefill.measure,
    "padded": prefill.measure_padded,
    "decode": decode.measure,
    "kvcrush": crush.measure,
    "ragged": ragged.measure,
    "latent": latent.measure,
}


def show(row: Row, bars: str) -> list[str]:
    """One row of the table."""
    ratio = row.ratio
    times = f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
    return [row.what, f"`{row.policy}`", times, bars, f"{ratio.base:.3f}"]


def lines(rows: Iterable[Row]) -> Iterator[list[str]]:
    """One row per measurement, with all of its limits, and whether it is within each."""
    for _, group in groupby(rows, key=lambda row: (row.what, row.policy)):
        same = list(group)
        yield show(same[0], "; ".join(row.judged for row in same if row.bar))


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """One table of all parts that are asked for."""
    rows = collect(chain.from_iterable(lines(PARTS[name]()) for name in args.parts or PARTS))
    # A page has a place for the whole table, and may have one for a part of it, such as bench-padded.
    place = "bench" if args.parts == list(PARTS) else "-".join(["bench", *args.parts])
    yield Section(place, [Grid(COLUMNS, rows)], f"{torch_note()}, fp32.")


TABLE = Table(
    measure=measure,
    places={"bench": ["README.md"]}
    | {f"bench-{name}": [] for name in PARTS}
    | {f"bench-{name}": ["docs/benchmarks.md"] for name in ("padded", "ragged", "latent")},
    options=[parts(list(PARTS)), threads()],
)
