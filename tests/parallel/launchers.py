"""The commands that start two ranks, as a user would."""

from __future__ import annotations

import random
import socket

LIMIT = 240
"""Seconds after which ranks are taken to hang."""


def words(launcher: str) -> list[str]:
    """What follows `python` to start two ranks with `torchrun` or `deepspeed`."""
    if launcher == "torchrun":
        return ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    ranks = ["--num_gpus", "2", "--no_local_rank"]
    return ["-m", "deepspeed.launcher.runner", *ranks, "--master_port", str(free_port())]


def free_port() -> int:
    """A port that no one listens at, of those that systems do not hand out: it is used seconds later."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
