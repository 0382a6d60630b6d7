"""The arguments of the model `kvpolicy` in `--model_args`: policy, numbers, and tensor parallelism."""

from __future__ import annotations

import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from lm_eval.models import huggingface

from kvpolicy import Policy
from kvpolicy.hf.embedded import as_config
from kvpolicy.text.budget import Budget
from kvpolicy.text.errors import KVPolicyError, KVPolicyStateError
from kvpolicy_lm_eval.generating import NEW_TOKENS

Backend = Literal["deepspeed", "hf"]
BACKENDS: tuple[Backend, ...] = ("deepspeed", "hf")
"""The libraries that can shard a model. The argument `backend` of HFLM has other values."""

_HF_BACKENDS = ("default", "causal", "seq2seq")

_SIMILARITY = 0.75

# The arguments of HFLM that work with tensor parallelism. All others are about loading a whole model.
_WITH_TP = {
    "add_bos_token",
    "batch_size",
    "chat_template_args",
    "device",
    "dtype",
    "enable_thinking",
    "logits_cache",
    "max_batch_size",
    "max_length",
    "mixed_precision_dtype",
    "prefix_token_id",
    "softmax_dtype",
    "think_end_token",
    "tokenizer",
    "truncation",
    "trust_remote_code",
    "use_fast_tokenizer",
}


class Sharding(NamedTuple):
    """How a model is sharded.

    Attributes:
        tp: The number of ranks; 1 if every process holds the whole model.
        backend: The library that shards the model; None if it is not sharded.
    """

    tp: int = 1
    backend: Backend | None = None


def named_arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a method's arguments, without `self` and those that it takes under any name."""
    _, *parameters = inspect.signature(function).parameters.values()
    return tuple(each.name for each in parameters if each.kind is not each.VAR_KEYWORD)


def check_spelling(others: Mapping[str, Any], own: Sequence[str], pretrained: Any) -> None:
    """Reject an unknown argument whose name is similar to one of kvpolicy's own arguments.

    Args:
        others: The arguments that are not kvpolicy's.
        own: The names of kvpolicy's arguments.
        pretrained: The model or its name. Its config accepts arguments too.

    Raises:
        KVPolicyError: If there is such an argument. Otherwise only the constructor of the model would reject it.
    """
    for name in others:
        similar = difflib.get_close_matches(name.lower().replace("-", "_"), own, 1, _SIMILARITY)
        if similar and not _is_known(name, pretrained):
            raise KVPolicyError(
                f"The arguments must be arguments of the model kvpolicy, got {name!r}; try {similar[0]!r}."
            )


def _is_known(name: str, pretrained: Any) -> bool:
    """Return whether HFLM, `from_pretrained` or the config of the model has an argument of this name."""
    from transformers import PreTrainedModel

    functions = (huggingface.HFLM.__init__, huggingface.HFLM._create_model, PreTrainedModel.from_pretrained)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    if any(name in inspect.signature(function).parameters for function in functions):
        return True
    try:
        return hasattr(as_config(pretrained), name)
    except (TypeError, ValueError):  # loading the model will report the problem
        return False


def check_values(others: Mapping[str, Any], backend: str) -> None:
    """Reject values of HFLM's arguments for which it has no message of its own.

    Args:
        others: The arguments that are not kvpolicy's.
        backend: The library that shards the model, or a value of HFLM's own argument `backend`.

    Raises:
        KVPolicyError: If there is such a value.
    """
    if backend not in (*BACKENDS, *_HF_BACKENDS):
        raise KVPolicyError(f"backend must be {' or '.join(BACKENDS)} with tp, got {backend!r}; try leaving it out.")
    batch_size = str(others.get("batch_size", 1))
    number, _, times = batch_size.partition(":")
    if not (_is_count(number) or (number == "auto" and re.fullmatch(r"(\d*\.)?\d*", times))):
        raise KVPolicyError(
            f"batch_size must be an integer of at least 1, auto, or auto:N to measure it N times, got {batch_size}; "
            "try 1."
        )
    for name in ("max_batch_size", "max_length"):
        if others.get(name) is not None and not _is_count(str(others[name])):
            raise KVPolicyError(f"{name} must be an integer of at least 1, got {others[name]!r}; try leaving it out.")
    dtype = others.get("dtype")
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise KVPolicyError(f"dtype must be auto or a dtype of PyTorch, got {dtype!r}; try bfloat16.")


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) >= 1


