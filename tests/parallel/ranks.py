"""Runs a function on several CPU ranks, each a process; a rank that fails fails the test at once.

def _body(rank: int, world: int, ...) -> Any: ...     # at the top of a module
results = run_ranks(_body, 2, ...)                    # one per rank
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

LIMIT = 120.0
"""Seconds that all ranks may take together."""


class RankError(AssertionError):
    """A rank failed; the message is its traceback."""


def run_ranks(function: Callable[..., Any], world: int, *args: Any, limit: float = LIMIT) -> list[Any]:
    """Call `function(rank, world, *args)` on every rank; arguments and results are pickled, so keep them plain.

    `torch.distributed` is initialised with gloo before it, and left behind it.
    """
    context = mp.get_context("spawn")
    results: Any = context.Queue()
    where = (str(Path(sys.modules[function.__module__].__file__ or "").resolve()), function.__qualname__)
    meeting = tempfile.mkdtemp()  # ranks meet in a file: a free port may be another test's when they have started
    common = (world, meeting, where, list(sys.path), results, args)
    processes = [context.Process(target=_enter, args=(rank, *common), daemon=True) for rank in range(world)]
    try:
        with _quiet():
            for process in processes:
                process.start()
        return _collect(processes, results, limit)
    finally:
        for process in processes:
            process.kill()
            process.join(10)
        results.close()
        shutil.rmtree(meeting, ignore_errors=True)


def _collect(processes: list[Any], results: Any, limit: float) -> list[Any]:
    found: dict[int, Any] = {}
    end = time.monotonic() + limit
    while len(found) < len(processes):
        try:
            rank, good, value = results.get(timeout=0.5)
        except queue.Empty:
            dead = [rank for rank, p in enumerate(processes) if rank not in found and p.exitcode not in (None, 0)]
            if dead and results.empty():
                raise RankError(f"rank {dead[0]} died, exit code {processes[dead[0]].exitcode}") from None
            if time.monotonic() > end:
                raise RankError(f"no answer within {limit} s; answered: {sorted(found)}") from None
            continue
        if not good:
            raise RankError(f"rank {rank}:\n{value}" + _others(results))
        found[rank] = value
    return [found[rank] for rank in sorted(found)]


def _others(results: Any) -> str:
    """What else failed: a rank that waited for the one with the error may be heard first."""
    found = ""
    with contextlib.suppress(queue.Empty):
        while True:
            rank, good, value = results.get(timeout=1.0)
            found += "" if good else f"\nrank {rank}:\n{value}"
    return found


@contextlib.contextmanager
def _quiet() -> Any:
    """One thread for each rank, which inherits the environment while it imports torch."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _enter(
    rank: int, world: int, meeting: str, where: tuple[str, str], path: list[str], results: Any, args: tuple[Any, ...]
) -> None:
    """A rank's process, from beginning to end."""
    sys.path[:] = path
    place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in place.items()})
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_num_threads(1)
    good = True
    try:
        torch.distributed.init_process_group("gloo", f"file://{meeting}/store", rank=rank, world_size=world)
        value = _find(*where)(rank, world, *args)
    except BaseException:
        good, value = False, traceback.format_exc()
    results.put((rank, good, value))
    results.close()
    results.join_thread()
    if good:
        with contextlib.suppress(RuntimeError):
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
    os._exit(0 if good else 1)  # gloo's destructors abort now and then


def _find(file: str, name: str) -> Callable[..., Any]:
    """A function by its file, since pytest gives test modules names that cannot be imported."""
    spec = importlib.util.spec_from_file_location(f"ranks_{Path(file).stem}", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)
