"""Models and caches that cannot be kept under a policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from transformers.models.mllama import configuration_mllama as mllama

from tests.conformance.models import VOCABULARY

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def _make(model: str, config: str, *without: str, **fields: Any) -> Callable[[], Any]:
    def make() -> Any:
        sizes = {key: value for key, value in _SIZES.items() if key not in without}
        kind: Any = getattr(transformers, config, None) or getattr(mllama, config)
        return getattr(transformers, model)(kind(**(sizes | fields))).eval()

    return make


_FEW = ("intermediate_size", "num_key_value_heads")
_LATENT: dict[str, Any] = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
_SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_PICTURES = _SMALL | {"image_size": 28, "patch_size": 14}

REFUSED: dict[str, Callable[[], Any]] = {
    "t5": _make("T5ForConditionalGeneration", "T5Config", d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
    "deepseek_v32": _make("DeepseekV32ForCausalLM", "DeepseekV32Config", **_LATENT),
    "mamba": _make("MambaForCausalLM", "MambaConfig", *_FEW, "num_attention_heads", state_size=4),
    "falcon_alibi": _make("FalconForCausalLM", "FalconConfig", *_FEW, alibi=True),
    "bloom": _make("BloomForCausalLM", "BloomConfig", *_FEW),
    "mpt": _make(
        "MptForCausalLM",
        "MptConfig",
        *_FEW,
        "hidden_size",
        "num_attention_heads",
        "num_hidden_layers",
        d_model=32,
        n_heads=4,
        n_layers=2,
    ),
    "diffllama": _make("DiffLlamaForCausalLM", "DiffLlamaConfig"),
    "doge": _make("DogeForCausalLM", "DogeConfig"),
    "git": _make("GitForCausalLM", "GitConfig", "num_key_value_heads", vision_config=_SMALL),
    "mllama": _make(
        "MllamaForCausalLM",
        "MllamaTextConfig",
        num_hidden_layers=3,
        cross_attention_layers=[1],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "jetmoe": _make("JetMoeForCausalLM", "JetMoeConfig", "num_attention_heads", kv_channels=8, num_local_experts=2),
    "mistral_window": _make("MistralForCausalLM", "MistralConfig", sliding_window=8),
    "bert": _make("BertModel", "BertConfig", "num_key_value_heads"),
    "rwkv": _make("RwkvForCausalLM", "RwkvConfig", *_FEW),
    "recurrent_gemma": _make("RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", num_hidden_layers=3, lru_width=32),
    "llama4": _make("Llama4ForCausalLM", "Llama4TextConfig", intermediate_size_mlp=48, head_dim=8, num_local_experts=2),
    "olmo3_all_sliding": _make(
        "Olmo3ForCausalLM", "Olmo3Config", sliding_window=8, layer_types=["sliding_attention"] * 2
    ),
    "bart": _make(
        "BartForCausalLM",
        "BartConfig",
        *_FEW,
        d_model=32,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=32,
        encoder_layers=2,
    ),
    "musicgen": _make("MusicgenForCausalLM", "MusicgenDecoderConfig", *_FEW, num_codebooks=2, ffn_dim=48),
    "musicgen_melody": _make(
        "MusicgenMelodyForCausalLM", "MusicgenMelodyDecoderConfig", *_FEW, num_codebooks=2, ffn_dim=48
    ),
    "hrm_text": _make("HrmTextForCausalLM", "HrmTextConfig"),
    "whisper": _make(
        "WhisperForCausalLM",
        "WhisperConfig",
        *_SIZES,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        d_model=32,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=48,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=32,
    ),
    "idefics": _make(
        "IdeficsForVisionText2Text",
        "IdeficsConfig",
        "num_key_value_heads",
        vision_config=_PICTURES | {"embed_dim": 16},
        perceiver_config={
            "resampler_n_latents": 2,
            "resampler_depth": 1,
            "resampler_n_heads": 2,
            "resampler_head_dim": 8,
        },
    ),
    "paligemma": _make(
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        *_SIZES,
        text_config=_SIZES | {"model_type": "gemma", "head_dim": 8},
        vision_config=_PICTURES | {"model_type": "siglip_vision_model"},
    ),
    "kosmos2": _make(
        "Kosmos2ForConditionalGeneration",
        "Kosmos2Config",
        *_SIZES,
        latent_query_num=2,
        text_config={"vocab_size": VOCABULARY, "embed_dim": 32, "ffn_dim": 32, "layers": 2, "attention_heads": 4},
        vision_config=_PICTURES,
    ),
    "blip": _make(
        "BlipForConditionalGeneration",
        "BlipConfig",
        *_SIZES,
        text_config=_SIZES | {"num_key_value_heads": 4, "encoder_hidden_size": 16},
        vision_config=_PICTURES,
    ),
}