def loading_error(error: Exception, pretrained: Any, others: Mapping[str, Any]) -> KVPolicyError | None:
    """The sentence for a model that cannot be loaded as the arguments say; None if the error is of another kind.

    Args:
        error: The error of loading the model.
        pretrained: The model or its name.
        others: The arguments that are not kvpolicy's.
    """
    if isinstance(error, OSError):
        reason = textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" ...")
        return KVPolicyError(f"The model {pretrained!r} cannot be loaded: {reason}")
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if found is None or found[1] not in others:
        return None
    return KVPolicyError(
        f"The arguments must be those of the models kvpolicy and hf, got {found[1]!r}; {_place_of(found[1])}."
    )


def _place_of(name: str) -> str:
    """Where an argument belongs that the model does not have."""
    from lm_eval.evaluator import simple_evaluate
    from transformers import GenerationConfig

    if name == "compression_ratio":
        return "try budget=0.2, the fraction that is kept"
    if name in (*inspect.signature(simple_evaluate).parameters, "seed", "output_path"):
        return f"try the option --{name} of lm_eval"
    if name in NEW_TOKENS or hasattr(GenerationConfig(), name):
        return f"try --gen_kwargs {name}=VALUE"
    return "options of a method belong to the policy, as in policy=snapkv:window=32"


def read_policy(policy: str | Policy | None, budget: Budget | None) -> Policy:
    """Parse a spec, and override its budget if one is given."""
    found = policy if isinstance(policy, Policy) else Policy.parse(policy)
    return found if budget is None else found.with_budget(budget)


def at_least(name: str, value: Any, low: int) -> int:
    """Return an integer; raise KVPolicyError if it is not an integer, or smaller than `low`."""
    if not isinstance(value, int) or value < low:
        raise KVPolicyError(f"{name} must be an integer of at least {low}, got {value!r}; try {low}.")
    return value


def read_sharding(tp: int | None, backend: str, others: Mapping[str, Any], environment: Mapping[str, str]) -> Sharding:
    """Read `tp` and `backend`, and reject arguments that cannot be combined with them.

    Args:
        tp: The number of ranks; None if it was not given.
        backend: `deepspeed` or `hf`. Any other value is one of HFLM's, and means `deepspeed`.
        others: The other arguments of HFLM.
        environment: The environment variables, in which a launcher sets the number of processes.

    Raises:
        KVPolicyError: If the arguments contradict the launcher or each other.
        KVPolicyStateError: If this version of lm-eval would write the results on every rank.
    """
    if others.get("tp_plan") is not None:
        raise KVPolicyError(
            f"tp_plan must be omitted for the model kvpolicy, got {others['tp_plan']!r}; try tp=N,backend=hf with N "
            "processes under torchrun."
        )
    if tp is None and backend in BACKENDS:
        raise KVPolicyError(
            f"backend={backend} must be combined with tp, got no tp; try tp=N with N processes under torchrun."
        )
    if tp is None or at_least("tp", tp, 1) == 1:
        return Sharding()
    _check_launcher(tp, environment)
    batch_size = str(others.get("batch_size", 1))
    if batch_size.startswith("auto"):
        raise KVPolicyError(
            f"batch_size must be a number with tp={tp}, because ranks could measure different ones, got {batch_size}; "
            "try batch_size=1."
        )
    rejected = sorted(name for name, value in others.items() if name not in _WITH_TP and value not in (None, False))
    if rejected:
        raise KVPolicyError(
            f"{rejected[0]} must be omitted with tp={tp}, got {others[rejected[0]]!r}; try a folder with complete "
            "weights, and dtype."
        )
    if "tp_plan" not in inspect.signature(huggingface.HFLM.__init__).parameters:
        raise KVPolicyStateError(
            "tp must be used with lm-eval 0.4.13 or newer, because every rank of an older version writes the results, "
            "got an older one; try pip install --upgrade lm_eval."
        )
    return Sharding(tp, backend if backend in BACKENDS else "deepspeed")


def _check_launcher(tp: int, environment: Mapping[str, str]) -> None:
    """Reject a launcher of data parallelism, and a number of processes other than `tp`."""
    command = (
        f"torchrun --standalone --nproc_per_node {tp} -m lm_eval ..., "
        f"or deepspeed --num_gpus {tp} --no_local_rank --module lm_eval ..."
    )
    if "ACCELERATE_MIXED_PRECISION" in environment:  # accelerate launch sets it for every process
        raise KVPolicyError(
            f"tp={tp} must be started by another launcher, got accelerate launch, which gives every process the whole "
            f"model; try it without tp for data parallelism, or {command}."
        )
    processes = int(environment.get("WORLD_SIZE", 1))
    if processes != tp:
        raise KVPolicyError(f"tp={tp} must have {tp} processes, got {processes}; try {command}.")
