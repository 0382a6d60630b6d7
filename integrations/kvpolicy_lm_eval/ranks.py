"""Ranks that hold a part of one model each: all run the same requests in lock-step, and the first one speaks.

lm-eval sees one process in each of them. What may differ between them is compared here or made equal, since ranks that
run different forwards wait for each other for ever.
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
from kvpolicy.spec.errors import KVPolicyError, KVPolicyStateError
from kvpolicy_lm_eval.arguments import Division
from kvpolicy_lm_eval.leaving import leave_at_exit

log = logging.getLogger("lm_eval.kvpolicy")


def load_part(pretrained: Any, division: Division, dtype: Any, policy: Policy) -> Any:
    """Load this rank's part of a model, on every rank.

    Args:
        pretrained: Path or name of a model, or a model; one that is divided already is taken as it is.
        division: Over how many ranks, and by what.
        dtype: As in `hf`.
        policy: What the model will be put under.
    """
    if os.environ.get("RANK", "0") != "0":
        silence()
    leave_at_exit()
    state = _random_state()  # as one process would have it now: loading may draw numbers
    if isinstance(pretrained, str) or sharing_of(pretrained) is None:
        from kvpolicy_deepspeed import load  # needs accelerate and DeepSpeed, which others need not have

        dtype = None if dtype in (None, "auto") else get_dtype(dtype)
        pretrained = load(pretrained, backend=division.backend or "deepspeed", dtype=dtype, policy=policy)
    _set_random_state(_from_first(state))
    if pretrained.get_input_embeddings().weight is not pretrained.get_output_embeddings().weight:
        pretrained.config.tie_word_embeddings = False  # HFLM ties them again, and DeepSpeed divides one of them
    if os.environ.get("RANK", "0") != "0" and os.environ.get("LOCAL_RANK") == "0":
        # By this lm-eval knows the one process that writes, and of several nodes each has one.
        os.environ["LOCAL_RANK"] = os.environ["RANK"]
    return pretrained


def refuse_part(model: Any) -> None:
    """Refuse a model that is one rank's part where nobody said so.

    Raises:
        KVPolicyError: Where it is a part.
    """
    sharing = None if isinstance(model, str) else sharing_of(model)
    if sharing is not None:
        size = dist.get_world_size(sharing.group)
        raise KVPolicyError(f"This model is one rank's part of a model that {size} ranks hold: say tp={size} too.")


def silence() -> None:
    """Let this process say nothing but its errors."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115, open as long as the process
    bars: Any = tqdm
    start = bars.__init__

    def hidden(bar: Any, *args: Any, **kwargs: Any) -> None:
        start(bar, *args, **kwargs | {"disable": True})

    bars.__init__ = hidden


@contextmanager
def no_warnings_of_instances() -> Generator[None]:
    """Hold back HFLM's warnings that a model which is no name must not run in several processes."""
    logger = logging.getLogger("lm_eval.models.huggingface")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def same_requests(kind: str, requests: Sequence[Any]) -> None:
    """Refuse to start on requests that differ between ranks; all ranks must call this.

    Raises:
        KVPolicyStateError: Where they differ, on every rank.
    """
    digest = hashlib.sha256(kind.encode())
    for request in requests:
        digest.update(json.dumps(request.args, default=repr, sort_keys=True).encode())
    if len(set(_from_all(digest.hexdigest()))) > 1:
        raise KVPolicyStateError(
            f"Ranks were given different {kind} requests, as where examples are drawn at random: "
            "give --seed four numbers, none of them None."
        )


def same_answers(cache: Any) -> None:
    """Give a request cache of each rank what the first rank's holds; all ranks must call this.

    A run that was killed leaves caches that differ, and ranks that lack different answers would run different requests.

    Args:
        cache: A `SqliteDict`.

    Raises:
        KVPolicyError: Where two ranks have one file.
    """
    paths = _from_all(os.path.realpath(cache.filename))
    if len(set(paths)) < len(paths):
        raise KVPolicyError(f"Several ranks would write the request cache {paths[0]}: leave --use_cache out with tp.")
    first = _from_first(list(cache.items()))
    if dist.get_rank() != 0:
        cache.clear()
        cache.update(first)
        cache.commit()


def _from_first(mine: Any) -> Any:
    """The first rank's object."""
    held = [mine]
    dist.broadcast_object_list(held, src=0)
    return held[0]


def _from_all(mine: Any) -> list[Any]:
    """Every rank's object, in their order."""
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, mine)
    return held


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
    """Say so where a launcher started processes that neither share a model nor divide the requests.

    HFLM divides requests among processes (data parallelism) where there are several GPUs, or under `accelerate launch`.
    Elsewhere each process answers everything.

    Args:
        processes: That lm-eval divides the requests among.
        environment: In which a launcher said how many it started.
    """
    started = int(environment.get("WORLD_SIZE", 1))
    if started > processes:
        log.warning(
            "%s processes were started and each answers every request with a whole model: say tp=%s to divide it.",
            started, started,
        )  # fmt: skip
