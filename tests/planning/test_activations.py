"""The peak of a prefill: never less than the tensors that are alive in one, and not much more."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
)
from transformers.masking_utils import AttentionMaskInterface

import kvpolicy
from kvpolicy.hf.embedded import SHIPPED, config_of
from kvpolicy.hf.model_spec import describe
from kvpolicy.planning.activations import Prefill
from tests.engine.live import Alive
from tests.sampling import each_once, product

MARGIN = 1.65
"""The most that a peak may be over-estimated where the tensors of a model are small; see `TILES`."""

TILED_MARGIN = 1 / 0.6
"""The same where a layer takes a part of the tokens at a time, or where chunks are held."""

TILES = 32 * 2**20
"""Bytes of tiles that are assumed for a merger, whatever the size of the model."""

SIZE_MARGIN = 1.1
"""The same for the sizes of real models, of which the tiles are a small part."""


SIZES: dict[str, Any] = {
    **{"num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 64},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 8192},
}


def made(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def llama(**changed: Any) -> Any:
    return made(LlamaConfig(**SIZES | changed))


def alive(model: Any, policy: str | None, prompt: int, chunk: int | None, batch: int = 1, **how: Any) -> int:
    """The most bytes that are alive in a prefill as `generate` does it, beside the weights."""
    ids = torch.randint(0, 64, (batch, prompt))
    with torch.no_grad():
        if policy is None:
            with Alive(model) as watch:
                cache = None
                for piece in ids.split(chunk or prompt, 1):
                    cache = model(piece, cache=cache, use_cache=True, logits_to_keep=1).cache
            return watch.peak
        with kvpolicy.attach(model, policy, **how):
            held = kvpolicy.PolicyCache(model, prompt=prompt, new=8)
            with Alive(model) as watch:
                for piece in ids.split(chunk or prompt, 1):
                    model(piece, cache=held, logits_to_keep=1)
    return watch.peak


def check_plan(model: Any, policy: str, margin: float, chunk: int | None = None, **how: Any) -> Any:
    """A prefill of 768 tokens needs what is planned, and not much less; returns the plan."""
    spec = policy if policy in ("full", "tokenwise", "rotate") else f"{policy}@0.2"
    measured = alive(model, spec, 768, chunk, **how)
    plan = kvpolicy.plan(model.config, spec, prompt=768, new=8, dtype=torch.float32, chunk=chunk, **how)
    tiles = TILES if "regress" in policy else 0
    assert measured <= plan.prefill_nbytes <= margin * measured + tiles
    return plan


MINICACHE = "streaming+minicache:start=0"
"""Tokens of a layer wait until the next one has run."""

OFTEN = ["window", "h2o", "snapkv", "kvzip", "squeeze+snapkv", "lava+window", "snapkv+regress"]
"""What runs on every commit in one piece; the others then run in tiles alone."""

WHOLE = [
    *OFTEN,
    MINICACHE,
    "scissorhands",
    "expected",
    "compactor",
    "keyformer",
    "rkv",
    "vase",
    "cake+window",
    "dynamickv+window",
    "mass+snapkv",
    "snapkv+regress:queries=replay",
]
OTHERS = ["snapkv", "h2o+kivi", "uniform/adakv+snapkv", "kvzip", "compactor", "keyformer", "rkv"]
CHUNKED = ["full", "tokenwise", MINICACHE, *OTHERS]


@product(
    ("policy", "chunk"),
    list(dict.fromkeys([*WHOLE, *CHUNKED])),
    [None, 192],
    sample=[*((policy, None) for policy in OFTEN), ("h2o+kivi", 192)],
    allowed=lambda row: row[0] in (WHOLE if row[1] is None else CHUNKED),
)
def test_a_plan_is_what_a_prefill_needs(policy: str, chunk: int | None) -> None:
    check_plan(llama(), policy, MARGIN, chunk)


TILED = ["full", *WHOLE, "tokenwise", "h2o+kivi", "uniform/adakv+snapkv", "snapkv+quest:read=64", "rotate"]
IN_TILES = [policy for policy in TILED if policy == "kvzip" or policy not in OFTEN]


@product(
    ("policy", "tile"), TILED, [192, 500], sample=[row for row in each_once(TILED, [192, 500]) if row[0] in IN_TILES]
)
def test_a_plan_is_what_tiles_need(policy: str, tile: int) -> None:
    check_plan(llama(), policy, TILED_MARGIN, tile=tile)


@product(
    "policy", ["tokenwise", "bfp", "turboquant", "minicache:start=0"], sample=[("tokenwise",), ("minicache:start=0",)]
)
def test_long_prompts_are_encoded_in_ranges(policy: str) -> None:
    model = llama(max_position_embeddings=32768, num_key_value_heads=8, num_hidden_layers=2)
    measured = alive(model, policy, 12_288, None, tile=512)
    plan = kvpolicy.plan(model.config, policy, prompt=12_288, new=8, dtype=torch.float32, tile=512)
    # A block waits for the next layer in one of the layers only, and not where most else is alive.
    least = 0.5 if "minicache" in policy else 1 / TILED_MARGIN
    assert least * plan.prefill_nbytes <= measured <= plan.prefill_nbytes


HELD = ["window", "h2o", "snapkv", "compactor", "squeeze+snapkv", "h2o+kivi", "uniform/adakv+snapkv"]


@product(("policy", "tile"), HELD, [None, 100], sample=each_once(HELD, [None, 100]))
def test_a_plan_is_what_held_chunks_need(policy: str, tile: int | None) -> None:
    check_plan(llama(), policy, TILED_MARGIN, 192, tile=tile, chunks="hold")


WAITING = ["kvzip+tokenwise", "squeeze+h2o+tokenwise", "uniform/adakv+kvzip+bfp"]


@product(("policy", "chunk"), WAITING, [None, 192], sample=each_once(WAITING, [192, None]))
def test_a_plan_is_what_codes_that_wait_need(policy: str, chunk: int | None) -> None:
    model = llama(num_hidden_layers=5)  # of which the prompts of most wait
    how: dict[str, Any] = {"tile": 192, "chunks": "hold"}
    plan = check_plan(model, policy, TILED_MARGIN, chunk, **how, hold="codes")
    plain = kvpolicy.plan(model.config, f"{policy}@0.2", prompt=768, new=8, dtype=torch.float32, chunk=chunk, **how)
    assert plan.prefill_nbytes < plain.prefill_nbytes


@pytest.mark.parametrize("chunk", [None, 192])
def test_the_stock_cache(chunk: int | None) -> None:
    model = llama()
    measured = alive(model, None, 768, chunk)
    plan = kvpolicy.plan(model.config, "full", prompt=768, dtype=torch.float32, chunk=chunk)
    assert measured <= plan.full_prefill_nbytes <= MARGIN * measured


def test_rows_and_statistics_larger_than_the_mlp() -> None:
    model = llama(intermediate_size=16, num_key_value_heads=8)
    measured = alive(model, "snapkv:window=64@0.2", 512, None, batch=3)
    plan = kvpolicy.plan(model.config, "snapkv:window=64@0.2", prompt=512, new=8, batch=3, dtype=torch.float32)
    assert measured <= plan.prefill_nbytes <= MARGIN * measured


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
@pytest.mark.parametrize("chunk", [None, 192])
def test_sliding_windows(family: str, chunk: int | None) -> None:
    """Their masks, their matrices of attention, and the prompts that their stock caches keep alive."""
    sizes: dict[str, Any] = SIZES | {
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "head_dim": 16,
        "pad_token_id": 0,
    }
    sizes |= {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
    config: Any = Gemma3TextConfig(**sizes) if family == "gemma3" else GptOssConfig(**sizes, num_local_experts=4)
    check_plan(made(config), "window", MARGIN, chunk)


@pytest.mark.parametrize("policy", ["snapkv", "h2o", "window+tokenwise"])
@pytest.mark.parametrize("how", [{}, {"chunk": 192}, {"tile": 192}], ids=["whole", "chunks", "tiles"])
def test_latent_attention(policy: str, how: dict[str, Any]) -> None:
    sizes: dict[str, Any] = SIZES | {"num_key_value_heads": 8, "q_lora_rank": None, "first_k_dense_replace": 3}
    sizes |= {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
    sizes |= {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    check_plan(made(DeepseekV3Config(**sizes)), policy, TILED_MARGIN, **how)


def without_attention(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """The output of an attention in its memory layout, without its arithmetic, which the meta device would expand."""
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]), None


AttentionInterface.register("nothing", without_attention)
AttentionMaskInterface.register("nothing", lambda **kwargs: None)


@pytest.mark.parametrize("name", SHIPPED)
def test_activations_of_shipped_sizes(name: str) -> None:
    """The forward of transformers at the sizes of a real model; two layers, since a third one adds nothing."""
    config = config_of(name)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = 2
    if getattr(text, "layer_types", None):
        text.layer_types = ["full_attention"] * 2
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="nothing")
        ids = torch.zeros(2, 4096, dtype=torch.int64)
    with torch.no_grad(), Alive(model.eval()) as watch:
        model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, logits_to_keep=1)
    shape = describe(config, torch.bfloat16)
    plan = kvpolicy.plan(config, "full", prompt=4096, batch=2, dtype=torch.bfloat16)
    assert plan.prefill is not None
    prefill: Prefill = plan.prefill._replace(windows=())
    planned = prefill.stock_activation_bytes(2)
    assert dataclasses.replace(plan, prefill=prefill).activation_nbytes >= planned
    assert shape.widths == prefill.widths
    assert watch.peak <= planned + 2 * 4096 * shape.shape.token_nbytes
    assert planned <= SIZE_MARGIN * watch.peak
