"""Tensor parallelism under lm-eval: every rank runs the same requests in lockstep, and the first writes the results.

lm-eval treats each rank as a single process. Whatever could differ between ranks is synchronized or checked here,
because ranks that run different forward passes would wait for each other forever.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import sys
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lm_eval.models.huggingface import get_dtype
from tqdm import tqdm

from kvpolicy import Policy
from kvpolicy.parallel.runtime import sharing_of
from kvpolicy.text.errors import KVPolicyError, KVPolicyStateError
from kvpolicy_lm_eval.arguments import Sharding
from kvpolicy_lm_eval.process_exit import end_process_at_exit

log = logging.getLogger("lm_eval.kvpolicy")


def load_shard(pretrained: Any, sharding: Sharding, dtype: Any, policy: Policy) -> Any:
    """Load this rank's shard of a model. All ranks must call this.

    Args:
        pretrained: The path or name of a model, or a model. A model that is already sharded is returned as it is.
        sharding: The number of ranks, and the library that shards the model.
        dtype: As in `hf`.
        policy: The policy that will be attached, to check that it can be used with the model.
    """
    if os.environ.get("RANK", "0") != "0":
        silence()
    end_process_at_exit()
    state = _random_state()  # loading may consume random numbers, which a single process would not
    if isinstance(pretrained, str) or sharing_of(pretrained) is None:
        from kvpolicy_deepspeed import load  # imported late, since accelerate and DeepSpeed are optional

        dtype = None if dtype in (None, "auto") else get_dtype(dtype)
        pretrained = load(pretrained, backend=sharding.backend or "deepspeed", dtype=dtype, policy=policy)
    _set_random_state(_broadcast(state))
    if pretrained.get_input_embeddings().weight is not pretrained.get_output_embeddings().weight:
        pretrained.config.tie_word_embeddings = False  # HFLM would tie them again, but only one of them is sharded
    if os.environ.get("RANK", "0") != "0" and os.environ.get("LOCAL_RANK") == "0":
        # lm-eval writes the results where LOCAL_RANK is 0, which is one process on each node.
        os.environ["LOCAL_RANK"] = os.environ["RANK"]
    return pretrained


def refuse_shard(model: Any) -> None:
    """Reject a model that is a shard, if `tp` was not given.

    Raises:
        KVPolicyError: If it is a shard.
    """
    sharing = None if isinstance(model, str) else sharing_of(model)
    if sharing is not None:
        size = dist.get_world_size(sharing.group)
        raise KVPolicyError(f"The model must be complete without tp, got a shard of {size} ranks; try tp={size}.")


def silence() -> None:
    """Suppress all output of this process except errors."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115, it stays open until the process ends
    progress_bar: Any = tqdm
    original = progress_bar.__init__

    def disabled(bar: Any, *args: Any, **kwargs: Any) -> None:
        original(bar, *args, **kwargs | {"disable": True})

    progress_bar.__init__ = disabled


@contextmanager
def no_instance_warnings() -> Generator[None]:
    """Suppress HFLM's warnings that a model passed as an object must not run in several processes."""
    logger = logging.getLogger("lm_eval.models.huggingface")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def check_same_requests(kind: str, requests: Sequence[Any]) -> None:
    """Check that all ranks have the same requests. All ranks must call this.

    Raises:
        KVPolicyStateError: If they differ, on every rank.
    """
    digest = hashlib.sha256(kind.encode())
    for request in requests:
        digest.update(json.dumps(request.args, default=repr, sort_keys=True).encode())
    if len(set(all_gather(digest.hexdigest()))) > 1:
        raise KVPolicyStateError(
            f"All ranks must have the same {kind} requests, got different ones, as if examples were drawn with "
            "different seeds; try --seed with four numbers and no None."
        )


def synchronize_answers(cache: Any) -> None:
    """Replace the answers in the request cache of each rank by those of the first rank. All ranks must call this.

    After a run that was killed, the caches can differ. Ranks that lack different answers would then run different
    requests.

    Args:
        cache: A `SqliteDict`.

    Raises:
        KVPolicyError: If two ranks use the same file.
    """
    paths = all_gather(os.path.realpath(cache.filename))
    if len(set(paths)) < len(paths):
        raise KVPolicyError(
            f"Each rank must have its own request cache, got {paths[0]} twice; try without --use_cache."
        )
    first = _broadcast(list(cache.items()))
    if dist.get_rank() != 0:
        cache.clear()
        cache.update(first)
        cache.commit()


def all_gather(value: Any) -> list[Any]:
    """Return the values of all ranks, in the order of the ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _broadcast(value: Any) -> Any:
    """Return the value of the first rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _random_state() -> list[Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return [random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda]


def _set_random_state(state: list[Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if state[3] is not None:
        torch.cuda.set_rng_state(state[3])


def warn_of_copies(processes: int, environment: Mapping[str, str]) -> None:
    """Warn if a launcher started processes that neither share a model nor divide the requests.

    HFLM divides the requests among processes (data parallelism) if there are several GPUs, or under
    `accelerate launch`. Otherwise each process answers all requests.

    Args:
        processes: The number of processes that lm-eval divides the requests among.
        environment: The environment variables, in which a launcher sets the number of processes.
    """
    started = int(environment.get("WORLD_SIZE", 1))
    if started > processes:
        message = "%s processes were started, and each answers all requests with a whole model; use tp=%s to shard it."
        log.warning(message, started, started)
