"""`kvpolicy-eval sweep`: run the missing cells of a config, and write the table of all cells."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvpolicy_eval.sweep.output import silence_libraries

if TYPE_CHECKING:
    from kvpolicy_eval.sweep.cells import Cell
    from kvpolicy_eval.sweep.config import Config


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = (
        "Under a launcher, `accelerate launch -m kvpolicy_eval.cli sweep CONFIG`, the processes share the examples of "
        "each cell; with tp in the config, `torchrun` or `deepspeed` shards the model."
    )
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, or the name of a shipped config")
    parser.add_argument("--out", type=Path, help="output folder; overrides the config's")
    parser.add_argument("--jobs", type=int, default=1, help="local processes that run different cells in parallel")
    parser.add_argument("--retry", action="store_true", help="rerun failed cells")
    parser.add_argument("--limit", type=int, help="maximum number of examples per task; overrides the config's")
    parser.add_argument(
        "--seed", type=int, help="seed of all randomness; overrides the config's, and needs an --out of its own"
    )
    parser.add_argument("--models", nargs="+", metavar="NAME", help="run the cells of these models of the config only")
    parser.add_argument(
        "--policies",
        nargs="+",
        metavar="POLICY",
        help="run these policies of the config only: at all of their budgets, as h2o, or at one, as h2o@0.2",
    )
    parser.add_argument("--tasks", nargs="+", metavar="NAME", help="run these tasks of the config only")
    parser.add_argument(
        "--plan",
        action="store_true",
        help="list the cells with their state, bytes and estimated hours; run and download nothing",
    )
    parser.add_argument(
        "--card", default="a100-80gb", help="with --plan: the GPU of the estimate, a100-80gb, h100-80gb or h200-141gb"
    )
    parser.add_argument("--verbose", action="store_true", help="show the output of lm-eval and other libraries")


def run(args: argparse.Namespace) -> int:
    """Run the sweep, and write its table.

    Returns:
        0, or 1 if a cell failed.

    Raises:
        ValueError: If the config is invalid, or the folder holds a sweep with other settings.
    """
    if not args.verbose:
        silence_libraries()
    # These import torch, which should not warn before the libraries are silenced.
    from kvpolicy_eval.sweep.cells import Store
    from kvpolicy_eval.sweep.config import load
    from kvpolicy_eval.sweep.settings import check_settings, write_settings

    config = load(args.config)
    if args.limit is not None:
        if args.limit < 1:
            raise ValueError(f"--limit must be an integer of at least 1, got {args.limit}.")
        config = dataclasses.replace(config, limit=args.limit)
    if args.seed is not None:
        if args.seed < 0:
            raise ValueError(f"--seed must be an integer of at least 0, got {args.seed}.")
        config = dataclasses.replace(config, seed=args.seed)
    config = config.only(args.models or (), args.policies or (), args.tasks or ())
    if args.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {args.jobs}.")
    folder = Path(args.out or config.output or Path("results") / config.name)
    cells = config.cells()
    store = Store(folder)
    states = {cell: store.state(cell) for cell in cells}
    selected = {"missing", "failed"} if args.retry else {"missing"}
    pending = [cell for cell in cells if states[cell] in selected]
    if _is_first_rank():
        _print_states(folder, states, pending)
    if args.plan:
        from kvpolicy_eval.sweep.plan import lines

        print(*lines(config, states, args.card), sep="\n")
        return 0
    check_settings(folder, config)
    if _is_first_rank():
        write_settings(folder, config)
    if pending:
        _measure(args.jobs, config, pending, folder)
    return _write_tables(folder) if _is_first_rank() else 0


def _is_first_rank() -> bool:
    """Whether this process writes and prints: the only one, or the first that a launcher started."""
    return os.environ.get("RANK", "0") == "0"


def _measure(jobs: int, config: Config, cells: Sequence[Cell], folder: Path) -> None:
    from kvpolicy_eval.sweep.run import run_here, run_jobs

    if jobs > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("--jobs must be 1 under a launcher, which has already started several processes.")
    if jobs > 1:
        run_jobs(config, cells, folder, jobs)
    else:
        run_here(config, cells, folder)


def _write_tables(folder: Path) -> int:
    """Write the tables; returns the exit code."""
    from kvpolicy_eval.sweep.tidy import collect, write_tables

    rows = collect(folder)
    write_tables(folder, rows)
    failed = [row for row in rows if row.status == "failed"]
    print(f"{folder}/table.csv and table.jsonl: {len(rows)} lines, {len(failed)} of them of failed cells.")
    return int(bool(failed))


def _print_states(folder: Path, states: Mapping[Cell, str], pending: Sequence[Cell]) -> None:
    counts = [f"{list(states.values()).count(state)} {state}" for state in ("done", "failed", "missing")]
    print(f"{folder}: {', '.join(counts)}; {len(pending)} to run", file=sys.stderr, flush=True)
