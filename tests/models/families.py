"""Tiny configurations of every architecture, the odd ones above all, and checkpoints of them made by transformers.

A row is ``family/what is special: (model type of transformers, what differs from SHAPE)``.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.models import decoder_families, library_models
from tests.tiers import nightly

library_models.register()
VOCAB_SIZE = 97
MAX_LEN = 400
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,
    "initializer_range": 0.2,
}


def rope(kind: str, theta: float = 500.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=100)
SHORT, LONG = [1.0, 1.5, 2.0, 2.5], [1.0, 3.0, 9.0, 27.0]
LONGROPE = rope("longrope", short_factor=SHORT, long_factor=LONG)
GEMMA = {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 9}
GEMMA3_ROPE = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    }
}
QWEN_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
SHARED = {"shared_expert_intermediate_size": 40}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
INDEXED = {
    **DEEPSEEK,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "index_n_heads": 16,  # so many that scores of zero, of which torch may take any, are rare
    "index_head_dim": 20,
    "index_topk": 24,
}
GPT_OSS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 9,
    "head_dim": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
}
DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 12}
NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 12,
    "head_dim": 8,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
}
KIMI = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "moe_intermediate_size": 24,
    "model_max_length": MAX_LEN,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
QWEN4 = {
    **QWEN_MOE,
    **SHARED,
    **DELTA,
    **rope("default", partial_rotary_factor=0.5),
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    "hc_count": 3,
    "hc_lowrank": 6,
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 24,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 16,
    "split_ngram_parts": 3,
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 12,
    "indexer_budget": 24,
    "indexer_compress_ratio": 4,
}
INKLING = {
    "num_hidden_layers": 3,
    "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "head_dim": 16,
    "swa_head_dim": 8,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4,
    "sliding_window_size": 9,
    "rel_extent": 20,
    "d_rel": 6,
    "log_scaling_n_floor": 30,
    "log_scaling_alpha": 0.4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "route_scale": 1.5,
    "logits_mup_width_multiplier": 2.0,
}
INKLING2 = {
    **{key: INKLING[key] for key in ("head_dim", "swa_head_dim", "swa_num_attention_heads", "swa_num_key_value_heads")},
    **{key: INKLING[key] for key in ("sliding_window_size", "rel_extent", "d_rel", "moe_intermediate_size")},
    **{key: INKLING[key] for key in ("log_scaling_n_floor", "log_scaling_alpha", "n_routed_experts", "route_scale")},
    "num_hidden_layers": 5,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid", "hybrid_sliding"],
    "num_experts_per_tok": 2,
    "n_layers_per_attn_res_block": 2,
    "qk_l2_clip_threshold": 3.0,
    "rel_l2_clip_threshold": 2.0,
    "mlp_gate_softcap": 0.2,
    "mlp_up_softcap": 0.3,
    "final_logit_softcapping": 2.0,
}
ZAYA = {"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 4, "router_hidden_size": 12}
DEEPSEEK_V4 = {
    "num_key_value_heads": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 24,
    "o_groups": 4,
    "o_lora_rank": 12,
    "index_n_heads": 12,
    "index_head_dim": 8,
    "index_topk": 6,
    "sliding_window": 9,
}
V4_KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
GPT2 = {"n_positions": MAX_LEN, "n_embd": 32, "n_layer": 2, "n_head": 4}

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama/gqa": ("llama", {}),
    "llama/mha": ("llama", {"num_key_value_heads": 4, "hidden_act": "gelu"}),
    "llama/one_kv_head_tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama/wide_heads": ("llama", {"head_dim": 16}),
    "llama/biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama/llama3_rope": ("llama", LLAMA3),
    "llama/linear_rope": ("llama", rope("linear", factor=4.0)),
    "llama/proportional_rope": ("llama", {"head_dim": 16, **rope("proportional", partial_rotary_factor=0.5)}),
    "llama/dynamic_rope": ("llama", rope("dynamic", factor=4.0)),
    "llama/yarn": ("llama", YARN),
    "llama/yarn_spelled_out": (
        "llama",
        rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=100,
            attention_factor=1.3,
            beta_fast=20.0,
            beta_slow=2.0,
            truncate=False,
        ),
    ),
    "mistral/full": ("mistral", {"head_dim": 16, "sliding_window": None}),
    "mistral/window": ("mistral", {"sliding_window": 7}),
    "qwen2/biases": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2/windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3/wide_heads": ("qwen3", {"head_dim": 16}),
    "qwen3/biases": ("qwen3", {"attention_bias": True, "num_key_value_heads": 1, **YARN}),
    "phi3/fused": ("phi3", {}),
    "phi3/short": ("phi3", {**LONGROPE, "original_max_position_embeddings": MAX_LEN, "sliding_window": 11}),
    "phi3/long": (
        "phi3",
        {**LONGROPE, "original_max_position_embeddings": 200},
    ),
    "olmo2/one_kv_head": ("olmo2", {"num_key_value_heads": 1}),
    "olmo2/biases": ("olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    "glm/fused": ("glm", {"head_dim": 8}),
    "glm4/biases": ("glm4", {"head_dim": 16, "attention_bias": True}),
    "glm4/rotates_a_quarter": ("glm4", {**rope("default", partial_rotary_factor=0.25), "head_dim": 16}),
    "gemma/wide_heads": ("gemma", {"head_dim": 16}),
    "gemma2/capped": ("gemma2", {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "gemma2/uncapped": (
        "gemma2",
        {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None, "num_key_value_heads": 1},
    ),
    "gemma3/two_ropes": ("gemma3_text", {**GEMMA, **GEMMA3_ROPE, "num_hidden_layers": 7}),
    "gemma3/other_pattern": (
        "gemma3_text",
        {**GEMMA, "layer_types": ["full_attention", "sliding_attention"], "final_logit_softcapping": 5.0},
    ),
    "mixtral/two_of_five": ("mixtral", {"num_local_experts": 5}),
    "mixtral/window": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 11}),
    "qwen2_moe/shared": ("qwen2_moe", {**QWEN_MOE, **SHARED}),
    "qwen2_moe/some_layers_dense": (
        "qwen2_moe",
        {
            **QWEN_MOE,
            **SHARED,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe/normalised": ("qwen3_moe", {**QWEN_MOE, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe/windows": (
        "qwen3_moe",
        {**QWEN_MOE, "use_sliding_window": True, "sliding_window": 9, "tie_word_embeddings": True},
    ),
    "qwen3_next/experts": ("qwen3_next", {**DELTA, **QWEN_MOE, **SHARED}),
    "qwen3_next/some_layers_dense": (
        "qwen3_next",
        {
            **DELTA,
            **QWEN_MOE,
            **SHARED,
            "num_key_value_heads": 1,
            "decoder_sparse_step": 2,
            "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"],
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 3,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5/dense": ("qwen3_5_text", DELTA),
    "qwen3_5/biases": ("qwen3_5_text", {**DELTA, "attention_bias": True, "linear_num_key_heads": 1}),
    "qwen3_5_moe/experts": ("qwen3_5_moe_text", {**DELTA, **QWEN_MOE, **SHARED}),
    "lfm2/conv": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}),
    "lfm2/biases": (
        "lfm2",
        {
            "layer_types": ["full_attention", "conv"],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2_moe/experts": (
        "lfm2_moe",
        {**QWEN_MOE, "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_dense_layers": 1},
    ),
    "mamba2/alone": ("mamba2", {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 12}),
    "mamba2/biases": (
        "mamba2",
        {
            "num_heads": 4,
            "head_dim": 16,
            "n_groups": 1,
            "state_size": 8,
            "conv_kernel": 3,
            "use_bias": True,
            "use_conv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "mamba/alone": ("mamba", {"state_size": 6, "time_step_rank": 5}),
    "mamba/biases": (
        "mamba",
        {"state_size": 8, "conv_kernel": 3, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False},
    ),
    "falcon_mamba/norms": ("falcon_mamba", {"state_size": 6, "time_step_rank": 5, "tie_word_embeddings": False}),
    "nemotron_h/experts": (
        "nemotron_h",
        {
            **NEMOTRON,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        },
    ),
    "nemotron_h/dense": (
        "nemotron_h",
        {**NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention"]},
    ),
    "nemotron_h/latent_experts": (
        "nemotron_h",
        {
            **NEMOTRON,
            "layers_block_type": ["full_attention", "linear_attention", "moe"],
            "moe_latent_size": 16,
            "n_shared_experts": 2,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.7,
        },
    ),
    "granitemoehybrid/experts": (
        "granitemoehybrid",
        {
            **MAMBA,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
            "attention_multiplier": 0.2,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_hidden_layers": 3,
        },
    ),
    "granitemoehybrid/dense_with_rope": (
        "granitemoehybrid",
        {
            **MAMBA,
            "num_local_experts": 0,
            "shared_intermediate_size": 40,
            "position_embedding_type": "rope",
            "layer_types": ["full_attention", "linear_attention"],
        },
    ),
    "falcon_h1/factors": (
        "falcon_h1",
        {
            **MAMBA,
            "mamba_d_ssm": 48,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.4,
            "key_multiplier": 0.7,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.8,
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.6,
            "ssm_multipliers": [0.9, 1.1, 0.7, 1.4, 1.2],
            "mlp_multipliers": [0.8, 0.5],
        },
    ),
    "falcon_h1/normed": ("falcon_h1", {**MAMBA, "mamba_rms_norm": True, "mamba_proj_bias": True}),
    "falcon_h1/gated_first": (
        "falcon_h1",
        {**MAMBA, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "attention_bias": True, "mlp_bias": True},
    ),
    "bamba/one_of_two": ("bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "jamba/experts": (
        "jamba",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 5,
            "mamba_d_state": 6,
            "mamba_dt_rank": 5,
        },
    ),
    "jamba/dense": (
        "jamba",
        {
            **dict.fromkeys(("attn_layer_period", "num_hidden_layers"), 2),
            **dict.fromkeys(("attn_layer_offset", "num_experts", "num_experts_per_tok"), 1),
            **dict.fromkeys(("mamba_proj_bias", "tie_word_embeddings"), True),
            "mamba_conv_bias": False,
            "mamba_d_conv": 3,
        },
    ),
    "zamba2/in_turn": (
        "zamba2",
        {
            "num_hidden_layers": 5,
            "initializer_range": 0.1,
            "layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid", "linear_attention"],
            "num_mem_blocks": 2,
            "num_key_value_heads": 4,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "adapter_rank": 6,
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "mamba_d_state": 12,
        },
    ),
    "zamba2/untied_blocks": (
        "zamba2",
        {
            "layers_block_type": ["hybrid", "linear_attention", "hybrid"],
            "num_hidden_layers": 3,
            "adapter_rank": 6,
            "mamba_d_state": 12,
            "add_bias_linear": True,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        },
    ),
    "kimi_linear/experts": (
        "kimi_linear",
        {
            **KIMI,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_expert_group": 2,
            "topk_group": 1,
        },
    ),
    "olmo_hybrid/no_positions": (
        "olmo_hybrid",
        {"num_key_value_heads": 4, "layer_types": ["linear_attention", "full_attention"], "rope_parameters": None},
    ),
    "olmo_hybrid/rotated": (
        "olmo_hybrid",
        {
            "layer_types": ["full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "linear_allow_neg_eigval": False,
            "attention_bias": True,
        },
    ),
    "minimax/lightning": (
        "minimax",
        {
            "num_local_experts": 5,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "full_attn_alpha_factor": 3.5,
            "full_attn_beta_factor": 0.9,
            "linear_attn_alpha_factor": 2.5,
            "linear_attn_beta_factor": 1.2,
            "mlp_alpha_factor": 3.1,
            "mlp_beta_factor": 0.8,
        },
    ),
    "gpt_oss/sinks": ("gpt_oss", GPT_OSS),
    "gpt_oss/tight": (
        "gpt_oss",
        {**GPT_OSS, **YARN, "swiglu_limit": 0.5, "swiglu_alpha": 1.2, "attention_bias": False, "head_dim": 8},
    ),
    "deepseek_v2/lite": ("deepseek_v2", {**DEEPSEEK, "q_lora_rank": None}),
    "deepseek_v2/groups": (
        "deepseek_v2",
        {
            **DEEPSEEK,
            **rope("yarn", factor=4.0, original_max_position_embeddings=100, mscale=0.7, mscale_all_dim=0.5),
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "attention_bias": True,
        },
    ),
    "deepseek_v3/groups": ("deepseek_v3", {**DEEPSEEK, "n_group": 4, "topk_group": 2}),
    "deepseek_v3/none_shared": ("deepseek_v3", {**DEEPSEEK, "n_shared_experts": 0, "n_group": 4, "topk_group": 3}),
    "deepseek_v3/half_split": (
        "deepseek_v3",
        {
            **DEEPSEEK,
            **rope("yarn", factor=4.0, original_max_position_embeddings=100, mscale=1.0, mscale_all_dim=1.0),
            "rope_interleave": False,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "zaya/two_windows": (
        "zaya",
        {**ZAYA, "num_hidden_layers": 3, "layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": 9}
        | {"cca_time0": 3, "cca_time1": 3, "lm_head_bias": True, "tie_word_embeddings": False},
    ),
    "zaya/one_kv_head": (
        "zaya",
        {**ZAYA, "num_key_value_heads": 1, "rope_parameters": {"hybrid": {"rope_theta": 500.0}}},
    ),
    "deepseek_v32/groups": ("deepseek_v32", {**INDEXED, "n_group": 4, "topk_group": 2}),
    "deepseek_v32/yarn": (
        "deepseek_v32",
        {
            **INDEXED,
            **rope("yarn", factor=4.0, original_max_position_embeddings=100, mscale=1.0, mscale_all_dim=1.0),
            "attention_bias": True,
            "index_head_dim": 8,
            "norm_topk_prob": False,
        },
    ),
    "axk2/gated_norms": (
        "axk2",
        {**{key: INDEXED[key] for key in INDEXED if "group" not in key}, "gated_norm_rank": 6},
    ),
    "axk2/biases": (
        "axk2",
        {**INDEXED, "attention_bias": True, "tie_word_embeddings": True, "first_k_dense_replace": 0},
    ),
    "hy_v4/shared": (
        "hy_v4",
        {**INDEXED, "num_hidden_layers": 4, "indexer_types": ["full", "full", "shared", "shared"], "hc_mult": 3}
        | {"swiglu_limit": 0.5, "hc_magnitude": 1.5},
    ),
    "hy_v4/own": ("hy_v4", {**INDEXED, "num_hidden_layers": 2, "index_topk": 40, "attention_bias": True}),
    "dots3_note_text/windows": (
        "dots3_note_text",
        {**{key: INDEXED[key] for key in INDEXED if "group" not in key}, "head_dim": 20, "num_hidden_layers": 4}
        | {"layer_types": ["indexed_attention", "sliding_attention", "sliding_attention", "indexed_attention"]}
        | {"sliding_window": 9, "n_shared_experts": 2, "shared_experts_intermediate_size": 20, "swa_v_head_dim": 14}
        | {"swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 20, "swa_kv_lora_rank": 12}
        | {"swa_qk_nope_head_dim": 6, "swa_head_dim": 10},
    ),
    "glm_moe_dsa/own": ("glm_moe_dsa", {**INDEXED, "index_topk": 40}),
    "glm_moe_dsa/shared": (
        "glm_moe_dsa",
        {**INDEXED, "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]},
    ),
    "qwen4_exp_text/blocks": ("qwen4_exp_text", QWEN4),
    "qwen4_exp_text/plain": (
        "qwen4_exp_text",
        {**QWEN4, "ple_layer_ids": None, "indexer_compress_ratio": 6, "num_key_value_heads": 1}
        | {
            "layer_types": ["full_attention", "linear_attention"],
            "num_hidden_layers": 2,
            "output_gate_type": "sigmoid",
        },
    ),
    "deepseek_v4/three_kinds": (
        "deepseek_v4",
        {
            **DEEPSEEK_V4,
            "layer_types": [*V4_KINDS, V4_KINDS[1]],
            "compress_rates": {V4_KINDS[1]: 4, V4_KINDS[2]: 12},
            "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
        },
    ),
    "deepseek_v4/odd_groups": (
        "deepseek_v4",
        {
            **DEEPSEEK_V4,
            **rope("yarn", factor=4.0, original_max_position_embeddings=100),
            "num_hidden_layers": 3,
            "layer_types": [V4_KINDS[2], V4_KINDS[1], V4_KINDS[0]],
            "compress_rates": {V4_KINDS[1]: 5, V4_KINDS[2]: 21},
            "mlp_layer_types": ["moe", "moe", "hash_moe"],
            "sliding_window": 26,
            "hc_mult": 3,
            "hc_sinkhorn_iters": 2,
            "o_groups": 2,
            "swiglu_limit": 0.4,
        },
    ),
    "inkling_text/biases": ("inkling_text", INKLING),
    "inkling_text/plain": (
        "inkling_text",
        {**INKLING, "num_hidden_layers": 2, "layer_types": ["hybrid_sliding", "hybrid"], "sconv_kernel_size": 3}
        | {"mlp_layer_types": None, "n_shared_experts": 1, "log_scaling_n_floor": None, "rel_extent": 500},
    ),
    "inkling2_text/blocks": ("inkling2_text", INKLING2),
    "inkling2_text/whole": (
        "inkling2_text",
        {**INKLING2, "num_hidden_layers": 2, "layer_types": ["hybrid", "hybrid_sliding"], "conv_kernel_size": 3}
        | {"rel_extent": 500, "sliding_window_size": 600, "n_layers_per_attn_res_block": 3, "num_key_value_heads": 2},
    ),
    "gpt2/small": ("gpt2", GPT2),
    "gpt2/scaled_by_layer": ("gpt2", {**GPT2, "n_inner": 40, "scale_attn_by_inverse_layer_idx": True}),
    "gpt2/unscaled_untied": (
        "gpt2",
        {**GPT2, "n_embd": 35, "n_head": 5, "scale_attn_weights": False, "tie_word_embeddings": False},
    ),
}
OWN_ROWS = list(ROWS)
"""Of the families that have a model of their own."""
ROWS |= decoder_families.ROWS
FIRST_ROWS = list({row.partition("/")[0]: row for row in reversed(ROWS)}.values())
"""One of each family."""
NIGHTLY_ROWS = (
    "falcon_h1/gated_first",
    "nemotron_h/dense",
    "solar_open/shared",
    "cwm/windows",
    "mellum/windows",
    "youtu/latent",
    "laguna/gated_numbers",
    "helium/adjacent",
    "jais2/biases",
    "vaultgemma/capped",
    "granitemoe_swa/sinks",
    "minicpm/factors",
    "flint/sinks",
)
"""Rows that differ little from others."""
EVERY_ROW = [row if row in (*OWN_ROWS, *FIRST_ROWS) and row not in NIGHTLY_ROWS else nightly(row) for row in ROWS]
"""As values of a parameter: further rows of families that are put together from parts are for `make nightly`."""
TELLING = (
    "cohere/normed_heads",
    "granite_swa/sinks",
    "minimax_m2/partly_rotated",
    "mimo_v2_flash/narrow_values",
    "minimax_m3_vl_text/few_blocks",
    "laguna/gated_heads",
)
"""Rows of such families that each have something of their own to divide among ranks."""
RANDOM = (
    "norm.weight",
    ".bias",
    "output_scale",
    "layernorm.weight",
    "ln_1.weight",
    "ln_2.weight",
    "ln_f.weight",
    "layernorm.0.weight",
    "layernorm.1.weight",
    "sinks",
    "alpha_p",
    "alpha_n",
    "_bias",
    "_scale",
    ".temp",
    "hc.base",
    "hc.scale",
    "hc_base",
    "static_weight",
    ".query",
    "l2_clip.scale",
)
"""Parameters that begin as all ones or zeros, where mistakes would not show."""


def make_config(row: str, **changes: Any) -> PreTrainedConfig:
    """The row's configuration."""
    kind, values = ROWS[row]
    if kind not in CONFIG_MAPPING or (kind == "bailing_moe_v2" and library_models.Split is None):
        pytest.skip(f"this release of transformers cannot make {kind}")
    known = AutoConfig.for_model(kind).to_dict()
    shape = {key: value for key, value in SHAPE.items() if key in known}
    config: PreTrainedConfig = AutoConfig.for_model(kind, **{**shape, **values, **changes})
    if type(config) not in AutoModelForCausalLM._model_mapping:
        pytest.skip(f"this release of transformers has no causal model of {kind}")
    model_class: Any = AutoModelForCausalLM._model_mapping[type(config)]
    config.architectures = [model_class.__name__]
    return config


def make_checkpoint(folder: Path, row: str, auto_class: Any = AutoModelForCausalLM, **changes: Any) -> PreTrainedModel:
    """Write the row's model, of random float32 weights, to the folder, and return it; ``auto_class`` makes it."""
    torch.manual_seed(zlib.crc32(row.encode()))
    config = make_config(row, **changes)
    model: PreTrainedModel = auto_class.from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(RANDOM):
                weight.add_(torch.randn_like(weight) * 0.3)
            if name.endswith("A_log"):  # states decay so slowly that the first tokens matter to the last
                weight.copy_((torch.rand_like(weight) * 0.01 + 0.0005).log())
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.add_(torch.randn_like(buffer) * 0.3)
            if name.endswith("tid2eid"):  # the experts of each token
                buffer.copy_(torch.rand(len(buffer), config.n_routed_experts).argsort()[:, : buffer.shape[1]])
    model.eval().save_pretrained(folder)
    return model
