"""Which engines load documents, and which documents fit an engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import kvpolicy
from kvpolicy import KVPolicyError
from kvpolicy_vllm import prompt, read_document
from kvpolicy_vllm.documents import Document
from kvpolicy_vllm.engine import Engine, sampled
from tests.conformance.models import build
from tests.vllm.models import LLAMA3, ROPE, Saved, config_of, engine_config, make_model, make_text, save


def vllm_config(saved: Saved, **fields: Any) -> Any:
    """The config of an engine of the saved model."""
    found = engine_config(saved.model, None, **fields)
    if "model_config" not in fields:
        found.model_config.model = str(saved.folder / "model")
        found.model_config.max_model_len = 256
    return found


def test_an_engine_is_described(saved: Saved) -> None:
    found = Engine.of(vllm_config(saved))
    assert (found.source, found.max_len, found.revision) == (str(saved.folder / "model"), 256, None)
    found.check(read_document(saved.path), 10)
    Engine.of(vllm_config(saved, kv_transfer_config=None))
    Engine.of(vllm_config(saved, speculative_config=SimpleNamespace(method="ngram")))
    Engine.of(vllm_config(saved, aux_output_config=SimpleNamespace(enabled=False)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"kv_transfer_config": SimpleNamespace(kv_load_failure_policy="recompute")},
            "kv_load_failure_policy must be 'fail', got 'recompute': a document that",
        ),
        (
            {"model_config": SimpleNamespace(use_mla=True)},
            r"must cache keys and values, got one that caches latent vectors \(MLA\)",
        ),
        (
            {"parallel_config": SimpleNamespace(decode_context_parallel_size=2, prefill_context_parallel_size=1)},
            "decode_context_parallel_size must be 1 for documents, got 2; try tensor parallelism",
        ),
        (
            {"parallel_config": SimpleNamespace(prefill_context_parallel_size=4)},
            "prefill_context_parallel_size must be 1 for documents, got 4",
        ),
        (
            {"speculative_config": SimpleNamespace(method="eagle")},
            "Speculative decoding must be by n-grams beside documents, got 'eagle', whose drafter has a cache",
        ),
        (
            {"aux_output_config": SimpleNamespace(enabled=True)},
            "--enable-return-routed-experts must be off for documents and compressed prompts, got it on",
        ),
    ],
)
def test_engines_that_are_refused(saved: Saved, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        Engine.of(vllm_config(saved, **fields))


def rotary(name: str, **rope: Any) -> Any:
    """A config of transformers with a rotary embedding."""
    return getattr(transformers, name)(hidden_size=64, num_attention_heads=4, rope_parameters=ROPE | rope)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: build("gemma2").config, "must have full attention, got gemma2 with layers of a sliding window"),
        (lambda: build("gpt2").config, "must be rotary embeddings for its saved caches to be moved, got gpt2"),
        (lambda: rotary("LlamaConfig", rope_type="dynamic", factor=2.0), "dynamic.* cannot be undone"),
        (
            lambda: rotary("Qwen2Config", mrope_section=[2, 3, 3]),
            r"Positions must be single numbers, got those of qwen2, which have several parts \(M-RoPE\)",
        ),
    ],
    ids=["sliding windows", "learned positions", "dynamic", "several parts"],
)
def test_models_that_are_refused(config: Any, message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        Engine(config(), "nowhere", 256).check_model()


def changed(saved: Saved, **fields: Any) -> Document:
    """The document, with other fields of its model."""
    found = read_document(saved.path)
    return dataclasses.replace(found, model={**found.model, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"type": "qwen2"}, "must be of a model of type llama, got qwen2; make the document with the model"),
        ({"layers": 7}, "made for another model .* with 7 layers instead of 3"),
        ({"heads": 4}, "with 4 KV heads instead of 2"),
        ({"head_dim": 64}, "with a head dimension of 64 instead of 32"),
        ({"weights": [1.0] * 64}, "whose weights differ"),
        ({"rope": LLAMA3 | {"factor": 8.0}}, "must be for the rotary embedding .*, got .*'factor': 8.0"),
        ({"rope": None}, "must be for the rotary embedding .*, got None"),
    ],
)
def test_documents_of_other_models_are_refused(saved: Saved, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        saved.engine.check(changed(saved, **fields), 5)


def test_other_weights_of_the_same_shape_are_refused(saved: Saved, tmp_path: Path) -> None:
    other = make_model("llama3", seed=1)
    path = save(other, "keydiff@0.5", make_text(other, 40), tmp_path / "other.safetensors")
    with pytest.raises(KVPolicyError, match=r"whose weights differ\); make the document with the model that is served"):
        saved.engine.check(read_document(path), 5)


def test_fields_of_the_rotary_embedding_that_are_not_set_are_no_difference(saved: Saved) -> None:
    saved.engine.check(changed(saved, rope=LLAMA3 | {"partial_rotary_factor": None}), 5)


def test_a_question_must_fit_the_engine_and_the_trained_positions(saved: Saved) -> None:
    found = read_document(saved.path)
    saved.engine.check(found, 256 - 35 - 1)
    with pytest.raises(KVPolicyError, match=r"fewer than 256 tokens, .* got 35 kept tokens and 221; try"):
        saved.engine.check(found, 256 - 35)
    long = Engine(saved.model.config, saved.engine.source, 10**6)
    long.check(found, 1024 - 70)
    with pytest.raises(KVPolicyError, match=r"into the 1,024 positions .* got 70 and 955; try a shorter document"):
        long.check(found, 1024 - 70 + 1)


def test_documents_of_another_precision_are_of_the_same_model(saved: Saved, tmp_path: Path) -> None:
    """The weights are compared as the model of the document had them."""
    half = make_model("llama3", dtype=torch.bfloat16)
    path = save(half, "keydiff@0.5", make_text(half, 40), tmp_path / "half.safetensors")
    assert read_document(path).dtype == "bfloat16"
    saved.engine.check(read_document(path), 5)


def test_prompt_checks_the_engine_of_an_llm(saved: Saved) -> None:
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=vllm_config(saved)))
    assert len(prompt(saved.path, [5, 6], llm)[0]["prompt_token_ids"]) == 37
    with pytest.raises(KVPolicyError, match="fewer than 256 tokens"):
        prompt(saved.path, [5] * 230, llm)


def test_weights_are_sampled_from_every_shape_of_checkpoint(saved: Saved, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    whole = sampled(str(saved.folder / "model"), None, name)
    saved.model.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    shards = sampled(str(tmp_path / "shards"), None, name)
    assert whole is not None and shards is not None and torch.equal(whole, shards)
    assert sampled(str(saved.folder / "model"), None, "missing") is None
    assert sampled(str(tmp_path), None, name) is None


def test_a_model_whose_weights_cannot_be_read_is_told_by_its_shape(saved: Saved, tmp_path: Path) -> None:
    Engine(saved.model.config, str(tmp_path), 256).check(read_document(saved.path), 5)


def test_the_embedded_models_are_told_apart(tmp_path: Path) -> None:
    """One is the other, trained on."""
    small, large = (kvpolicy.tiny(name=name) for name in ("tiny", "tiny-4k"))
    large[0].save_pretrained(tmp_path / "model")
    path = save(small[0], "keydiff@0.5", [*range(3, 43)], tmp_path / "d.safetensors")
    with pytest.raises(KVPolicyError, match="whose weights differ"):
        Engine(large[0].config, str(tmp_path / "model"), 512).check(read_document(path), 5)


def test_configs_are_not_changed() -> None:
    config = config_of("stablelm")
    before = config.to_dict()
    Engine(config, "nowhere", 256).check_model()
    assert config.to_dict() == before
