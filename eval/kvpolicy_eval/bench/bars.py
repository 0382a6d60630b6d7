"""`python -m kvpolicy_eval.bench.bars`: every bar of speed in one table, with whether it is passed.

Both sides run in one process, in turn; a ratio is the median of neighbours in time, with quartiles. Floors are of what
the machine was measured to reach just before: bytes that must move over its bandwidth, or operations over its rate.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import torch

from kvpolicy_eval.bench import decode, lm, prefill, startup
from kvpolicy_eval.bench.common import FLOORS, Quantity, Row
from kvpolicy_eval.bench.floor import Machine, measure_machine
from kvpolicy_eval.markdown import fill, table

HEAD = ["what", "policy", "measured, median (quartiles)", "bar", "", *FLOORS]

Measure = Callable[[], Iterator[Row] | Iterator[Quantity]]


def parts(length: int, prompt: int, rounds: int) -> dict[str, Measure]:
    """What can be measured.

    Args:
        length: Tokens before the decode steps.
        prompt: Tokens of the prefill.
        rounds: How often both sides run.
    """
    return {
        "decode": lambda: chain(decode.least(length, rounds), decode.measure(length, rounds)),
        "prefill": lambda: chain(prefill.noise(prompt, rounds), prefill.measure(prompt, rounds)),
        "startup": startup.measure,
        "lm": lambda: lm.measure(rounds=rounds),
    }


def line(found: Row | Quantity, machine: Machine) -> list[str]:
    """A line of the table."""
    policy = f"`{found.policy}`" if found.policy else ""
    if isinstance(found, Quantity):
        bar = "" if found.most is None else f"<= {found.most:g} {found.unit}"
        note = f"; {found.note}" if found.note else ""
        return [found.what, policy, f"{found}{note}", bar, found.verdict, "", "", "", ""]
    ratio = found.ratio
    measured = f"{ratio.median:.3f}x ({ratio.low:.3f} to {ratio.high:.3f})"
    bar = f"{found.bar}: {found.why}" if found.bar and found.why else found.bar
    return [found.what, policy, measured, bar, found.verdict, *found.floors(machine)]


def main() -> None:
    """Measure, print, and fill a page's table where asked."""
    names = list(parts(0, 0, 0))
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.bench.bars", description=__doc__)
    parser.add_argument("which", nargs="*", help=f"{', '.join(names)}; all by default")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch; its own choice by default")
    parser.add_argument("--length", type=int, default=16384, help="tokens before the decode steps")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the prefill")
    parser.add_argument("--rounds", type=int, default=11, help="how often both sides run, at least 2")
    parser.add_argument("--fill", type=Path, help="a page with a place for the table 'bars'")
    args = parser.parse_args()
    wanted = args.which or names
    for name in wanted:
        if name not in names:
            parser.error(f"there is no {name}: choose from {', '.join(names)}")
    if args.threads:
        torch.set_num_threads(args.threads)
    machine, lines = measure_machine(), list[list[str]]()
    for name in wanted:
        for found in parts(args.length, args.prompt, args.rounds)[name]():
            lines.append(line(found, machine))
            print(" | ".join(lines[-1]), flush=True)
    text = table(HEAD, lines)
    text += f"\n\ntorch {torch.__version__}, CPU, {torch.get_num_threads()} thread(s), fp32; {machine}."
    print("\n" + text)
    if args.fill:
        fill(args.fill, "bars", text)


if __name__ == "__main__":
    main()
