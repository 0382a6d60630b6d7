"""What two ranks really hold of scaled-down large models is what `plan` said, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("deepspeed")

import kvpolicy
from tests.engine.live import stored_bytes
from tests.parallel.ranks import run_ranks

PROMPT = 40
NEW = 5
ROWS = 2
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "vocab_size": 128,
}
KEPT: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
CASES: list[tuple[str, str, str]] = [
    ("llama-3-70b", "deepspeed", "kvcrush/h2o+kivi:bits=4:group_size=8:residual_length=8@0.5"),
    ("llama-3-70b", "hf", "snapkv:window=8@0.5"),
    ("mixtral-8x7b", "deepspeed", "pyramid+snapkv:window=8@0.5"),
    ("mixtral-8x7b", "hf", "kvcrush/h2o+kivi:bits=4:group_size=8:residual_length=8@0.5"),
    ("tied", "deepspeed", "full"),
    ("tied", "hf", "full"),
    ("uneven", "deepspeed", "h2o@0.5"),
    ("one head", "deepspeed", "h2o@20KB"),
    ("biased", "deepspeed", "window@0.5"),
    ("biased", "hf", "window@0.5"),
    ("fused", "deepspeed", "window@0.5"),
    ("shared", "deepspeed", "window@0.5"),
    ("shared", "hf", "window@0.5"),
    ("other names", "deepspeed", "window@0.5"),
]


def config(name: str) -> Any:
    """A shipped config, or one of another structure, with small numbers."""
    from transformers import GPTNeoXConfig, LlamaConfig, OPTConfig, Phi3Config, Qwen2MoeConfig

    from kvpolicy.hf.embedded import config_of

    if name in ("llama-3-70b", "mixtral-8x7b"):
        found = config_of(name)
        for key, value in (SMALL | KEPT).items():
            setattr(found, key, value)
        return found
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    odd: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3}
    makers: dict[str, Callable[[], Any]] = {
        "tied": lambda: LlamaConfig(**SMALL, num_key_value_heads=4, tie_word_embeddings=True),
        "uneven": lambda: LlamaConfig(**SMALL | odd),
        "one head": lambda: LlamaConfig(**SMALL, num_key_value_heads=1),
        "biased": lambda: GPTNeoXConfig(**SMALL),
        "fused": lambda: Phi3Config(**SMALL, num_key_value_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2),
        "shared": lambda: Qwen2MoeConfig(**SMALL | experts, num_key_value_heads=4, shared_expert_intermediate_size=64),
        "other names": lambda: OPTConfig(
            hidden_size=64,
            ffn_dim=96,
            num_hidden_layers=2,
            num_attention_heads=8,
            vocab_size=128,
            word_embed_proj_dim=64,
        ),
    }
    return makers[name]()


def _hold(rank: int, world: int, folder: str, cases: list[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """Load every case on a rank and run it; what the rank then holds."""
    from torch.distributed.tensor import DTensor

    from kvpolicy_deepspeed import load

    found: list[dict[str, Any]] = []
    for name, backend, policy in cases:
        model = load(Path(folder) / name, backend=backend, dtype=torch.float32)  # pyright: ignore[reportArgumentType]
        local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        with torch.no_grad(), kvpolicy.attach(model, policy):
            cache = kvpolicy.PolicyCache(model, new=NEW)
            ids = torch.arange(ROWS * PROMPT).view(ROWS, PROMPT) % 100
            for step in (ids, *ids[:, :NEW].split(1, dim=1)):
                model(step, cache=cache, logits_to_keep=1)
        assert cache.plan is not None
        assert stored_bytes(cache) == cache.nbytes == cache.plan.nbytes
        found.append({"weights": sum(p.nbytes for p in local), "kinds": cache.plan.by_kind(), "nbytes": cache.nbytes})
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """What each of two ranks holds, case by case."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("checkpoints")
    for name in sorted({name for name, *_ in CASES}):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config(name)).float().save_pretrained(folder / name)
    return run_ranks(_hold, 2, str(folder), CASES)


@pytest.mark.parametrize("index", range(len(CASES)), ids=["-".join(case[:2]) for case in CASES])
def test_two_ranks_hold_what_was_planned(index: int, ranks: list[list[dict[str, Any]]]) -> None:
    name, backend, policy = CASES[index]
    plan = kvpolicy.plan(
        config(name), policy, batch=ROWS, prompt=PROMPT, new=NEW, dtype=torch.float32, tp=2, backend=backend
    )
    assert plan.weights is not None
    first, second = (rank[index] for rank in ranks)
    assert plan.weights.nbytes == max(first["weights"], second["weights"])
    assert plan.nbytes == max(first["nbytes"], second["nbytes"])
    assert plan.by_kind() == max(first, second, key=lambda held: held["nbytes"])["kinds"]
    if name != "uneven":
        assert first == second
