"""Command-line options and output that the benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import torch


def add_threads_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--threads`."""
    parser.add_argument("--threads", type=int, default=0, help="threads of torch; torch's default if 0")


def set_threads(threads: int) -> None:
    """Apply `--threads`."""
    if threads:
        torch.set_num_threads(threads)


def collect(rows: Iterable[list[str]]) -> list[list[str]]:
    """All rows of a table; each is printed when it has been measured, because measuring all of them takes long."""
    result: list[list[str]] = []
    for row in rows:
        print(" | ".join(row), flush=True)
        result.append(row)
    print()
    return result


def torch_note() -> str:
    """Version of torch, vector instructions of the CPU and number of threads, for a note below a table."""
    vectors = torch.backends.cpu.get_cpu_capability()  # twice as many numbers at a time with AVX512 as with AVX2
    return f"torch {torch.__version__}, CPU ({vectors}), {torch.get_num_threads()} thread(s)"
