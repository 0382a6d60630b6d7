"""All speed limits in one table, and whether they are met.

Both sides run alternately in one process; a ratio is the median over the rounds, with quartiles. Floors are computed
from the bandwidth and the matrix rate of the machine, which are measured first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from kvpolicy_eval.bench import decode, lm, prefill, startup
from kvpolicy_eval.bench.floor import Machine, measure_machine
from kvpolicy_eval.bench.timing import FLOORS, Quantity, Row
from kvpolicy_eval.common.table import Grid, Option, Section, Table, collect, parts, rounds, threads, torch_note

COLUMNS = ["what", "policy", "measured, median (quartiles)", "target", *FLOORS]

Measure = Callable[[], Iterator[Row] | Iterator[Quantity]]


def measures(length: int, prompt: int, rounds: int) -> dict[str, Measure]:
    """The parts of the table.

    Args:
        length: Tokens before the decode steps.
        prompt: Tokens of the prefill.
        rounds: Repetitions of each comparison.
    """
    return {
        "decode": lambda: chain(decode.without_past(length, rounds), decode.measure(length, rounds)),
        "prefill": lambda: chain(prefill.noise(prompt, rounds), prefill.measure(prompt, rounds)),
        "padded": lambda: prefill.measure_padded(prompt // 2, rounds),
        "startup": startup.measure,
        "lm": lambda: lm.measure(rounds=rounds),
    }


def line(result: Row | Quantity, machine: Machine) -> list[str]:
    """One row of the table."""
    policy = f"`{result.policy}`" if result.policy else ""
    if isinstance(result, Quantity):
        bar = "" if result.limit is None else f"<= {result.limit:g} {result.unit}: {result.verdict}"
        note = f"; {result.note}" if result.note else ""
        return [result.what, policy, f"{result}{note}", bar, "", ""]
    return [result.what, policy, str(result.ratio), result.judged, *result.floors(machine)]


def joined(rows: Sequence[list[str]]) -> list[list[str]]:
    """Rows, of which neighbors that differ by their bar only are one.

    >>> joined([["decode", "h2o", "0.1x", "<= 0.2x: pass"], ["decode", "h2o", "0.1x", "<= 0.05x: miss"]])
    [['decode', 'h2o', '0.1x', '<= 0.2x: pass; <= 0.05x: miss']]
    """
    found: list[list[str]] = []
    for row in rows:
        if found and [*found[-1][:3], *found[-1][4:]] == [*row[:3], *row[4:]] and row[3]:
            found[-1] = [*row[:3], f"{found[-1][3]}; {row[3]}", *row[4:]]
        else:
            found.append(row)
    return found


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """The table of all parts that are asked for."""
    machine = measure_machine()
    by_part = measures(args.length, args.prompt, args.rounds)
    rows = collect(line(result, machine) for name in args.parts or by_part for result in by_part[name]())
    yield Section("bars", [Grid(COLUMNS, joined(rows))], f"{torch_note()}, fp32; {machine}.")


TABLE = Table(
    measure=measure,
    places={"bars": ["docs/benchmarks.md"]},
    options=[
        parts(list(measures(0, 0, 0))),
        threads(),
        Option("--length", type=int, default=16384, help="tokens before the decode steps"),
        Option("--prompt", type=int, default=4096, help="tokens of the prefill"),
        rounds(11),
    ],
)
