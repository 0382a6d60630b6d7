"""Small checkpoints of several files, the output of their whole models, and the comparison with that of a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import kvpolicy
from tests.conformance.models import FAMILIES, VOCABULARY, _make

NEW = 4
LAYERS = 2
MORE: dict[str, Any] = {
    "four experts": _make("Mixtral", sliding_window=None, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": _make(
        "Qwen2Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24
    ),
    "qwen3_moe": _make("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8),
    "tied": _make("Llama", tie_word_embeddings=True),
    "biases": _make("Llama", attention_bias=True, mlp_bias=True),
    "one head": _make("Llama", num_key_value_heads=1),
    "three heads": _make("Llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=3, intermediate_size=51),
    "no head": _make("Llama", hidden_size=24, num_attention_heads=3, num_key_value_heads=1, head_dim=8),
    "odd": _make("Llama", vocab_size=51, intermediate_size=45),
    "old opt": _make(
        "OPT",
        "num_key_value_heads",
        "intermediate_size",
        ffn_dim=48,
        word_embed_proj_dim=16,
        do_layer_norm_before=False,
        enable_bias=False,
    ),
}
"""Variants that the families of the conformance tests do not cover."""


def make(name: str) -> Any:
    """A whole model with random weights of a fixed seed; swapping two heads changes its logits by more than 0.01."""
    torch.manual_seed(sum(map(ord, name)))
    config: Any = (MORE.get(name) or FAMILIES[name])()
    config.num_hidden_layers = LAYERS  # fewer than elsewhere: every rank loads and runs each model several times
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:LAYERS]
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1) / 2, std=0.2)
    return model.eval()


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> str:
    """Save a model in several files, with a prompt and the output of the whole model for it."""
    model = make(name).to(dtype)
    model.generation_config.repetition_penalty = 1.5  # changes tokens, so that a test fails if it is not loaded
    where = folder / name.replace(" ", "_")
    model.save_pretrained(where, max_shard_size="20KB")
    assert len(list(where.glob("model*.safetensors"))) > 1
    prompt = torch.randint(3, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(0))
    save_file({"prompt": prompt, **answer(model, prompt)}, where / "answer.safetensors")
    return str(where)


@torch.no_grad()
def answer(model: Any, prompt: Tensor) -> dict[str, Tensor]:
    """The logits of a model for a prompt, and the tokens that it generates with the stock cache and under a policy."""
    found = {"logits": model(prompt).logits.float(), "tokens": _tokens(model, prompt)}
    with kvpolicy.attach(model, "h2o+kivi:bits=8@0.6"):
        return found | {"tokens of a policy": _tokens(model, prompt)}


def _tokens(model: Any, prompt: Tensor) -> Tensor:
    tokens = model.generate(prompt, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    return tokens[:, prompt.shape[1] :].contiguous()


def compare(folder: str, model: Any) -> tuple[float, bool]:
    """The largest difference from the logits of the whole model, and whether the generated tokens are equal."""
    want = load_file(Path(folder) / "answer.safetensors")
    got = answer(model, want["prompt"])
    same = all(torch.equal(got[name], want[name]) for name in got if name != "logits")
    return float((got["logits"] - want["logits"]).abs().max()), same


NAMED = [name for name in FAMILIES if not name.startswith("gemma")]

NOT_BY_TRANSFORMERS = {"one head", "three heads", "no head", "opt", "old opt"} | {
    name for name in NAMED if name.startswith("falcon")
}
"""What the tensor parallelism of transformers does not shard correctly, so that it is refused."""
