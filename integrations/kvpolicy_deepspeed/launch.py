"""The body of a script on every rank, and the exit of all ranks as one job."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Generator

import torch
import torch.distributed as dist

from kvpolicy.parallel.launch import World, meet


@contextlib.contextmanager
def ranks(seed: int | None = None) -> Generator[World, None, None]:
    """Run the body of a script on every rank, and end all ranks as one job.

    At the end of the body, the ranks wait for each other, and each process exits with code 0 by `os._exit`: neither the
    code after the block nor `atexit` hooks run. If the body raises an exception, the rank prints the traceback and
    exits immediately with a nonzero code, so that the launcher stops the other ranks, which would otherwise wait in a
    collective.

    Args:
        seed: The seed of PyTorch's random number generator on every rank, so that all ranks sample the same tokens. By
            default nothing is seeded.

    Raises:
        KVPolicyStateError: If no launcher started this process; the message contains the command to use.

    Examples:
        A script for `torchrun --standalone --nproc_per_node 2 script.py`::

            with kvpolicy_deepspeed.ranks(seed=0) as place:
                model = kvpolicy_deepspeed.load("meta-llama/Llama-2-70b-hf")
                kvpolicy.attach(model, "snapkv@0.2")
                tokens = model.generate(ids)
                if place.rank == 0:
                    print(tokens)
    """
    place = meet()
    if seed is not None:
        torch.manual_seed(seed)
    try:
        yield place
    except BaseException as error:
        code = _exit_code(error)
        if code:
            _exit(code, f"Rank {place.rank} of {place.size} failed:\n{traceback.format_exc()}")
    try:
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        _exit(1, f"Rank {place.rank} of {place.size} finished, but another rank did not:\n{traceback.format_exc()}")
    _exit(0)


def _exit_code(error: BaseException) -> int:
    """Return the exit code that Python uses for an uncaught exception."""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return code and (code % 256 or 1)  # the system keeps the lowest 8 bits; a failure must not become 0
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _exit(code: int, message: str = "") -> None:
    """End the process without destructors: those of process groups abort or hang if another rank has exited."""
    if message:
        print(message, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
