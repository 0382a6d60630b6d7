"""Families whose models call their decoder in ways of their own: they run as without a policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

import kvpolicy
from kvpolicy import KVPolicyError, PolicyCache
from kvpolicy.hf.cache_names import cache_argument, output_cache
from tests.conformance.models import VOCABULARY
from tests.robust.hostile import drawn, made

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def ids(count: int = 20) -> Tensor:
    return torch.randint(3, 40, (1, count), generator=torch.Generator().manual_seed(1))


def test_the_decoder_knows_its_last_position() -> None:
    """The whole config of BLIP-2 does not."""
    config = transformers.Blip2Config(
        vision_config=SMALL | {"image_size": 28, "patch_size": 14},
        qformer_config=SMALL | {"encoder_hidden_size": 16, "vocab_size": VOCABULARY},
        text_config=TEXT
        | {"model_type": "opt", "ffn_dim": 32, "word_embed_proj_dim": 32, "max_position_embeddings": 30},
        num_query_tokens=4,
        image_token_index=47,
    )
    model = drawn("Blip2ForConditionalGeneration", config)
    tokens = torch.cat([torch.full((1, 4), 47), ids(16)], 1)
    given: dict[str, Any] = {"input_ids": tokens, "pixel_values": torch.randn(1, 3, 28, 28), "do_sample": False}
    want = model.generate(**given, max_new_tokens=5, min_new_tokens=5)
    with kvpolicy.attach(model, "full") as handle:
        assert torch.equal(model.generate(**given, max_new_tokens=5, min_new_tokens=5), want)
        assert handle.cache is not None and handle.cache.get_seq_length() == 24
        with pytest.raises(KVPolicyError, match=r"Positions must be below 30, .* got 30"):
            model.generate(**given, max_new_tokens=12, min_new_tokens=12)


@pytest.mark.parametrize(
    ("name", "config"), [("RoCBertForCausalLM", "RoCBertConfig"), ("BertLMHeadModel", "BertConfig")]
)
def test_a_cache_for_two_kinds_of_attention(name: str, config: str) -> None:
    """RoCBert makes one although it has one kind alone; given to the model, it is taken like any empty cache."""
    model = made(name, config, is_decoder=True)
    with torch.no_grad():
        whole = model(torch.cat([ids(), ids(1)], 1)).logits
        with kvpolicy.attach(model, "full") as handle:
            out = model(ids())
            cache = output_cache(out)
            assert isinstance(cache, PolicyCache) and cache is handle.cache
            assert torch.allclose(out.logits, whole[:, :-1], atol=1e-4)
            step = model(ids(1), **cache_argument(model, cache)).logits
            assert torch.allclose(step, whole[:, -1:], atol=1e-4)
            both = EncoderDecoderCache(DynamicCache(), DynamicCache())
            again = model(ids(), **cache_argument(model, both)).logits
            assert torch.allclose(again, whole[:, :-1], atol=1e-4)
            step = model(ids(1), **cache_argument(model, both)).logits
            assert torch.allclose(step, whole[:, -1:], atol=1e-4)


def gemma(shared: int = 0) -> Any:
    text: dict[str, Any] = {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 8,
        "intermediate_size": 48,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * (1 + shared // 2),
        "num_hidden_layers": 2 + shared,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 48,
        "use_bidirectional_attention": "vision",
        "num_kv_shared_layers": shared,
    }
    tokens: dict[str, Any] = {"image_token_id": 41, "video_token_id": 42, "audio_token_id": 43}
    config = transformers.Gemma4UnifiedConfig(text_config=TEXT | text, **tokens)
    return drawn("Gemma4UnifiedForConditionalGeneration", config)


def test_text_beside_pictures_is_causal() -> None:
    """Gemma-4's unified model passes blocks of pictures with every text; a text has none."""
    model = gemma()
    tokens = ids(24)
    blocks = (torch.arange(24) < 6).long()[None]
    refused = pytest.raises(KVPolicyError, match="whole picture must be in the first forward")
    with torch.no_grad():
        want = model(tokens).logits
        with kvpolicy.attach(model, "full"):
            assert torch.allclose(model(tokens).logits, want, atol=1e-4)
            got = model.generate(tokens, do_sample=False, max_new_tokens=5, min_new_tokens=5)
            found = model(tokens, mm_token_type_ids=blocks).logits
            cache = PolicyCache(model)
            model(tokens[:, :3], cache=cache)
            with refused:
                model(tokens, mm_token_type_ids=blocks, cache=cache)
            model(tokens)
        assert torch.allclose(found, model(tokens, mm_token_type_ids=blocks).logits, atol=1e-4)
        assert torch.equal(model.generate(tokens, do_sample=False, max_new_tokens=5, min_new_tokens=5), got)
        sharing = gemma(shared=2)  # layers that read the keys of earlier ones take no picture at all
        with kvpolicy.attach(sharing, "full"):
            sharing(tokens)
            with refused:
                sharing(tokens, mm_token_type_ids=blocks)
