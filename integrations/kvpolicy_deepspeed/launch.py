"""The ranks of a job: who they are, how they meet, and how they leave."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Generator
from typing import NamedTuple

import torch
import torch.distributed as dist

from kvpolicy.spec.errors import KVPolicyStateError


class World(NamedTuple):
    """One rank's place in a job.

    Attributes:
        rank: Which rank this is.
        size: How many there are.
        local: Which of those on this machine; also its card.
    """

    rank: int
    size: int
    local: int

    @property
    def device(self) -> torch.device:
        """Where this rank computes; where there are fewer cards than ranks, some share one."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.local % torch.cuda.device_count())

    @property
    def transport(self) -> str:
        """NCCL where each rank has a card of its own, which it insists on; gloo elsewhere."""
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        return "nccl" if torch.cuda.is_available() and here <= torch.cuda.device_count() else "gloo"


def world() -> World:
    """Read this rank's place from the launcher's environment, or from `torch.distributed` where it is initialised.

    Raises:
        KVPolicyStateError: Where there is no launcher; it gives the command to use.
    """
    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        return World(rank, size, int(os.environ.get("LOCAL_RANK", rank)))
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise KVPolicyStateError(
            "No launcher started this process (RANK and WORLD_SIZE are not set): run "
            f"`torchrun --standalone --nproc_per_node N {_script()}` or "
            f"`deepspeed --num_gpus N --no_local_rank {_script()}`."
        )
    rank = int(os.environ["RANK"])
    return World(rank, int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", rank)))


def _script() -> str:
    return os.path.basename(sys.argv[0] or "") or "script.py"


def meet() -> World:
    """Initialise `torch.distributed` where nobody did: by NCCL or gloo."""
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
    """Run a script's body on every rank, and leave so that the job ends as one.

    After the body all ranks wait for each other and the process ends with status 0, by `os._exit`: nothing behind the
    block runs, nor what is registered with `atexit`. Where the body raises, the rank prints its error and ends at once
    with a status that is not 0, so that the launcher stops the others, which would else wait in a collective.

    Args:
        seed: What to seed `torch`'s random numbers with on every rank, so that all draw the same tokens when
            sampling; nothing is seeded by default.

    Raises:
        KVPolicyStateError: Where there is no launcher; it gives the command to use.

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
        status = _status(error)
        if status:
            _leave(status, f"Rank {place.rank} of {place.size} failed:\n{traceback.format_exc()}")
    try:
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        _leave(1, f"Rank {place.rank} of {place.size} was done, and another was not:\n{traceback.format_exc()}")
    _leave(0)


def _status(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return code and (code % 256 or 1)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _leave(status: int, message: str = "") -> None:
    """End the process: destructors of process groups abort or hang where another rank is already gone."""
    if message:
        print(message, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
