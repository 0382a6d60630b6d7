"""What `--model_args` says: a policy, numbers, and how many processes share one model."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from lm_eval.models import huggingface

from kvpolicy import Policy
from kvpolicy.hf.embedded import as_config
from kvpolicy.spec.errors import KVPolicyError, KVPolicyStateError

Backend = Literal["deepspeed", "hf"]
BACKENDS: tuple[Backend, ...] = ("deepspeed", "hf")
"""What can divide a model over ranks; HFLM has an argument `backend` too, with other values."""

_OWN = ("policy", "budget", "holdback", "rolling_chunk", "tp", "backend")
_NEAR = 0.75

# The rest of HFLM's arguments say how a whole model is loaded.
_WITH_TP = {
    "add_bos_token", "batch_size", "chat_template_args", "device", "dtype", "enable_thinking", "logits_cache",
    "max_batch_size", "max_length", "mixed_precision_dtype", "prefix_token_id", "softmax_dtype", "think_end_token",
    "tokenizer", "truncation", "trust_remote_code", "use_fast_tokenizer",
}  # fmt: skip


class Division(NamedTuple):
    """How a model is divided.

    Attributes:
        tp: Ranks that hold a part each; 1 where every process holds it whole.
        backend: What divides it; None where it is whole.
    """

    tp: int = 1
    backend: Backend | None = None


def check_spelling(others: Mapping[str, Any], pretrained: Any) -> None:
    """Refuse an argument that nobody knows and that is nearly one of kvpolicy's own.

    Args:
        others: The arguments that are not kvpolicy's.
        pretrained: The model or its name, whose config takes arguments too.

    Raises:
        KVPolicyError: Where there is one; the model's constructor would be the first to complain of it.
    """
    for name in others:
        near = difflib.get_close_matches(name.lower().replace("-", "_"), _OWN, 1, _NEAR)
        if near and not _is_known(name, pretrained):
            raise KVPolicyError(f"{name} is no argument of the model kvpolicy: did you mean {near[0]}?")


def _is_known(name: str, pretrained: Any) -> bool:
    """Whether HFLM, transformers' loading or the model's config has an argument of this name."""
    from transformers import PreTrainedModel

    takers = (huggingface.HFLM.__init__, huggingface.HFLM._create_model, PreTrainedModel.from_pretrained)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    if any(name in inspect.signature(taker).parameters for taker in takers):
        return True
    try:
        return hasattr(as_config(pretrained), name)
    except (TypeError, ValueError):  # loading will say what is wrong with it
        return False


def read_policy(policy: str | Policy | None, budget: float | str | None) -> Policy:
    """Read a policy's words, and put another budget in the place of its own."""
    found = policy if isinstance(policy, Policy) else Policy.parse(policy)
    return found if budget is None else dataclasses.replace(found, budget=budget)


def at_least(name: str, value: Any, low: int) -> int:
    """Give a whole number back, or refuse what is none or too small."""
    if not isinstance(value, int) or value < low:
        raise KVPolicyError(f"{name} is {value!r}: give a whole number of at least {low}.")
    return value


def read_division(tp: int | None, backend: str, others: Mapping[str, Any], environment: Mapping[str, str]) -> Division:
    """Read `tp` and `backend`, and refuse what does not go with them.

    Args:
        tp: Ranks that the model is divided over; None where the user said nothing.
        backend: `deepspeed` or `hf`; anything else is left to HFLM and means `deepspeed`.
        others: The other arguments of HFLM.
        environment: In which a launcher said how many processes it started.

    Raises:
        KVPolicyError: Where they contradict the launcher, or each other.
        KVPolicyStateError: Where lm-eval is so old that all ranks would write the results.
    """
    if others.get("tp_plan") is not None:
        raise KVPolicyError("tp_plan is not for kvpolicy: say tp=N,backend=hf, with N processes under torchrun.")
    if tp is None and backend in BACKENDS:
        raise KVPolicyError(f"backend={backend} says what divides a model over ranks: say tp=N, their number, too.")
    if tp is None or at_least("tp", tp, 1) == 1:
        return Division()
    _check_launcher(tp, environment)
    if str(others.get("batch_size", 1)).startswith("auto"):
        raise KVPolicyError(f"batch_size=auto would be measured by each rank for itself: give a number with tp={tp}.")
    strange = sorted(name for name, value in others.items() if name not in _WITH_TP and value not in (None, False))
    if strange:
        raise KVPolicyError(f"{strange[0]} cannot be combined with tp={tp}: give a folder with all weights, and dtype.")
    if "tp_plan" not in inspect.signature(huggingface.HFLM.__init__).parameters:
        raise KVPolicyStateError("Every rank would write results under this lm-eval: tp needs 0.4.13 or newer.")
    return Division(tp, backend if backend in BACKENDS else "deepspeed")


def _check_launcher(tp: int, environment: Mapping[str, str]) -> None:
    """Tell tensor parallelism from data parallelism."""
    command = (
        f"torchrun --standalone --nproc_per_node {tp} -m lm_eval ..., "
        f"or deepspeed --num_gpus {tp} --no_local_rank --module lm_eval ..."
    )
    if "ACCELERATE_MIXED_PRECISION" in environment:  # set by `accelerate launch` for whatever it starts
        raise KVPolicyError(
            f"accelerate launch gives every process the whole model, and tp={tp} divides one: "
            f"leave tp out for data parallelism, or run {command}."
        )
    processes = int(environment.get("WORLD_SIZE", 1))
    if processes != tp:
        raise KVPolicyError(f"tp={tp} needs {tp} processes, and there are {processes}: run {command}.")
