"""What is refused before any weight is read, in one sentence."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from kvpolicy.spec.errors import KVPolicyError

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_backend(backend: str, path_or_model: Any) -> None:
    """Raise KVPolicyError where there is no such backend, or it cannot divide a model in memory; or ImportError."""
    if backend not in ("deepspeed", "hf"):
        raise KVPolicyError(f'There is no backend {backend!r}: use "deepspeed" or "hf".')
    if backend == "deepspeed" and find_spec("deepspeed") is None:
        raise ImportError(
            'backend="deepspeed" needs DeepSpeed, which is not installed: run pip install "kvpolicy[deepspeed]", or '
            'use backend="hf".',
            name="deepspeed",
        )
    if backend == "hf" and isinstance(path_or_model, nn.Module):
        raise KVPolicyError(
            'backend="hf" divides a model while it loads, and this one is in memory: give its folder, or use '
            'backend="deepspeed".'
        )
    if isinstance(path_or_model, nn.Module) and any(p.is_meta for p in path_or_model.parameters()):
        raise KVPolicyError("This model has no weights (they are on the meta device): give the checkpoint's folder.")


def check_policy(config: Any, policy: Any) -> None:
    """Raise KVPolicyError where a policy does not fit a model."""
    if policy is None:
        return
    from kvpolicy import Policy
    from kvpolicy.hf.model_spec import describe

    chosen = policy if isinstance(policy, Policy) else Policy.parse(policy)
    chosen.codec.check(describe(config).info())


def check_dtype(dtype: Any, backend: str) -> Any:
    """The dtype that was meant; raises ValueError where the backend cannot have it."""
    if dtype is None or dtype == "auto":
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise KVPolicyError(f'{dtype!r} is no dtype: give one such as torch.bfloat16, or its name, "bfloat16".')
    if backend == "deepspeed" and found not in _FLOATS:
        raise KVPolicyError(f'DeepSpeed does not run {found}: use float32, bfloat16 or float16, or backend="hf".')
    return found
