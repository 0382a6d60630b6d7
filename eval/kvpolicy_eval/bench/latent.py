"""Time and bytes of latent attention (MLA) under a policy, over those of the stock cache.

The shape is that of DeepSeek-V2-Lite, with two layers, a narrow residual stream and a small vocabulary, so that
attention takes most of the time. transformers expands every latent vector of the past for all heads in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import kvpolicy
from kvpolicy.hf.cache_names import CACHE, cache_argument
from kvpolicy_eval.bench.timing import Row, compare

POLICIES = ("full", "snapkv@0.25", "full+tokenwise:bits=4", "snapkv+tokenwise:bits=4@0.25")
LENGTH = 4096
STEPS = 4


def model() -> Any:
    """Two layers with the attention of DeepSeek-V2-Lite and random weights."""
    from transformers import AutoModelForCausalLM, DeepseekV2Config

    attention: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None}
    latent: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512}
    few: dict[str, Any] = {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64, "n_group": 1}
    torch.manual_seed(0)
    config = DeepseekV2Config(
        **attention, **latent, **sizes, **few, topk_group=1, first_k_dense_replace=2, max_position_embeddings=8192
    )
    return AutoModelForCausalLM.from_config(config).eval()


def measure(rounds: int = 5) -> Iterator[Row]:
    """Time the steps behind a prompt, and the prompt itself."""
    ids = torch.randint(5, 500, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    stock = model()
    ours = model()
    with torch.inference_mode():
        out = stock(ids, logits_to_keep=1)
        base = _steps(stock, getattr(out, CACHE))
        stock_nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in getattr(out, CACHE).layers)
        for policy in POLICIES:
            with kvpolicy.attach(ours, policy):
                cache = kvpolicy.PolicyCache(ours, prompt=LENGTH, new=STEPS * (rounds + 1))
                ours(ids, logits_to_keep=1, **cache_argument(ours, cache))
                share = cache.nbytes / stock_nbytes
                ratio = compare(base, _steps(ours, cache), rounds)
            yield Row(f"{STEPS} steps at {LENGTH}; {share:.0%} of the stock cache's bytes", policy, ratio, None)
        for policy in ("full", "snapkv@0.25"):
            with kvpolicy.attach(ours, policy):
                ratio = compare(_prompt(stock, ids), _prompt(ours, ids), max(rounds // 2, 1))
            yield Row(f"prompt of {LENGTH}", policy, ratio, None)


def _steps(model: Any, cache: Any) -> Callable[[], None]:
    """A function that decodes a few steps, which stand at the end of a cache that grows."""
    token = torch.tensor([[7]])

    def run() -> None:
        for _ in range(STEPS):
            model(token, **cache_argument(model, cache))

    return run


def _prompt(model: Any, ids: Tensor) -> Callable[[], None]:
    def run() -> None:
        model(ids, logits_to_keep=1, use_cache=True)

    return run
