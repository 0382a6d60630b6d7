"""What an answer depends on besides its request: lm-eval's request cache knows none of it."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from lm_eval.models import huggingface

from kvpolicy import Policy
from kvpolicy.hf.discovery import samples_of
from kvpolicy.planning.curves import load_tuned
from kvpolicy.policy import LayeredPolicy, TunedPolicy

# Arguments of HFLM that change no answer, or that a fingerprint has in another form.
_WITHOUT_EFFECT = {
    "batch_size",
    "device",
    "device_map",
    "dtype",
    "logits_cache",
    "max_batch_size",
    "max_cpu_memory",
    "max_length",
    "max_memory_per_gpu",
    "offload_folder",
    "parallelize",
    "token",
    "trust_remote_code",
}

_SAMPLES = 8
"""Elements of each tensor of a model that are compared."""


def fingerprint_of(lm: Any, name: str) -> str:
    """Everything that an answer depends on besides its request, as a text that people can read.

    Args:
        lm: A `KVPolicyLM`.
        name: Where its model was loaded from; empty if it has no name.
    """
    whole = lm.sharding.tp == 1  # a shard has its own part of the weights
    return (
        f"{name or 'a model without a name'} {lm.model.dtype}"
        + (f" weights={weights_of(lm.model)}" if whole else "")
        + f" policy={lm.policy}{content_of(lm.policy)}"
        f" holdback={lm.holdback} rolling_chunk={lm.rolling_chunk} max_length={lm.max_length}"
        + (f" hold={lm.hold}" if lm.hold != "plain" else "")
        + (f" compile={lm.compile}" if lm.compile is not None else "")
        + (f" group_by_prefix={lm.least_prefix}" if lm.least_prefix else "")
        + ("" if whole else f" tp={lm.sharding.tp} backend={lm.sharding.backend}")
        + lm.others
    )


def describe_others(others: Mapping[str, Any]) -> str:
    """HFLM's arguments that answers depend on, such as `peft` and `add_bos_token`, where they are not the defaults.

    Args:
        others: The arguments that are not kvpolicy's.

    Examples:
        >>> describe_others({"revision": "v2", "batch_size": 8, "add_bos_token": True, "truncation": False})
        ' add_bos_token=True revision=v2'
    """
    standard = inspect.signature(huggingface.HFLM.__init__).parameters
    told: list[str] = []
    for name in sorted(others.keys() - _WITHOUT_EFFECT):
        text = _text_of(others[name])
        default = standard[name].default if name in standard else None
        if text and text != _text_of(default):
            told.append(f" {name}={text}")
    return "".join(told)


def _text_of(value: Any) -> str:
    """A value as a text; empty for an object such as a tokenizer, which has another address in every process."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, str | int | float | Path):
        return str(value)
    if isinstance(value, dict | list | tuple):
        return json.dumps(value, sort_keys=True, default=_text_of)
    return ""


def content_of(policy: Policy) -> str:
    """A hash of the files that a policy reads, since others may be written to their paths; empty if it reads none.

    Args:
        policy: A policy, whose parts may name files or folders, such as calibrations.

    Raises:
        KVPolicyError: If the file of a tuned policy cannot be read.
    """
    found = hashlib.sha256()
    paths = sorted({path for name in _named_files(policy) for path in _files_below(Path(name))})
    for path in paths:
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return f" sha256={found.hexdigest()[:16]}" if paths else ""


def _named_files(value: Any) -> Iterator[str]:
    """Texts in a policy that may be paths: the options of its parts that are neither numbers nor one of some words."""
    if isinstance(value, TunedPolicy):
        yield value.source.file
        yield from _named_files(load_tuned(value.source.file))
    elif isinstance(value, LayeredPolicy):
        yield from _named_files(value.layers)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _named_files(item)
    elif is_dataclass(value):
        for option in fields(value):
            own = getattr(value, option.name)
            if isinstance(own, str) and option.type in (str, "str", "str | None"):
                yield from [own] if own else []
            else:
                yield from _named_files(own)


def _files_below(path: Path) -> list[Path]:
    """A file, or the files in a folder; none for the name of an embedded model."""
    return [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]


def weights_of(model: torch.nn.Module) -> str:
    """A hash of some elements of every tensor of a model: those in its folder, or in memory, may have changed.

    Args:
        model: The whole model.

    Examples:
        >>> import torch
        >>> layer = torch.nn.Linear(4, 4)
        >>> before = weights_of(layer)
        >>> layer.bias.data += 1
        >>> weights_of(layer) == before
        False
    """
    tensors = [tensor for tensor in model.state_dict().values() if isinstance(tensor, torch.Tensor)]
    present = [tensor for tensor in tensors if tensor.numel() and tensor.device.type != "meta"]  # not offloaded
    found = hashlib.sha256()
    for tensor in present:
        found.update(samples_of(tensor.detach(), _SAMPLES).cpu().double().numpy().tobytes())
    return found.hexdigest()[:16]
