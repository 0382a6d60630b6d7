"""Small models in folders, engines that serve them, and what kvpolicy itself answers about documents of theirs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy_vllm.engine import Engine

VOCABULARY = 64
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
"""Weights that are larger than usual, so that tokens far away matter."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", {"hidden_size": 128, "rope_parameters": ROPE}),
    "llama3": ("LlamaConfig", {"head_dim": 32, "rope_parameters": LLAMA3}),
    "stablelm": ("StableLmConfig", {"hidden_size": 128, "rope_parameters": ROPE | {"partial_rotary_factor": 0.25}}),
    "one head": ("LlamaConfig", {"head_dim": 32, "num_key_value_heads": 1, "rope_parameters": ROPE}),
    "glm": ("GlmConfig", {"head_dim": 32, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}),
}
"""A config class of transformers and its fields, of random models."""

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
WIDE: dict[str, Any] = {"hidden_size": 128, "rope_parameters": ROPE}

MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn": ("LlamaConfig", {"head_dim": 32, "rope_parameters": YARN}),
    "linear": ("LlamaConfig", {"head_dim": 32, "rope_parameters": LINEAR}),
    "mistral": ("MistralConfig", {"head_dim": 32, "rope_parameters": ROPE, "sliding_window": None}),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "rope_parameters": ROPE}),
    "phi3": ("Phi3Config", WIDE),
    "olmo2": ("Olmo2Config", WIDE),
    "granite": ("GraniteConfig", WIDE | {"attention_multiplier": 0.2, "residual_multiplier": 0.5}),
    "smollm3": ("SmolLM3Config", WIDE | {"no_rope_layers": [1, 0, 1]}),
    "cohere": ("CohereConfig", WIDE | {"tie_word_embeddings": True}),
    "starcoder2": ("Starcoder2Config", WIDE | {"sliding_window": None}),
    "qwen3 moe": (
        "Qwen3MoeConfig",
        {"head_dim": 32, "rope_parameters": ROPE, "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 64},
    ),
}
"""More of them, whose answers are compared for policies without a codec."""

POLICY = "kvzip:decode=grow@0.5"
LONG = 48
"""Tokens of long answers, which need more blocks while they grow."""

EMBEDDED = ("tiny", "tiny-4k")
RECORDS = ["tiger", "lion", "wolf", "sheep", "iron", "gold", "fish", "bird"]


class Answer(NamedTuple):
    """Generated tokens and the log probability of each."""

    tokens: list[int]
    logprobs: list[float]


class Served(NamedTuple):
    """A model and documents of it, with what kvpolicy answers about each.

    Attributes:
        folder: With the model in `model`.
        model: The model.
        asked: Documents and questions.
        wanted: Their answers.
    """

    folder: Path
    model: Any
    asked: list[tuple[Path, list[int]]]
    wanted: list[Answer]


class Saved(NamedTuple):
    """A random model and a document of it, for what needs no engine of vLLM.

    Attributes:
        folder: With the model in `model`.
        model: The model.
        engine: What the connector knows of an engine that serves it.
        path: The document, which keeps half of its text.
        text: The token ids of its text.
    """

    folder: Path
    model: Any
    engine: Engine
    path: Path
    text: list[int]


def config_of(family: str) -> Any:
    name, fields = (FAMILIES | MORE)[family]
    return getattr(transformers, name)(**(SIZES | fields))


def make_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """An embedded model, or a random one of a family."""
    if family in EMBEDDED:
        return kvpolicy.tiny(dtype, name="tiny" if family == "tiny" else "tiny-4k")[0]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = transformers.AutoModelForCausalLM.from_config(config_of(family))
        # Biases and the scales of norms are ones and zeros in a new model, which a wrong one would not be told from.
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith("bias"):
                    weight.normal_(std=0.2)
    return model.to(dtype).eval()


def engine_config(model: Any, folder: Path | None, **changes: Any) -> Any:
    """The config of an engine of vLLM that serves an embedded model, as far as documents need it."""
    extra: dict[str, Any] = {} if folder is None else {"folder": str(folder)}
    source = str(files("kvpolicy") / "assets" / "tiny")
    served: dict[str, Any] = {"hf_config": model.config, "max_model_len": 1024, "use_mla": False}
    served |= {"model": source, "revision": None, "trust_remote_code": False}
    served |= {"tokenizer": source, "tokenizer_revision": None}
    found: dict[str, Any] = {
        "model_config": SimpleNamespace(**served),
        "kv_transfer_config": SimpleNamespace(
            kv_connector="KVPolicyConnector",
            kv_load_failure_policy="fail",
            get_from_extra_config=lambda name, default: extra.get(name, default),
        ),
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        "speculative_config": None,
    }
    return SimpleNamespace(**(found | changes))


