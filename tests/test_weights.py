"""Weights per rank: counted by hand, in published sizes, and as transformers divides them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, MixtralConfig, OPTConfig

import kvpolicy
from kvpolicy import weights_per_rank
from kvpolicy.hf.embedded import config_of, shipped_config
from tests.conformance.models import UNNAMED

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 10,
}
LLAMA = LlamaConfig(**TINY, num_key_value_heads=2)
MLA = UNNAMED["deepseek_v2"]()
EMBEDDING = 10 * 32
NORM = 32
ATTENTION = 32 * 32 + 2 * 16 * 32 + 32 * 32
MLP = 3 * 32 * 48


def held(config: Any, tp: int, backend: str) -> tuple[int, int]:
    """Numbers that are whole on every rank, and those that are divided."""
    found = weights_per_rank(config, tp=tp, backend=backend, dtype=torch.float32)
    return found.replicated // 4, found.sharded // 4


def test_llama_by_hand() -> None:
    layers = 2 * (ATTENTION + MLP)
    assert held(LLAMA, 2, "hf") == (5 * NORM, EMBEDDING + layers // 2)
    assert held(LLAMA, 2, "deepspeed") == (5 * NORM + EMBEDDING, EMBEDDING // 2 + layers // 2)
    assert held(LLAMA, 1, "hf") == held(LLAMA, 1, "deepspeed") == (5 * NORM + 2 * EMBEDDING + layers, 0)


def test_kv_heads_fewer_than_ranks_are_repeated() -> None:
    again = 2 * 2 * 16 * 32  # two ranks hold each, in two layers
    whole, divided = held(LLAMA, 4, "deepspeed")
    assert (whole, divided) == (5 * NORM + EMBEDDING, (EMBEDDING + 2 * (ATTENTION + MLP) + again) // 4)


def test_the_fullest_rank_of_uneven_heads() -> None:
    odd: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    config = LlamaConfig(**TINY | odd)
    attention = 2 * 48 * 48 + 2 * 24 * 48
    mlp = 3 * 48 * 48
    assert held(config, 2, "deepspeed")[1] == 2 * (attention * 2 // 3 + mlp // 2) + 10 * 48 // 2


def test_a_tied_head_is_a_copy_under_autotp_alone() -> None:
    config = LlamaConfig(**TINY, num_key_value_heads=2, tie_word_embeddings=True)
    layers = ATTENTION + MLP
    assert held(config, 2, "deepspeed") == (5 * NORM + EMBEDDING, EMBEDDING // 2 + layers)
    assert held(config, 2, "hf") == (5 * NORM, EMBEDDING // 2 + layers)
    assert held(config, 1, "hf") == (5 * NORM + EMBEDDING + 2 * layers, 0)


def test_experts_are_divided_and_routers_are_not() -> None:
    config = MixtralConfig(**TINY, num_key_value_heads=2, num_local_experts=3)
    whole = 5 * NORM + 2 * 3 * 32
    divided = ATTENTION + 3 * MLP
    assert held(config, 2, "hf") == (whole, EMBEDDING + divided)
    assert held(config, 2, "deepspeed") == (whole + EMBEDDING, EMBEDDING // 2 + divided)


def test_biases_behind_a_sum_are_whole() -> None:
    config = GPTNeoXConfig(**TINY)
    matrices = 3 * 32 * 32 + 32 * 32 + 2 * 32 * 48
    cut = 3 * 32 + 48
    norms = 5 * 2 * 32
    added = 2 * 2 * 32
    assert held(config, 2, "deepspeed") == (EMBEDDING + norms + added, EMBEDDING // 2 + matrices + cut)
    # Its plan says so; from transformers 5.24 on, it divides the embedding too.
    divides = "embed_in" in (config.base_model_tp_plan or {})
    whole, parts = (0, 2) if divides else (EMBEDDING, 1)
    assert held(config, 2, "hf") == (whole + norms + added, parts * EMBEDDING // 2 + matrices + cut)


@pytest.mark.parametrize(
    ("name", "backend", "gigabytes"),
    [
        ("llama-3-70b", "deepspeed", [71.6, 36.9, 19.5]),
        ("mixtral-8x7b", "deepspeed", [46.8, 23.5, 11.9]),
        ("llama-2-70b", "deepspeed", [69.2, 34.9, 17.7]),
    ],
)
def test_large_models(name: str, backend: str, gigabytes: list[float]) -> None:
    config = shipped_config(name)  # of whose parameters tests/test_shipped.py tests the number
    sizes = [weights_per_rank(config, tp=tp, backend=backend, dtype=torch.bfloat16) for tp in (2, 4, 8)]
    assert [round(size.nbytes / 1e9, 1) for size in sizes] == gigabytes


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The first of some ranks that are not there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield init_device_mesh("cpu", (request.param,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 8], indirect=True)
@pytest.mark.parametrize("name", ["llama-2-70b", "llama-3-70b", "mixtral-8x7b"])
def test_hf_is_what_transformers_divides(name: str, ranks: Any) -> None:
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    config = copy.deepcopy(config_of(name))
    config.num_hidden_layers = 3
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    apply_tensor_parallelism(model, ranks, model._resolve_parallel_plans(DistributedConfig(tp_size=ranks.size()))[0])
    local = sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in model.parameters())
    assert weights_per_rank(config, tp=ranks.size(), backend="hf", dtype=torch.bfloat16).nbytes == local


def test_weights_take_their_place_before_the_cache() -> None:
    config = config_of("llama-3-70b")
    sizes: dict[str, Any] = {"prompt": 4096, "new": 1024, "dtype": torch.bfloat16, "tp": 8}
    alone = kvpolicy.plan(config, "window@0.2", **sizes)
    beside = kvpolicy.plan(config, "window@0.2", **sizes, backend="hf")
    assert beside.weights is not None
    assert alone.weights is None
    left = 80 * 10**9 - beside.weights.nbytes
    assert beside.largest_batch(80 * 10**9) == alone.largest_batch(left) > 0
    assert beside.full_largest_batch(80 * 10**9) == alone.full_largest_batch(left) > 0
    assert beside.largest_batch(10**9) == beside.full_largest_batch(10**9) == 0
    assert "weights on each of 8 ranks by hf: 16.4 GiB" in str(beside)


@pytest.mark.parametrize(
    ("config", "words", "told"),
    [
        (LLAMA, {"tp": 0}, "tp must be between 1 and .*, got 0"),
        (LLAMA, {"backend": "nccl"}, "backend must be deepspeed or hf, got 'nccl'"),
        (LLAMA, {"tp": 4, "backend": "hf"}, "must divide the 2 KV heads .*, got 4; try backend='deepspeed'"),
        (LLAMA, {"tp": 8, "backend": "hf"}, "must divide the 2 KV heads .*, got 8; deepspeed cannot shard it either"),
        (LLAMA, {"tp": 8}, "at most 4, the number of query heads, got 8"),
        (OPTConfig(vocab_size=10), {"tp": 2, "backend": "hf"}, "got none for opt; try backend='deepspeed'"),
        (MLA, {"tp": 3, "backend": "hf"}, "must divide the 4 query heads .*, got 3; deepspeed cannot shard it either"),
    ],
)
def test_refused(config: Any, words: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        weights_per_rank(config, **words)
