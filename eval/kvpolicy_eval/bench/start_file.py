"""Time that the start-up file of the package adds to a start of Python.

Each start is a process of its own, which times the line of the file before anything else is imported.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kvpolicy_lm_eval
from kvpolicy_eval.common.table import Grid, Option, Section, Table

_CODE = """
import os, sys, time  # which `site` has imported when it reads the file
sys.path[:] = {paths}
begin = time.perf_counter_ns()
{line}
print(time.perf_counter_ns() - begin)
"""


def line() -> str:
    """The line that Python runs when it starts: of the source tree, or of the installed package."""
    package = Path(kvpolicy_lm_eval.__file__).parent
    (file,) = [*package.glob("kvpolicy_lm_eval.pth"), *package.parent.glob("kvpolicy_lm_eval.pth")]
    return file.read_text(encoding="utf-8")


def milliseconds(starts: int, *, installed: bool) -> list[float]:
    """Time of the line in several starts, where lm-eval is found or not."""
    paths = [path for path in sys.path if path and (installed or "site-packages" not in path)]
    code = _CODE.format(paths=[str(Path(kvpolicy_lm_eval.__file__).parent.parent), *paths], line=line())
    command = [sys.executable, "-S", "-c", code]
    done = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(starts)]
    return [int(text) / 1e6 for text in done]


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """The median and the quartiles."""
    rows: list[list[str]] = []
    for name, installed in (("installed", True), ("not installed", False)):
        low, middle, high = statistics.quantiles(milliseconds(args.starts, installed=installed), n=4)
        rows.append([name, f"{middle:.2f} ({low:.2f} to {high:.2f})"])
    yield Section("start-file", [Grid(["lm-eval", "ms of a start, median (quartiles)"], rows)])


TABLE = Table(
    measure=measure,
    places={"start-file": []},
    options=[Option("--starts", type=int, default=50, help="starts of Python for each row")],
    needs="lm-eval",
)
