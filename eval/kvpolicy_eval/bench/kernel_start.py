"""Seconds that compiled functions add to a first prompt and step.

Each codec encodes and reads one layer twice in a new process whose inductor has an empty cache on disk, and then in a
second process that finds the first one's cache. What the first time takes longer than the second is compilation.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from kvpolicy.kernels.compiled import MIN_SLOTS
from kvpolicy_eval.bench.codecs import Case
from kvpolicy_eval.common.table import Grid, Option, Section, Table, collect, threads, torch_note

CODECS = ("kivi:bits=4", "tokenwise:bits=4")
COLUMNS = ["codec", "first process, s", "later processes, s"]


def compilation(codec: str) -> float:
    """Seconds that the first encoding, score and mix of this process take longer than the second ones."""
    with TemporaryDirectory() as folder, torch.inference_mode():
        seconds: list[float] = []
        for _ in range(2):
            begun = time.perf_counter()
            case = Case(codec, 2 * MIN_SLOTS, Path(folder))
            case.score()
            case.mix()
            seconds.append(time.perf_counter() - begun)
    return seconds[0] - seconds[1]


def line(codec: str, threads: int) -> list[str]:
    """The row of a codec: two processes, one after the other, with a cache of their own."""
    cells = [f"`{codec}`"]
    with TemporaryDirectory() as cache:
        for _ in range(2):
            command = [sys.executable, "-m", "kvpolicy_eval.bench", "kernel_start", "--codec", codec]
            command += ["--threads", str(threads)]
            run = subprocess.run(
                command, env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}, check=True, capture_output=True, text=True
            )
            cells.append(f"{float(run.stdout.split()[-1]):.1f}")
    return cells


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """The table; with `--codec`, the seconds of this process alone."""
    if args.codec:
        print(compilation(args.codec))
        return
    rows = collect(line(codec, args.threads) for codec in CODECS)
    yield Section("kernel-start", [Grid(COLUMNS, rows)], f"{torch_note()}.")


TABLE = Table(
    measure=measure,
    places={"kernel-start": ["docs/guide/codecs.md"]},
    options=[
        Option("--codec", help="measure one codec in this process, and print the seconds alone"),
        threads(),
    ],
    needs="a compiler",
)
