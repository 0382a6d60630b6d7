"""The ranks of a job that a launcher has started: their numbers, their devices, and their process group."""

from __future__ import annotations

import os
import sys
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
