"""Run the cells that are missing, in this process or in several."""

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
from typing import Any, NamedTuple

from kvpolicy_eval.sweep.cells import Cell, SharedError, Store, told
from kvpolicy_eval.sweep.config import Config

_FAILURES = (Exception,)  # whatever a model, a task or a policy raises is the cell's own; Ctrl-C is not
_configs: list[Config] = []
_evaluators: list[Any] = []  # of a process of several


class Outcome(NamedTuple):
    """How a cell ended: how long it took, and what there is to say."""

    cell: Cell
    seconds: float
    said: str
    failed: bool = False


class Progress:
    """Prints a line for each cell, with the time that is left.

    Args:
        waiting: Cells to be run.
        processes: That run them side by side.
        show: Whether to print.
    """

    def __init__(self, waiting: Sequence[Cell], processes: int, show: bool = True) -> None:
        """Start the clock."""
        self.waiting, self.total, self.processes, self.show = list(waiting), len(waiting), processes, show
        self.times: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        self.failed = 0

    def left(self) -> float:
        """Seconds for the cells that wait: as long as others of the same model and task, else as all, on average."""
        known = [seconds for times in self.times.values() for seconds in times]
        if not known:
            return 0.0
        whole = sum(known) / len(known)
        means = {key: sum(times) / len(times) for key, times in self.times.items()}
        return sum(means.get((cell.model, cell.task), whole) for cell in self.waiting) / self.processes

    def note(self, outcome: Outcome) -> None:
        """Count a finished cell and print its line."""
        cell = outcome.cell
        self.waiting.remove(cell)
        self.failed += outcome.failed
        if not outcome.failed:
            self.times[cell.model, cell.task].append(outcome.seconds)
        if self.show:
            number, time_left = self.total - len(self.waiting), span(self.left())
            line = f"[{number}/{self.total}] {cell}: {outcome.said}; {span(outcome.seconds)}, {time_left} left"
            print(line, file=sys.stderr, flush=True)


def span(seconds: float) -> str:
    """Seconds in words.

    Examples:
        >>> span(7), span(90), span(7300)
        ('7 s', '1.5 min', '2.0 h')
    """
    return (
        f"{seconds:.0f} s"
        if seconds < 60
        else f"{seconds / 60:.1f} min"
        if seconds < 3600
        else f"{seconds / 3600:.1f} h"
    )


def run_here(config: Config, cells: Sequence[Cell], folder: Path) -> int:
    """Run cells in this process, and under a launcher together with its others.

    Returns:
        How many failed.

    Raises:
        ValueError: Where a task is not known.
    """
    processes, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    progress = Progress(cells, 1, show=rank == 0)
    for outcome in _outcomes(config, cells, folder, processes, rank):
        progress.note(outcome)
    return progress.failed


def run_jobs(config: Config, cells: Sequence[Cell], folder: Path, jobs: int) -> int:
    """Run cells in `jobs` processes, each with its own model and, where there are several, its own card.

    Returns:
        How many failed.

    Raises:
        RuntimeError: Where a process was killed.
    """
    progress = Progress(cells, jobs)
    context = get_context("spawn")
    number = context.Value("i", 0)
    told = (config, jobs, _cards(), number)
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_start, initargs=told) as pool:
        waiting = [pool.submit(_job, cell, folder) for cell in cells]
        try:
            for one in as_completed(waiting):
                progress.note(one.result())
        except BrokenProcessPool as error:
            raise RuntimeError(
                "A process of the sweep was killed, as by a lack of memory: run the same command again to go on, with "
                "fewer --jobs."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)
    return progress.failed


def _outcomes(config: Config, cells: Sequence[Cell], folder: Path, processes: int, rank: int) -> Iterator[Outcome]:
    from kvpolicy_eval.sweep.evaluate import Evaluator

    evaluator = Evaluator(config)
    for cell in cells:
        yield _one(evaluator, cell, Store(folder), processes, rank)


def _one(evaluator: Any, cell: Cell, store: Store, processes: int = 1, rank: int = 0) -> Outcome:
    """Run one cell and write what it gave."""
    start = time.perf_counter()
    try:
        evaluator.prepare(cell)
    except _FAILURES as error:
        return _failed(cell, error, store, start, write=rank == 0)
    try:
        found = evaluator.run(cell)
    except _FAILURES as error:
        outcome = _failed(cell, error, store, start, write=True)
        if processes > 1 and not isinstance(error, SharedError):
            _end(outcome)
        return outcome
    if found is not None:
        store.finish(cell, found.results, found.samples)
    return Outcome(cell, time.perf_counter() - start, "" if found is None else _said(found.results))


def _failed(cell: Cell, error: BaseException, store: Store, start: float, write: bool) -> Outcome:
    seconds = time.perf_counter() - start
    if write:
        store.fail(cell, error, seconds)
    return Outcome(cell, seconds, "failed, {}: {}".format(*told(error)), failed=True)


def _end(outcome: Outcome) -> None:
    """End this process, so that the launcher ends the others, which may wait for it for ever."""
    print(f"{outcome.cell}: {outcome.said}; run the same command again to go on.", file=sys.stderr, flush=True)
    os._exit(3)


def _said(results: dict[str, Any]) -> str:
    """The first number of each task and the share of bytes."""
    words: list[str] = []
    for task in results["kvpolicy_sweep"]["scores"]:
        for name, value in results["results"].get(task, {}).items():
            if isinstance(value, (int, float)) and "," in name and "_stderr" not in name:
                words.append(f"{name.split(',')[0]} {value:.3f}")
                break
    costs = results["config"]["kvpolicy"]["tasks"].values()
    words += [f"{cost['kv_share']:.2f} of the bytes" for cost in costs if cost["kv_share"] is not None]
    return ", ".join(words)


def _start(config: Config, jobs: int, cards: list[str], number: Any) -> None:
    """Prepare one of several processes: its share of the cores, and one of the cards."""
    with number.get_lock():
        mine, number.value = number.value, number.value + 1
    if cards:
        os.environ["CUDA_VISIBLE_DEVICES"] = cards[mine % len(cards)]  # nothing has called CUDA here yet
    import torch

    from kvpolicy_eval.sweep.command import quiet

    quiet()
    torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
    _configs.append(config)


def _cards() -> list[str]:
    import torch

    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    return said.split(",") if said else [str(card) for card in range(torch.cuda.device_count())]


def _job(cell: Cell, folder: Path) -> Outcome:
    if not _evaluators:
        from kvpolicy_eval.sweep.evaluate import Evaluator

        _evaluators.append(Evaluator(_configs[0]))
    return _one(_evaluators[0], cell, Store(folder))
