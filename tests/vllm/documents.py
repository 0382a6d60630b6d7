"""Documents that tests ask, and what the engine's config says of the model that made them."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import kvpolicy

WORDS = ("tiger", "lion", "wolf", "sheep", "iron", "gold", "fish", "bird")


def records(times: int = 6, first: int = 1000) -> str:
    """Records that the embedded models can recall."""
    return "".join(f"{word}={number}\n" for number, word in enumerate(WORDS * times, first))


def save(pair: tuple[Any, Any], text: str, policy: str, path: Path) -> Any:
    """Save the cache of a text, and return its token ids [1, N]."""
    model, tokenizer = pair
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = kvpolicy.PolicyCache(model)
        model(ids, cache=cache)
        cache.save(path, tokens=ids)
    return ids


def config_of(model: Any, folder: Path | None, **changes: Any) -> Any:
    """The config of an engine of vLLM that serves an embedded model, as far as documents need it."""
    extra: dict[str, Any] = {} if folder is None else {"folder": str(folder)}
    source = str(files("kvpolicy") / "assets" / "tiny")
    found = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=model.config,
            max_model_len=1024,
            model=source,
            revision=None,
            tokenizer=source,
            tokenizer_revision=None,
            trust_remote_code=False,
            use_mla=False,
        ),
        kv_transfer_config=SimpleNamespace(
            kv_connector="KVPolicyConnector",
            kv_load_failure_policy="fail",
            get_from_extra_config=lambda name, default: extra.get(name, default),
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        speculative_config=None,
    )
    for name, value in changes.items():
        setattr(found, name, value)
    return found