def records(times: int = 6, first: int = 1000) -> str:
    """Records that the embedded models can recall."""
    return "".join(f"{word}={number}\n" for number, word in enumerate(RECORDS * times, first))


def make_text(model: Any, tokens: int, seed: int = 0) -> list[int]:
    """Token ids of a text: records of an embedded model, anything for a random one."""
    if model.config.vocab_size <= VOCABULARY:
        return torch.randint(
            3, model.config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(seed)
        ).tolist()
    tokenizer: Any = kvpolicy.tiny()[1]
    return tokenizer(records(tokens // 16, 1000 + 100 * seed)).input_ids[:tokens]


def make_question(model: Any, record: str = "wolf", tokens: int = 5) -> list[int]:
    if model.config.vocab_size <= VOCABULARY:
        return make_text(model, tokens, seed=100 + RECORDS.index(record))
    tokenizer: Any = kvpolicy.tiny()[1]
    return tokenizer(f"?{record}=", add_special_tokens=False).input_ids


def save(model: Any, policy: str, ids: Sequence[int], path: Path) -> Path:
    """Make a document."""
    text = torch.tensor([[*ids]])
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = PolicyCache(model)
        model(text, cache=cache)
        cache.save(path, tokens=text)
    return path


def save_text(pair: tuple[Any, Any], text: str, policy: str, path: Path) -> Path:
    """Make a document of a text, with a model and its tokenizer."""
    model, tokenizer = pair
    return save(model, policy, tokenizer(text).input_ids, path)


def answer(model: Any, policy: str | None, path: Path | None, question: Sequence[int], tokens: int = 8) -> Answer:
    """What kvpolicy answers under the policy of a document, token by token; without a document, what the model does."""
    if policy is None or path is None:
        with torch.no_grad():
            return _go_on(model, transformers.DynamicCache(), question, 0, tokens)
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = PolicyCache.load(model, path)
        return _go_on(model, cache, question, cache.get_seq_length(), tokens)


def answer_of_decoded(model: Any, policy: str, path: Path, question: Sequence[int], tokens: int = 8) -> Answer:
    """The same, where codes are decoded once, and what comes behind them is not coded, as in any other engine."""
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = PolicyCache.load(model, path)
        layers = [tuple(t[None] for t in held(layer)[:2]) for layer in cache.policy_layers]
        seen = cache.get_seq_length()
    with torch.no_grad():
        return _go_on(model, transformers.DynamicCache(layers), question, seen, tokens)


def close(found: Sequence[Answer], wanted: Sequence[Answer]) -> bool:
    """Whether tokens are the same, and their log probabilities up to rounding."""
    assert [each.tokens for each in found] == [each.tokens for each in wanted]
    return all(
        each.logprobs == pytest.approx(other.logprobs, abs=2e-3) for each, other in zip(found, wanted, strict=True)
    )


def short(found: Sequence[Answer], tokens: int = 8) -> list[list[int]]:
    """The first tokens of answers."""
    return [each.tokens[:tokens] for each in found]


def held(layer: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Keys [H, n, D], values [H, n, D] and positions [H, n] of a layer of a cache, collected slot by slot."""
    past: Any = layer.store.past()
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for head, places in enumerate(layer.store.tensors.positions[0]):
        taken = [slot for slot, place in enumerate(places.tolist()) if place >= 0]
        found.append((past.keys[0, head, taken], past.values[0, head, taken], places[taken]))
    keys, values, positions = zip(*found, strict=True)
    return torch.stack(keys), torch.stack(values), torch.stack(positions)


def _go_on(model: Any, cache: Any, question: Sequence[int], seen: int, tokens: int) -> Answer:
    places = itertools.count(seen)

    def step(token: int) -> Tensor:
        at = torch.tensor([[next(places)]])
        logits: Tensor = model(torch.tensor([[token]]), position_ids=at, **cache_argument(model, cache)).logits
        return logits[0, -1].float().log_softmax(-1)

    scores = [step(token) for token in question][-1]
    found = Answer([], [])
    for _ in range(tokens):
        best = int(scores.argmax())
        found.tokens.append(best)
        found.logprobs.append(float(scores[best]))
        scores = step(best)
    return found
