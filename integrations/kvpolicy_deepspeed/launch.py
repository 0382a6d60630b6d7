"""The ranks of a job: their numbers, their process group, and their exit."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Generator
from typing import NamedTuple

import torch
import torch.distributed as dist

from kvpolicy.text.errors import KVPolicyStateError


class World(NamedTuple):
    """A rank of a job.

    Attributes:
        rank: The index of this rank.
        size: The number of ranks.
        local: The index of this rank on its node, which is also that of its GPU.
    """

    rank: int
    size: int
    local: int

    @property
    def device(self) -> torch.device:
        """The device of this rank. If a node has fewer GPUs than ranks, some ranks share one."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.local % torch.cuda.device_count())

    @property
    def transport(self) -> str:
        """The backend of `torch.distributed`: NCCL if each rank has its own GPU, as NCCL requires; gloo otherwise."""
        ranks_on_node = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        return "nccl" if torch.cuda.is_available() and ranks_on_node <= torch.cuda.device_count() else "gloo"


def world() -> World:
    """Return this rank, from `torch.distributed` if it is initialized, or from the environment of the launcher.

    Raises:
        KVPolicyStateError: If no launcher started this process; the message contains the command to use.
    """
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
        return World(rank, dist.get_world_size(), int(os.environ.get("LOCAL_RANK", rank)))
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise KVPolicyStateError(
            "The process must be started by a launcher, got no RANK and WORLD_SIZE in its environment; try "
            f"`torchrun --standalone --nproc_per_node N {_script()}` or "
            f"`deepspeed --num_gpus N --no_local_rank {_script()}`."
        )
    rank = int(os.environ["RANK"])
    return World(rank, int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", rank)))


def _script() -> str:
    return os.path.basename(sys.argv[0] or "") or "script.py"


def meet() -> World:
    """Initialize `torch.distributed` with NCCL or gloo, unless it is initialized, and return this rank."""
    place = world()
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
    if not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
        dist.init_process_group(place.transport, rank=place.rank, world_size=place.size)
    return place


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
