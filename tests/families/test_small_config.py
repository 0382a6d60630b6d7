"""Small configs and models: what the rules for the names of fields give."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from kvpolicy_eval.families import small_model
from kvpolicy_eval.families.entries import CAUSAL, IMAGE, Entry
from kvpolicy_eval.families.sizes import HEADS, HIDDEN, KV_HEADS, LAYERS, VOCABULARY, WINDOW
from kvpolicy_eval.families.small_config import small_config
from kvpolicy_eval.families.small_model import build


def test_sizes_go_by_the_names_of_fields() -> None:
    config = small_config(transformers.LlamaConfig)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (HIDDEN, LAYERS, VOCABULARY)
    assert (config.num_attention_heads, config.num_key_value_heads) == (HEADS, KV_HEADS)
    assert small_config(transformers.GPT2Config).n_inner is None, "None means something"
    assert small_config(transformers.DeepseekV3Config).num_key_value_heads == HEADS


def test_some_layers_have_full_attention() -> None:
    mixed = small_config(transformers.Gemma3TextConfig)
    assert mixed.layer_types == ["sliding_attention", "full_attention"] * 2 and mixed.sliding_window == WINDOW
    assert small_config(transformers.MistralConfig).sliding_window is None


def test_given_fields_count_also_in_a_part() -> None:
    config = small_config(
        transformers.Gemma3Config, {"text_config": {"num_hidden_layers": 2}, "tie_word_embeddings": False}
    )
    assert config.text_config.num_hidden_layers == 2 and config.text_config.hidden_size == HIDDEN
    assert config.vision_config.hidden_size == HIDDEN and config.tie_word_embeddings is False


def test_special_tokens_differ() -> None:
    config = small_config(transformers.Qwen2VLConfig)
    tokens = [config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id]
    assert len(set(tokens)) == 4 and all(100 < token < VOCABULARY for token in tokens)


def test_a_model_is_drawn_from_a_fixed_seed_and_sharpened() -> None:
    model = build(Entry(CAUSAL, "llama"))
    again = build(Entry(CAUSAL, "llama"))
    first, second = (dict(one.named_parameters()) for one in (model, again))
    assert all(torch.equal(first[name], second[name]) for name in first)
    layer = "model.layers.0.self_attn."
    queries, keys = (first[f"{layer}{name}.weight"].std() for name in ("q_proj", "k_proj"))
    assert 1.8 < queries / keys < 2.2
    assert model.dtype == torch.float32 and not model.training


def test_a_text_class_takes_the_text_part_of_a_config() -> None:
    entry = Entry(CAUSAL, "llama4")
    assert small_model.model_class(entry).__name__ == type(build(entry)).__name__ == "Llama4ForCausalLM"


def test_a_large_model_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_model, "LIMIT", 1000)
    with pytest.raises(ValueError, match=r"at most 1,000 parameters, got [\d,]+, most of them in "):
        build(Entry(IMAGE, "qwen2_vl"))
