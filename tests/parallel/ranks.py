"""Runs a function on several CPU ranks, each a process; a rank that fails fails the test at once.

def _body(rank: int, world: int, ...) -> Any: ...     # at the top of a module
results = run_ranks(_body, 2, ...)                    # one per rank

Two ranks are started once and serve all tests of this process, since what a test imports and compiles takes long. They
end when a test fails, and with this process. `fresh=True` starts ranks for one call alone, where a test measures their
memory. All ranks of this process are forks of one server, which has imported torch and transformers and done nothing
else; the environment that they read is that of its start.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
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
from torch.distributed.device_mesh import init_device_mesh

LIMIT = 120.0
"""Seconds that all ranks may take together."""

IMPORTED = ["torch._dynamo", "torch.distributed.tensor", "transformers.models.llama.modeling_llama"]
"""What most ranks import, for seconds; nothing of kvpolicy, which a rank finds in the `sys.path` of its test."""

KEPT = 2
"""The number of ranks that most tests ask for, which are kept."""


class RankError(AssertionError):
    """A rank failed; the message is its traceback."""


def run_ranks(
    function: Callable[..., Any], world: int, *args: Any, limit: float = LIMIT, fresh: bool = False
) -> list[Any]:
    """Call `function(rank, world, *args)` on every rank; arguments and results are pickled, so keep them plain.

    `torch.distributed` is initialized with gloo before it.
    """
    where = (str(Path(sys.modules[function.__module__].__file__ or "").resolve()), function.__qualname__)
    kept = world == KEPT and not fresh
    ranks = _kept() if kept else _Ranks(world)
    try:
        found = ranks.run(where, args, limit)
    except BaseException:
        ranks.close()
        raise
    if not kept:
        ranks.close()
    return found


_started: list[_Ranks] = []


def _kept() -> _Ranks:
    """The ranks that serve many tests, which are started when they are first asked for."""
    if not _started or not _started[-1].alive():
        _started.append(_Ranks(KEPT))
        atexit.register(_started[-1].close)
    return _started[-1]


class _Ranks:
    """Processes that form one group of `torch.distributed` and wait for work."""

    def __init__(self, world: int) -> None:
        context: Any = mp.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self._results: Any = context.Queue()
        self._meeting = tempfile.mkdtemp()  # ranks meet in a file: a free port may be another test's when they start
        self._tasks: list[Any] = []
        self._processes: list[Any] = []
        with _quiet():
            for rank in range(world):
                receiver, sender = context.Pipe(duplex=False)
                common = (rank, world, self._meeting, list(sys.path), receiver, self._results)
                process = context.Process(target=_serve, args=common, daemon=True)
                process.start()
                receiver.close()
                self._tasks.append(sender)
                self._processes.append(process)

    def alive(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def run(self, where: tuple[str, str], args: tuple[Any, ...], limit: float) -> list[Any]:
        for sender in self._tasks:
            sender.send((where, args))
        return self._collect(limit)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(10)
        for sender in self._tasks:
            sender.close()
        self._results.close()
        self._processes = []
        self._tasks = []
        shutil.rmtree(self._meeting, ignore_errors=True)

    def _collect(self, limit: float) -> list[Any]:
        found: dict[int, Any] = {}
        end = time.monotonic() + limit
        while len(found) < len(self._processes):
            try:
                rank, good, value = self._results.get(timeout=0.5)
            except queue.Empty:
                codes = {rank: process.exitcode for rank, process in enumerate(self._processes)}
                dead = [rank for rank, code in codes.items() if rank not in found and code is not None]
                if dead and self._results.empty():
                    raise RankError(f"rank {dead[0]} died, exit code {codes[dead[0]]}") from None
                if time.monotonic() > end:
                    raise RankError(f"no answer within {limit} s; answered: {sorted(found)}") from None
                continue
            if not good:
                raise RankError(f"rank {rank}:\n{value}" + self._others())
            found[rank] = value
        return [found[rank] for rank in sorted(found)]

    def _others(self) -> str:
        """What else failed: a rank that waited for the one with the error may be heard first."""
        said = ""
        with contextlib.suppress(queue.Empty):
            while True:
                rank, good, value = self._results.get(timeout=1.0)
                said += "" if good else f"\nrank {rank}:\n{value}"
        return said


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


def _serve(rank: int, world: int, meeting: str, path: list[str], tasks: Any, results: Any) -> None:
    """A rank's process, from beginning to end: it ends with its first error, or when nobody can send it work."""
    sys.path[:] = path
    place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in place.items()})
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{meeting}/store", rank=rank, world_size=world)
    # transformers makes eight process groups for every model that it loads, and each has threads that poll for as long
    # as the process lives: hundreds of them, after a few tests. Meshes of the same shape are the same one here.
    torch.distributed.init_device_mesh = functools.cache(init_device_mesh)  # pyright: ignore[reportPrivateImportUsage]
    good = True
    while good:
        try:
            where, args = tasks.recv()
        except EOFError:
            break
        try:
            value = _find(*where)(rank, world, *args)
        except BaseException:
            good = False
            value = traceback.format_exc()
        results.put((rank, good, value))
        del args
        value = None
        gc.collect()  # a test's models
    results.close()
    results.join_thread()
    os._exit(0 if good else 1)  # gloo's destructors abort now and then


def _find(file: str, name: str) -> Callable[..., Any]:
    """A function by its file, since pytest gives test modules names that cannot be imported."""
    spec = importlib.util.spec_from_file_location(f"ranks_{Path(file).stem}", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)
