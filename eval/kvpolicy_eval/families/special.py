"""Models that the generic rules do not make: the fields that they need, and why stock does not run where it cannot.

`FIELDS` has the fields of configs; those of a part, such as `text_config`, are a dictionary. A key with a kind is of
that mapping alone.
"""

from __future__ import annotations

from typing import Any

from kvpolicy_eval.families.entries import Entry
from kvpolicy_eval.families.sizes import WINDOW

Fields = dict[str, Any]

STATES = ["linear_attention", "full_attention"] * 2
SHORT_CONVOLUTIONS = ["conv", "full_attention"] * 2
WINDOWS = ["sliding_attention", "full_attention"] * 2
SHARED_BLOCKS = ["linear_attention", "hybrid"] * 2


def _text(**fields: Any) -> Fields:
    return {"text_config": fields}


def _mrope(*sections: int, **fields: Any) -> Fields:
    """Rotary embeddings with a position of several parts."""
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [*sections], **fields}
    return {"rope_parameters": parameters}


_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16}
_SPARSE = {**_INDEXER, "indexer_budget": 256, "indexer_compress_ratio": 4}
_NOTE_WINDOWS = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
}
_NOTE = {
    "num_key_value_heads": 4,
    "head_dim": 24,
    "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention", "indexed_attention"],
    **_NOTE_WINDOWS,
}

FIELDS: dict[str, Fields] = {
    "apertus1p5": {
        "image_token_offset": 100,
        "audio_token_offset": 108,
        "vision_config": {"codebook_size": 8, "base_channels": 32, "embed_dim": 16, "latent_channels": 16},
        "audio_config": {"codebook_size": 8, "codebook_dim": 64},
    },
    "bailing_hybrid": {"layer_types": STATES},
    "bamba": {"attn_layer_indices": [1, 3]},
    "bigbird_pegasus": {"encoder_layers": 4, "attention_type": "original_full"},
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dory": {"n_input_layers": 1, "n_output_layers": 1, "layer_types": WINDOWS},
    "dots3_note": {
        **_text(**_NOTE),
        "vision_config": {
            "mlp_layer_types": ["dense", "sparse", "dense", "dense"],
            "adapter_in_dim": 64,
            "adapter_out_dim": 64,
            "num_experts_per_tok": 2,
        },
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64, "downsample_hidden_size": 32},
    },
    "dots3_note_text": _NOTE,
    "emu3": {
        "vocabulary_map": {"<image>": 110, "<|extra_200|>": 112, "<|visual token 000000|>": 113},
        "vq_config": {"codebook_size": 16, "base_channels": 32, "embed_dim": 4},
    },
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": WINDOWS, "altup_num_inputs": 2},
    "gemma4_text": {"num_kv_shared_layers": 2, "layer_types": WINDOWS},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "granitemoehybrid": {"layer_types": STATES},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "kimi_linear": {"layer_types": STATES},
    "lfm2": {"full_attn_idxs": [1, 3]},
    "lfm2_moe": {"layer_types": SHORT_CONVOLUTIONS},
    "lfm3": {"layer_types": SHORT_CONVOLUTIONS},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"head_dim": 16, "num_heads": 8},
    "minimax": {"layer_types": STATES},
    "ministral": {"head_dim": 16},
    "mllama": {"vision_config": {"max_num_tiles": 4}},
    "moshi": {
        "sliding_window": 512,
        "audio_encoder_config": {"sliding_window": WINDOW},
        "depth_decoder_config": {"sliding_window": WINDOW},
    },
    "nemotron_h": {"layer_types": STATES},
    "olmo_hybrid": {"layer_types": STATES},
    "prophetnet": {"num_encoder_layers": 4},
    "qwen3_5": _text(layer_types=STATES),
    "qwen3_5_moe": _text(layer_types=STATES),
    "qwen3_5_moe_text": {"layer_types": STATES},
    "qwen3_5_text": {"layer_types": STATES},
    "qwen3_next": {"layer_types": STATES},
    "qwen4_exp": _text(**_SPARSE),
    "qwen4_exp_text": _SPARSE,
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX", "is_decoder": True},
    "zamba": {"layers_block_type": SHARED_BLOCKS},
    "zamba2": {"layers_block_type": SHARED_BLOCKS},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid"] * 4},
    "image chameleon": {
        "vocabulary_map": {"<image>": 110, "IMGIMGAZ": 111},
        "vq_config": {
            "base_channels": 32,
            "num_embeddings": 16,
            "embed_dim": 16,
            "latent_channels": 16,
            "resolution": 32,
            "channel_multiplier": [1, 1],
        },
    },
    "image cohere_compass": _text(rope_parameters={"full_attention": _mrope(4, 2, 2)["rope_parameters"]}),
    "image deepseek_ocr2": _text(mlp_layer_types=["dense", "sparse", "sparse", "sparse"]),
    "image diffusion_gemma": _text(num_experts=4, top_k_experts=2, moe_intermediate_size=32),
    "image ernie4_5_vl_moe": _text(moe_intermediate_size=[32, 32], **_mrope(2, 2, 4)),
    "image glm4v_moe": _text(**_mrope(2, 1, 1, partial_rotary_factor=0.5)),
    "image glm5_next": _text(qk_rope_head_dim=0),
    "image granite4_vision": {"deepstack_layer_map": [[0, 0], [1, 2]], "downsample_rate": "1/2"},
    "image hunyuan_vl": _text(head_dim=16, **_mrope(2, 2, 2, 2)),
    "image molmo2": {
        "vision_config": {"image_size": [32, 32]},
        "adapter_config": {"vision_feature_layer": [3, 1]},
    },
    "image muse_spark": {"audio_config": {"hidden_sizes": [32, 32, 32, 64]}},
    "image nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "image step3p7": _text(sliding_window=WINDOW),
    "image blip-2": {"num_query_tokens": 4, "image_token_index": 121},
    "image instructblip": {"num_query_tokens": 4, "image_token_index": 121},
    "image instructblipvideo": {"num_query_tokens": 4, "video_token_index": 121},
    "image hy_v4_vl": _text(**_mrope(2, 1, 1)),
    "image kosmos-2": {"latent_query_num": 4},
}
"""Fields of configs, by name or by kind and name."""

