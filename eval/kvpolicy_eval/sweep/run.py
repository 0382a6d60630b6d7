"""Run cells, in this process or in several."""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpolicy_eval.sweep.cells import Cell, Store
from kvpolicy_eval.sweep.config import Config
from kvpolicy_eval.sweep.errors import SharedError, describe
from kvpolicy_eval.sweep.output import silence_libraries

if TYPE_CHECKING:
    from kvpolicy_eval.sweep.evaluate import Evaluator

# State of a worker process of `run_jobs`, which evaluates many cells with one model.
_configs: list[Config] = []
_evaluators: list[Evaluator] = []


class Outcome(NamedTuple):
    """How a cell ended.

    Attributes:
        cell: The cell.
        seconds: How long it took.
        summary: Its scores, or its error.
        failed: Whether it failed.
    """

    cell: Cell
    seconds: float
    summary: str
    failed: bool = False


class Progress:
    """Prints a line per cell, with the remaining time.

    Args:
        pending: Cells to be run.
        processes: Number of processes that run them in parallel.
        show: Whether to print.
    """

    def __init__(self, pending: Sequence[Cell], processes: int, show: bool = True) -> None:
        """Store the cells."""
        self.pending = list(pending)
        self.total = len(pending)
        self.processes = processes
        self.show = show
        self.times: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        self.failed = 0

    def left(self) -> float:
        """Estimated seconds for the pending cells: the mean of cells with the same model and task, else of all."""
        known = [seconds for times in self.times.values() for seconds in times]
        if not known:
            return 0.0
        overall = sum(known) / len(known)
        means = {key: sum(times) / len(times) for key, times in self.times.items()}
        return sum(means.get((cell.model, cell.task), overall) for cell in self.pending) / self.processes

    def note(self, outcome: Outcome) -> None:
        """Count a finished cell and print its line."""
        cell = outcome.cell
        self.pending.remove(cell)
        self.failed += outcome.failed
        if not outcome.failed:
            self.times[cell.model, cell.task].append(outcome.seconds)
        if self.show:
            number = self.total - len(self.pending)
            times = f"{format_seconds(outcome.seconds)}, {format_seconds(self.left())} left"
            print(f"[{number}/{self.total}] {cell}: {outcome.summary}; {times}", file=sys.stderr, flush=True)


def format_seconds(seconds: float) -> str:
    """A duration in seconds, minutes or hours.

    Examples:
        >>> format_seconds(7), format_seconds(90), format_seconds(7300)
        ('7 s', '1.5 min', '2.0 h')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def run_here(config: Config, cells: Sequence[Cell], folder: Path) -> int:
    """Run cells in this process; under a launcher, together with its other processes.

    Returns:
        Number of failed cells.

    Raises:
        ValueError: If a task is unknown.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    progress = Progress(cells, 1, show=rank == 0)
    for outcome in _outcomes(config, cells, folder, processes, rank):
        progress.note(outcome)
    return progress.failed


def run_jobs(config: Config, cells: Sequence[Cell], folder: Path, jobs: int) -> int:
    """Run cells in `jobs` processes, each with a separate copy of the model and, if there are several, a separate GPU.

    Returns:
        Number of failed cells.

    Raises:
        RuntimeError: If a process was killed.
    """
    progress = Progress(cells, jobs)
    context = get_context("spawn")
    counter = context.Value("i", 0)
    arguments = (config, jobs, _visible_gpus(), counter)
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_worker, initargs=arguments) as pool:
        futures = [pool.submit(_run_in_worker, cell, folder) for cell in cells]
        try:
            for future in as_completed(futures):
                progress.note(future.result())
        except BrokenProcessPool as error:
            raise RuntimeError(
                "A process of the sweep was killed, possibly because memory ran out; rerun the same command with fewer "
                "--jobs to continue."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)
    return progress.failed


def _outcomes(config: Config, cells: Sequence[Cell], folder: Path, processes: int, rank: int) -> Iterator[Outcome]:
    from kvpolicy_eval.sweep.evaluate import Evaluator

    evaluator = Evaluator(config)
    for cell in cells:
        yield _run_cell(evaluator, cell, Store(folder), processes, rank)


def _run_cell(evaluator: Evaluator, cell: Cell, store: Store, processes: int = 1, rank: int = 0) -> Outcome:
    """Run one cell and write its results or its error.

    Whatever a model, a task or a policy raises is recorded with the cell; Ctrl-C is no `Exception` and ends the sweep.
    """
    start = time.perf_counter()
    try:
        evaluator.prepare(cell)
    except Exception as error:
        return _failed(cell, error, store, start, write=rank == 0)
    try:
        evaluation = evaluator.run(cell)
    except Exception as error:
        outcome = _failed(cell, error, store, start, write=True)
        if processes > 1 and not isinstance(error, SharedError):
            _end_process(outcome)
        return outcome
    if evaluation is not None:
        store.finish(cell, evaluation.results, evaluation.samples)
    summary = "" if evaluation is None else _summary(evaluation.results)
    return Outcome(cell, time.perf_counter() - start, summary)


def _failed(cell: Cell, error: BaseException, store: Store, start: float, write: bool) -> Outcome:
    seconds = time.perf_counter() - start
    if write:
        store.fail(cell, error, seconds)
    return Outcome(cell, seconds, "failed, {}: {}".format(*describe(error)), failed=True)


def _end_process(outcome: Outcome) -> None:
    """End this process at once: the launcher then ends the others, which may wait for this one forever."""
    print(f"{outcome.cell}: {outcome.summary}; rerun the same command to continue.", file=sys.stderr, flush=True)
    os._exit(3)


def _summary(results: dict[str, Any]) -> str:
    """The first score of each task, and the share of bytes."""
    parts: list[str] = []
    for task in results["kvpolicy_sweep"]["scores"]:
        for name, value in results["results"].get(task, {}).items():
            if isinstance(value, (int, float)) and "," in name and "_stderr" not in name:
                parts.append(f"{name.split(',')[0]} {value:.3f}")
                break
    costs = results["config"]["kvpolicy"]["tasks"].values()
    parts += [f"{cost['kv_share']:.2f} of the bytes" for cost in costs if cost["kv_share"] is not None]
    return ", ".join(parts)


def _start_worker(config: Config, jobs: int, gpus: list[str], counter: Any) -> None:
    """Prepare a worker process: assign it a GPU and its share of the cores.

    Args:
        config: Of the sweep.
        jobs: Number of workers.
        gpus: Identifiers for `CUDA_VISIBLE_DEVICES`.
        counter: Shared counter, which numbers the workers.
    """
    with counter.get_lock():
        number = counter.value
        counter.value += 1
    if gpus:
        # This takes effect because the process has not initialized CUDA yet.
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    import torch

    silence_libraries()
    torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
    _configs.append(config)


def _visible_gpus() -> list[str]:
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(gpu) for gpu in range(torch.cuda.device_count())]


def _run_in_worker(cell: Cell, folder: Path) -> Outcome:
    if not _evaluators:
        from kvpolicy_eval.sweep.evaluate import Evaluator

        _evaluators.append(Evaluator(_configs[0]))
    return _run_cell(_evaluators[0], cell, Store(folder))
