"""What is refused before any weight is read, in one sentence."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from kvpolicy_deepspeed.shards import FAMILIES

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_backend(backend: str, path_or_model: Any) -> None:
    """Raise ValueError where there is no such backend, or it cannot divide a model in memory; or ImportError."""
    if backend not in ("deepspeed", "hf"):
        raise ValueError(f'There is no backend {backend!r}: use "deepspeed" or "hf".')
    if backend == "deepspeed" and find_spec("deepspeed") is None:
        raise ImportError(
            'backend="deepspeed" needs DeepSpeed, which is not installed: run pip install "kvpolicy[deepspeed]", or '
            'use backend="hf".'
        )
    if backend == "hf" and isinstance(path_or_model, nn.Module):
        raise ValueError(
            'backend="hf" divides a model while it loads, and this one is in memory: give its folder, or use '
            'backend="deepspeed".'
        )
    if isinstance(path_or_model, nn.Module) and any(p.is_meta for p in path_or_model.parameters()):
        raise ValueError("This model has no weights (they are on the meta device): give the checkpoint's folder.")


def check_policy(config: Any, policy: Any) -> None:
    """Raise ValueError where a policy does not fit a model."""
    if policy is None:
        return
    from kvpolicy import Policy
    from kvpolicy.families import describe

    chosen = policy if isinstance(policy, Policy) else Policy.parse(policy)
    chosen.codec.check(describe(config).info())


def check_dtype(dtype: Any, backend: str) -> Any:
    """The dtype that was meant; raises ValueError where the backend cannot have it."""
    if dtype is None or dtype == "auto":
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f'{dtype!r} is no dtype: give one such as torch.bfloat16, or its name, "bfloat16".')
    if backend == "deepspeed" and found not in _FLOATS:
        raise ValueError(f'DeepSpeed does not run {found}: use float32, bfloat16 or float16, or backend="hf".')
    return found


def check_family(config: Any, backend: str, size: int) -> None:
    """Raise ValueError where a backend is not known to give the right numbers for a model on so many ranks."""
    from kvpolicy.families import describe

    kind = config.model_type
    known = sorted(name for name, family in FAMILIES.items() if backend == "deepspeed" or family.native)
    if kind not in known:
        other = ': use backend="deepspeed".' if kind in FAMILIES else "; no other backend divides it either."
        raise ValueError(f'backend="{backend}" is tested with {", ".join(known)}, and not with {kind}{other}')
    if getattr(config, "quantization_config", None):
        raise ValueError("Quantized weights cannot be divided: load a checkpoint in bfloat16, float16 or float32.")
    queries, keys = int(config.num_attention_heads), describe(config).shape.heads
    if backend == "hf" and keys % size:
        raise ValueError(
            f"transformers cannot divide {keys} KV heads over {size} ranks: use "
            'backend="deepspeed", which replicates them, or another number of ranks.'
        )
    if kind == "falcon":
        _check_falcon(config, queries, keys, size)
    if queries < size:
        raise ValueError(f"{queries} query heads cannot be divided over {size} ranks: use at most {queries} ranks.")


def _check_falcon(config: Any, queries: int, keys: int, size: int) -> None:
    if config.alibi:
        raise ValueError("Falcon with ALiBi cannot be divided over ranks: use a rotary Falcon.")
    if keys < size and (size % keys or queries % size):
        raise ValueError(
            f"A Falcon with {queries} query heads and {keys} KV head(s) cannot be divided over {size} ranks: use a "
            f"number of ranks that divides {queries} and is a multiple of {keys}."
        )
