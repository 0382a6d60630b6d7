"""`python -m kvpolicy_eval.bench.bars`: all speed limits in one table, and whether they are met.

Both sides run alternately in one process; a ratio is the median over the rounds, with quartiles. Floors are computed
from the bandwidth and the matrix rate of the machine, which are measured first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from kvpolicy_eval.bench import decode, lm, prefill, startup
from kvpolicy_eval.bench.floor import Machine, measure_machine
from kvpolicy_eval.bench.output import add_threads_argument, collect, set_threads, torch_note
from kvpolicy_eval.bench.timing import FLOORS, Quantity, Row
from kvpolicy_eval.common.markdown import add_fill_argument, publish, table

COLUMNS = ["what", "policy", "measured, median (quartiles)", "bar", *FLOORS]

Measure = Callable[[], Iterator[Row] | Iterator[Quantity]]


def parts(length: int, prompt: int, rounds: int) -> dict[str, Measure]:
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


def main() -> None:
    """Measure, print the table, and fill a page with it on request."""
    names = list(parts(0, 0, 0))
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.bench.bars", description=__doc__)
    parser.add_argument("which", nargs="*", help=f"{', '.join(names)}; all by default")
    add_threads_argument(parser)
    parser.add_argument("--length", type=int, default=16384, help="tokens before the decode steps")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the prefill")
    parser.add_argument("--rounds", type=int, default=11, help="repetitions of each comparison, at least 2")
    add_fill_argument(parser, "bars")
    args = parser.parse_args()
    selected = args.which or names
    for name in selected:
        if name not in names:
            parser.error(f"there is no part {name}; choose from {', '.join(names)}")
    set_threads(args.threads)
    machine = measure_machine()
    measures = parts(args.length, args.prompt, args.rounds)
    rows = collect(line(result, machine) for name in selected for result in measures[name]())
    publish(f"{table(COLUMNS, joined(rows))}\n\n{torch_note()}, fp32; {machine}.", "bars", args.fill)


if __name__ == "__main__":
    main()