_ENCODER_DECODERS = "bart blenderbot blenderbot-small marian mbart mvp pegasus plbart whisper"
_DECODERS_IF_TOLD = (
    "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
    "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl"
)
_MROPE = (
    "cosmos3_edge glm46v glm4v glm_ocr glmga paddleocr_vl qwen2_vl qwen2_5_vl qwen2_5_omni_thinker "
    "qwen3_omni_moe_thinker"
)
FIELDS.update({name: {"encoder_layers": 4} for name in _ENCODER_DECODERS.split()})
FIELDS.update({name: {"is_decoder": True} for name in _DECODERS_IF_TOLD.split()})
FIELDS["big_bird"]["attention_type"] = "original_full"
FIELDS.update({f"image {name}": _text(**_mrope(4, 2, 2)) for name in _MROPE.split()})

ATTRIBUTES: dict[str, Fields] = {
    "image qwen2_5_omni_thinker": {"vision_start_token_id": 120},
    "image qwen3_omni_moe_thinker": {"vision_start_token_id": 120},
}
"""What is set on a finished config, whose class does not take it."""

LARGE = {"image florence2": 120_000_000, "image janus": 90_000_000}
"""Parameters that a model may have, where parts of it have no size to choose."""

WHY_STOCK_FAILS = {
    "fast_vlm": "its picture tower needs the package timm; its text model is qwen2",
    "gemma3n": "its picture tower needs the package timm; see gemma3n_text",
    "gemma4_assistant": "it drafts for another model, whose keys it reads",
    "gemma4_unified_assistant": "it drafts for another model, whose keys it reads",
    "musicgen": "it takes a token of each codebook at a position",
    "musicgen_melody": "it takes a token of each codebook at a position",
    "perception_lm": "its picture tower needs the package timm; its text model is llama",
    "pi0": "it moves robots and has no `generate`",
    "pix2struct": "an encoder-decoder that needs a picture",
    "pp_formulanet": "an encoder-decoder that needs a picture",
    "udop": "an encoder-decoder that needs a picture",
    "vision-encoder-decoder": "an encoder-decoder that needs a picture",
    "diffusion_gemma": "it denoises blocks of tokens instead of writing one at a time",
    "blt": "its config has no number of layers, which the cache of transformers asks for",
}
"""Words for a reader of the page, where the error of the stock model says less. They decide nothing."""


def of(entry: Entry, table: dict[str, Any], default: Any) -> Any:
    """What a table has for an entry: for its kind and name, or for its name."""
    return table.get(entry.key, table.get(entry.name, default))
