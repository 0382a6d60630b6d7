"""`python -m kvpolicy_eval.bench.kernel_start`: seconds that compiled functions add to a first prompt and step.

Each codec encodes and reads one layer twice in a new process whose inductor has an empty cache on disk, and then in a
second process that finds the first one's cache. What the first time takes longer than the second is compilation.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from kvpolicy.kernels.compiled import MIN_SLOTS
from kvpolicy_eval.bench.codecs import Case
from kvpolicy_eval.bench.output import add_threads_argument, collect, set_threads, torch_note
from kvpolicy_eval.common.markdown import add_fill_argument, publish, table

CODECS = ("kivi:bits=4", "tokenwise:bits=4")
COLUMNS = ["codec", "first process, s", "later processes, s"]


def compilation(codec: str, threads: int) -> float:
    """Seconds that the first encoding, score and mix of this process take longer than the second ones."""
    set_threads(threads)
    with TemporaryDirectory() as folder, torch.inference_mode():
        seconds: list[float] = []
        for _ in range(2):
            begun = time.perf_counter()
            case = Case(codec, 2 * MIN_SLOTS, Path(folder))
            case.score()
            case.mix()
            seconds.append(time.perf_counter() - begun)
    return seconds[0] - seconds[1]


def measure(codec: str, threads: int) -> list[str]:
    """The row of a codec: two processes, one after the other, with a cache of their own."""
    row = [f"`{codec}`"]
    with TemporaryDirectory() as cache:
        for _ in range(2):
            command = [sys.executable, "-m", __spec__.name, "--codec", codec, "--threads", str(threads)]
            run = subprocess.run(
                command, env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}, check=True, capture_output=True, text=True
            )
            row.append(f"{float(run.stdout.split()[-1]):.1f}")
    return row


def main() -> None:
    """Measure, print the table, and fill a page with it on request."""
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.bench.kernel_start", description=__doc__)
    parser.add_argument("--codec", default="", help="measure one codec in this process, and print the seconds alone")
    add_threads_argument(parser)
    add_fill_argument(parser, "kernel-start")
    args = parser.parse_args()
    if args.codec:
        print(compilation(args.codec, args.threads))
        return
    rows = collect(measure(codec, args.threads) for codec in CODECS)
    publish(f"{table(COLUMNS, rows)}\n\n{torch_note()}.", "kernel-start", args.fill)


if __name__ == "__main__":
    main()
