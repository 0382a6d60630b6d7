"""Checks of the arguments of `load`, before any weight is read."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from kvpolicy.text.errors import KVPolicyError

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_backend(backend: str, path_or_model: Any) -> None:
    """Raise KVPolicyError if the backend is unknown or cannot shard this model, ImportError if it is not installed."""
    if backend not in ("deepspeed", "hf"):
        raise KVPolicyError(f'backend must be "deepspeed" or "hf", got {backend!r}; try "deepspeed".')
    if backend == "deepspeed" and find_spec("deepspeed") is None:
        raise ImportError(
            'backend="deepspeed" needs DeepSpeed, which is not installed: run pip install "kvpolicy[deepspeed]", or '
            'use backend="hf".',
            name="deepspeed",
        )
    if backend == "hf" and isinstance(path_or_model, nn.Module):
        raise KVPolicyError(
            'The model must be a folder or a name with backend="hf", which shards while it loads, got a model in '
            'memory; try its folder, or backend="deepspeed".'
        )
    if isinstance(path_or_model, nn.Module) and any(p.is_meta for p in path_or_model.parameters()):
        raise KVPolicyError(
            "The model must have weights, got one on the meta device; try the folder of its checkpoint."
        )


def check_policy(config: Any, policy: Any, dtype: torch.dtype | None, tp: int, *, follows_plan: bool) -> None:
    """Raise KVPolicyError if the policy is invalid, or does not support the model on `tp` ranks."""
    if policy is None:
        return
    from kvpolicy import Policy
    from kvpolicy.hf.model_spec import describe, resolve_for

    info = describe(config).info()  # calibrations are of all heads
    resolve_for(Policy.of(policy), describe(config, dtype, tp, follows_plan=follows_plan), info).check(info)


def check_dtype(dtype: Any, backend: str) -> Any:
    """Return a dtype given by itself or its name, or None; raise KVPolicyError if the backend does not support it."""
    if dtype is None or dtype == "auto":
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise KVPolicyError(f'dtype must be a torch.dtype or its name, got {dtype!r}; try "bfloat16".')
    if backend == "deepspeed" and found not in _FLOATS:
        raise KVPolicyError(
            f'dtype must be float32, bfloat16 or float16 with DeepSpeed, got {found}; try "bfloat16", or backend="hf".'
        )
    return found
