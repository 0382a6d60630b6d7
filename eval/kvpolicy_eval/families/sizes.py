"""The sizes of small models, by the field of a config."""

from __future__ import annotations

import re

HIDDEN = 64
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
LAYERS = 4
VOCABULARY = 128
POSITIONS = 256
WINDOW = 16
"""Tokens of a sliding window: fewer than those of the prompt."""

_FIELDS = [
    (VOCABULARY, "vocab_size unpadded_vocab_size vocab_size_per_layer_input"),
    (
        HIDDEN,
        "hidden_size d_model n_embd emb_dim embed_dim model_dim intermediate_size ffn_dim decoder_ffn_dim "
        "encoder_ffn_dim ffn_hidden_size n_inner dim_ff dff d_ff d_inner mlp_dim feed_forward_size "
        "intermediate_size_mlp dense_intermediate_size prefix_dense_intermediate_size lru_width out_hidden_size "
        "projection_dim projector_hidden_size text_hidden_size num_position_embeddings backbone_hidden_size "
        "encoder_hidden_size cross_attention_hidden_size vision_output_dim output_dim embedding_size seq_len "
        "output_proj_dims mm_embed_dim audio_embed_dim word_embed_proj_dim projection_hidden_size",
    ),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers layers num_decoder_layers num_blocks "
        "num_experts num_local_experts n_routed_experts moe_num_experts mm_tokens_per_image image_seq_length "
        "linear_num_value_heads linear_num_heads",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads "
        "encoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads",
    ),
    (
        KV_HEADS,
        "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads encoder_layers num_encoder_layers depth "
        "num_experts_per_tok moe_topk moe_k moe_top_k top_k_experts zero_expert_num o_groups index_n_heads "
        "indexer_n_heads n_mamba_heads linear_num_key_heads split_ngram_parts num_codebooks max_num_tiles",
    ),
    (
        HEAD_DIM,
        "head_dim global_head_dim d_kv kv_channels q_lora_rank kv_lora_rank qk_nope_head_dim v_head_dim o_lora_rank "
        "index_head_dim indexer_head_dim mamba_d_head mamba_d_state mamba_head_dim ssm_state_size state_size "
        "linear_key_head_dim linear_value_head_dim linear_head_dim attention_head_size attention_head_dim dim_head "
        "d_head query_pre_attn_scalar swa_head_dim num_mel_bins hc_lowrank mm_posemb_size router_hidden_size",
    ),
    (
        POSITIONS,
        "max_position_embeddings n_positions max_seq_len n_ctx max_target_positions max_sequence_length "
        "original_max_position_embeddings",
    ),
    (
        32,
        "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size "
        "shared_experts_intermediate_size moe_shared_expert_intermediate_size share_expert_dim moe_hidden_size "
        "shared_intermediate_size image_size max_source_positions",
    ),
    (
        8,
        "qk_rope_head_dim mamba_n_heads mamba_chunk_size mamba_num_heads chunk_size mamba_dt_rank patch_size "
        "hidden_size_per_layer_input rotary_dim adapter_rank make_ngram_vocab_size_divisible_by laurel_rank "
        "gated_norm_rank",
    ),
    (
        1,
        "n_group topk_group n_shared_experts first_k_dense_replace num_dense_layers indexer_kv_heads n_groups "
        "bos_token_id decoder_start_token_id",
    ),
    (2, "eos_token_id sep_token_id"),
    (0, "pad_token_id num_nextn_predict_layers num_mtp_layers"),
    (WINDOW, "attention_chunk_size sliding_window_size attention_window_size"),
    (24, "qk_head_dim"),
    (128, "mamba_d_ssm"),
    (200, "ngram_vocab_size_base"),
    (512, "index_topk"),
]
SIZES: dict[str, int] = {name: size for size, names in _FIELDS for name in names.split()}
"""The value of each field that is made small, whatever the config."""

_ONLY_IF_SET = (
    "num_kv_heads query_pre_attn_scalar rotary_dim q_lora_rank original_max_position_embeddings top_k_experts "
    "cross_attention_hidden_size num_experts num_local_experts moe_intermediate_size lru_width n_inner embedding_size "
    "indexer_n_heads indexer_kv_heads indexer_head_dim n_group topk_group attention_chunk_size "
    "num_nextn_predict_layers num_mtp_layers num_blocks head_dim prefix_dense_intermediate_size"
)
ONLY_IF_SET = frozenset(_ONLY_IF_SET.split())
"""Fields that stay None where that is their default, because it means something."""

TOKEN = re.compile(
    r"(token_id|token_index|_token_ids|image_patch_id|im_start_id|im_end_id|im_newline_id|image_start_id|image_end_id)$"
)
"""Names of fields with a special token."""
FIRST_SPECIAL = 101
"""The first special token; prompts have smaller ones."""
