"""Tiny configurations of the families that are put together from parts: rows of the table in ``families.py``."""

from __future__ import annotations

from typing import Any

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_hidden_layers": 3}
ROUTED = {key: value for key, value in EXPERTS.items() if key != "num_experts"} | {"n_routed_experts": 6}
COHERE = {"num_experts": 6, "num_experts_per_tok": 3, "num_hidden_layers": 3}
GEMMA4 = {"head_dim": 8, "global_head_dim": 16, "sliding_window": 9, "vocab_size_per_layer_input": 97}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "head_dim": 8,
}
FALCON = {"num_attention_heads": 4, "ffn_hidden_size": 48}
ROTATED_HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
    "logits_scaling": 6.0,
}
GRANITE_MOE = {**GRANITE, "num_local_experts": 5}
BOTH_ROPES = {
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 100,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
}
GLM5_NEXT = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
    "indexer_types": ["full", "full", "shared", "full"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "index_n_heads": 16,  # of few, all may be below zero, and of equal scores the library chooses any
    "index_head_dim": 12,
    "index_topk": 20,
    "index_kpool": 4,
    "swiglu_limit": 0.3,
}
MINIMAX_M3 = {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "rotary_dim": 8,
    "intermediate_size": 24,
    "num_local_experts": 6,
    "dense_intermediate_size": 48,
    "shared_intermediate_size": 40,
    "num_experts_per_tok": 3,
    "index_n_heads": 2,
    "index_head_dim": 12,
    "index_block_size": 8,
    "index_topk_blocks": 4,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    **ROTATED_HALF,
}
SLIDES = ["sliding_attention", "full_attention"]
ERNIE = {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 24, "num_hidden_layers": 3}

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee/biases": ("arcee", {"attention_bias": True, "mlp_bias": True}),
    "bitnet/inner_norms": ("bitnet", {"num_key_value_heads": 1}),
    "cohere/normed_heads": ("cohere", {"use_qk_norm": True, "logit_scale": 0.3, "num_key_value_heads": 1}),
    "cohere/biases": ("cohere", {"attention_bias": True, "tie_word_embeddings": False}),
    "cohere2/windows": ("cohere2", {"sliding_window": 9, "layer_types": SLIDES}),
    "cohere_compass_text/two_ropes": (
        "cohere_compass_text",
        {"sliding_window": 9, "layer_types": ["full_attention", *SLIDES], "num_hidden_layers": 3, "logit_scale": 0.3}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 90.0, "mrope_section": [2, 1, 1]},
            }
        },
    ),
    "cohere_compass_text/no_positions": (
        "cohere_compass_text",
        {"sliding_window": 9, "layer_types": SLIDES, "attention_bias": True, "tie_word_embeddings": False}
        | {
            "rope_parameters": {
                "full_attention": None,
                "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
            }
        },
    ),
    "cohere2_moe/shared": (
        "cohere2_moe",
        {**COHERE, "num_shared_experts": 2, "mlp_layer_types": ["dense", "sparse", "sparse"], "head_dim": 8}
        | {"prefix_dense_intermediate_size": 40, "sliding_window": 9, "layer_types": ["full_attention", *SLIDES]},
    ),
    "cohere2_moe/sigmoid": (
        "cohere2_moe",
        {**COHERE, "expert_selection_fn": "sigmoid", "head_dim": 16, "rms_norm_eps": 1e-4, "num_hidden_layers": 2},
    ),
    "dots1/windows": (
        "dots1",
        {**ROUTED, "n_shared_experts": 2, "first_k_dense_replace": 1, "sliding_window": 9, "max_window_layers": 1},
    ),
    "ernie4_5/wide_heads": ("ernie4_5", {"head_dim": 16, "use_bias": True}),
    "ernie4_5_moe/some_layers": ("ernie4_5_moe", {**ERNIE, "moe_layer_start_index": 1, "moe_num_shared_experts": 1}),
    "ernie4_5_moe/biases": ("ernie4_5_moe", {**ERNIE, "use_bias": True}),
    "exaone4/windows": ("exaone4", {"sliding_window": 9, "layer_types": SLIDES}),
    "exaone4/full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "exaone_moe/groups": (
        "exaone_moe",
        {**EXPERTS, "n_group": 3, "topk_group": 2, "sliding_window": 9, "layer_types": [*SLIDES, "full_attention"]},
    ),
    "glm4_moe/normed_heads": ("glm4_moe", {**ROUTED, "use_qk_norm": True, "attention_bias": True, "head_dim": 16}),
    "glm4_moe/groups": ("glm4_moe", {**ROUTED, "n_group": 3, "topk_group": 2, "n_shared_experts": 2}),
    "glm5_next_text/few_blocks": ("glm5_next_text", GLM5_NEXT),
    "glm5_next_text/all_blocks": (
        "glm5_next_text",
        {**GLM5_NEXT, "index_topk": 500, "linear_lower_bound": None, "swiglu_limit": 10.0},
    ),
    "granite/factors": ("granite", {**GRANITE, "tie_word_embeddings": True}),
    "granite_swa/sinks": ("granite_swa", {**GRANITE, "sliding_window": 9, "layer_rope_theta": [0, 100.0]}),
    "granitemoe/stacked": ("granitemoe", GRANITE_MOE),
    "granitemoeshared/shared": ("granitemoeshared", {**GRANITE_MOE, "shared_intermediate_size": 40}),
    "hunyuan_v1_dense/late_norms": ("hunyuan_v1_dense", {"head_dim": 16}),
    "hunyuan_v1_dense/alpha": (
        "hunyuan_v1_dense",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "alpha": 50.0, "factor": 1.0}, "head_dim": 8},
    ),
    "hunyuan_v1_moe/shared": ("hunyuan_v1_moe", {"num_experts": 5, "moe_topk": 2, "head_dim": 8}),
    "hy_v3/shared": ("hy_v3", {**EXPERTS, "head_dim": 16, "mlp_bias": True}),
    "kolibri1/windows": (
        "kolibri1",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16, "sliding_window": 9}
        | {"shared_expert_intermediate_size": 40, "layer_types": ["full_attention", *SLIDES], "num_hidden_layers": 3},
    ),
    "kolibri1/normalised": (
        "kolibri1",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True}
        | {"layer_types": SLIDES, "sliding_window": 9},
    ),
    "minimax_m2/partly_rotated": (
        "minimax_m2",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    ),
    "minimax_m3_vl_text/few_blocks": ("minimax_m3_vl_text", {**MINIMAX_M3, "index_local_blocks": 2}),
    "minimax_m3_vl_text/all_blocks": (
        "minimax_m3_vl_text",
        {**MINIMAX_M3, "index_block_size": 64, "index_topk_blocks": 16, "swiglu_limit": 0.5, "swiglu_alpha": 1.2},
    ),
    "nemotron/half_rotated": (
        "nemotron",
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "olmo/clipped": ("olmo", {"clip_qkv": 0.5, "attention_bias": True}),
    "olmo3/two_ropes": ("olmo3", {**BOTH_ROPES, "sliding_window": 9, "layer_types": SLIDES}),
    "olmoe/clipped": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "clip_qkv": 0.5}),
    "seed_oss/biases": ("seed_oss", {"attention_out_bias": True, "head_dim": 16}),
    "smollm3/no_positions": ("smollm3", {"no_rope_layers": [0, 1]}),
    "smollm3/listed_windows": ("smollm3", {"sliding_window": 9, "layer_types": SLIDES}),
    "smollm3/windows": ("smollm3", {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 9}),
    "apertus/learned_activation": ("apertus", {}),
    "falcon/one_kv_head": ("falcon", {**FALCON, "multi_query": True}),
    "falcon/two_norms": ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon/some_kv_heads": (
        "falcon",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon/sequential": (
        "falcon",
        {**FALCON, "multi_query": False, "parallel_attn": False, "bias": True, "tie_word_embeddings": False},
    ),
    "bloom/slopes": ("bloom", {"hidden_size": 32, "n_head": 4, "n_layer": 2, "seq_length": 400}),
    "mpt/slopes": (
        "mpt",
        {"d_model": 36, "n_heads": 6, "n_layers": 2, "max_seq_len": 400, "attn_config": {"clip_qkv": 0.5}},
    ),
    "gpt_neox/parallel": ("gpt_neox", {"num_attention_heads": 2}),
    "gpt_neox/sequential": ("gpt_neox", {**ROTATED_HALF, "use_parallel_residual": False}),
    "mimo_v2_flash/narrow_values": (
        "mimo_v2_flash",
        {**ROUTED, "head_dim": 24, "v_head_dim": 16, "sliding_window": 9, "num_key_value_heads": 1}
        | {"layer_types": ["full_attention", *SLIDES], "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "mistral4/growing_queries": (
        "mistral4",
        {**DEEPSEEK, "head_dim": 20, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7}
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 50,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "ministral3/growing_queries": (
        "ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 50,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "opt/learned_positions": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "phi/parallel": ("phi", {**ROTATED_HALF}),
    "phimoe/chosen_in_turn": (
        "phimoe",
        {"num_local_experts": 5, "lm_head_bias": True, "attention_bias": True, "router_jitter_noise": 0.2},
    ),
    "stablelm/biases": ("stablelm", {**ROTATED_HALF, "use_qkv_bias": True}),
    "stablelm/normed_heads": (
        "stablelm",
        {**ROTATED_HALF, "use_parallel_residual": True, "qk_layernorm": True},
    ),
    "stablelm/parallel": ("stablelm", {**ROTATED_HALF, "use_parallel_residual": True}),
    "starcoder2/windows": ("starcoder2", {"sliding_window": 9}),
    "gemma4/own_embeddings": (
        "gemma4_text",
        {**GEMMA4, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
        | {"layer_types": SLIDES * 2, "hidden_size_per_layer_input": 6, "final_logit_softcapping": 5.0},
    ),
    "gemma3n/streams": (
        "gemma3n_text",
        {"head_dim": 8, "sliding_window": 9, "vocab_size_per_layer_input": 90, "num_hidden_layers": 4}
        | {"num_kv_shared_layers": 2, "layer_types": SLIDES * 2, "hidden_size_per_layer_input": 6, "laurel_rank": 5}
        | {"altup_num_inputs": 3, "altup_active_idx": 1, "activation_sparsity_pattern": [0.9, 0.0, 0.8, 0.0]}
        | {"intermediate_size": [48, 40, 48, 32]},
    ),
    "gemma4/experts": (
        "gemma4_text",
        {**GEMMA4, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 24}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "layer_types": SLIDES}
        | {"hidden_size_per_layer_input": 0},
    ),
    "llama4/scaled_inputs": (
        "llama4_text",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "no_rope_layers": [0, 1], "floor_scale": 40, "head_dim": 16}
        | {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 40},
    ),
    "glm4_moe_lite/latent": ("glm4_moe_lite", {**DEEPSEEK, "n_group": 1, "topk_group": 1}),
    "ministral/windows": ("ministral", {"head_dim": 16, "sliding_window": 9, "layer_types": SLIDES}),
    "afmoe/gated": (
        "afmoe",
        {**EXPERTS, "head_dim": 16, "sliding_window": 9, "layer_types": ["sliding_attention", *SLIDES]}
        | {"num_dense_layers": 1, "route_scale": 1.7, "mup_enabled": True, "attention_bias": True},
    ),
    "laguna/gated_numbers": (
        "laguna",
        {**EXPERTS, **BOTH_ROPES, "head_dim": 8, "layer_types": ["full_attention"] * 3, "gating": "per-element"},
    ),
    "laguna/gated_heads": (
        "laguna",
        {**EXPERTS, **BOTH_ROPES, "head_dim": 16, "sliding_window": 9, "layer_types": ["full_attention", *SLIDES]}
        | {"num_attention_heads_per_layer": [4, 8, 4], "shared_expert_intermediate_size": 40}
        | {"moe_routed_scaling_factor": 1.7},
    ),
    "bailing_hybrid/bounded": (
        "bailing_hybrid",
        {"num_key_value_heads": 4, "num_hidden_layers": 3, "head_dim": 8, "num_local_experts": 8, "n_group": 2}
        | {"topk_group": 1, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "kv_lora_rank": 16}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "pad_token_id": None}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "first_k_dense_replace": 1}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "model_max_length": 400},
    ),
    "bailing_moe_v2/groups": (
        "bailing_moe_v2",
        {**EXPERTS, **ROTATED_HALF, "num_shared_experts": 2, "use_qk_norm": True, "head_dim": 16, "n_group": 3}
        | {"topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "use_qkv_bias": True},
    ),
    "lfm3/windows": (
        "lfm3",
        {"layer_types": ["conv", *SLIDES], "num_hidden_layers": 3, "sliding_window": 9, "head_dim": 16}
        | {"num_attention_heads": 6, "norm_eps": 1e-4, "attention_bias": True},
    ),
    "lfm3/plain": (
        "lfm3",
        {"layer_types": ["full_attention", "conv"], "head_dim": 8, "use_sandwich_norm": False, "conv_bias": True}
        | {"use_attention_gate": False, "attention_bias": True, "tie_word_embeddings": False, "conv_L_cache": 3},
    ),
    "longcat_flash/zero_experts": (
        "longcat_flash",
        {key: value for key, value in DEEPSEEK.items() if key not in ROUTED}
        | {"num_layers": 2, "ffn_hidden_size": 48, "moe_topk": 4, "n_routed_experts": 6, "zero_expert_num": 3}
        | {"expert_ffn_hidden_size": 24, "routed_scaling_factor": 1.7},
    ),
    "helium/adjacent": ("helium", {"head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    "hyperclovax/normed": ("hyperclovax", {**GRANITE, "rms_norm_eps": 1e-2, "tie_word_embeddings": True}),
    "hyperclovax/plain": ("hyperclovax", {**GRANITE, "use_post_norm": False, "attention_bias": True}),
    "granitemoe_swa/sinks": (
        "granitemoe_swa",
        {**GRANITE_MOE, "sliding_window": 9, "layer_rope_theta": [0, 100.0], "shared_intermediate_size": 40},
    ),
    "vaultgemma/capped": (
        "vaultgemma",
        {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 3.0}
        | {"final_logit_softcapping": 5.0},
    ),
    "jais2/biases": ("jais2", {"head_dim": 16}),
    "nanochat/other_way_round": ("nanochat", {"num_attention_heads": 4, "final_logit_softcapping": 5.0}),
    "axk1/normed_experts": (
        "axk1",
        {**DEEPSEEK, "n_group": 4, "topk_group": 2, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "minicpm/factors": ("minicpm", {**GRANITE, "attention_multiplier": 8**-0.5, "tie_word_embeddings": False}),
    "minicpm3/factors": (
        "minicpm3",
        {key: value for key, value in DEEPSEEK.items() if key not in ROUTED}
        | {"scale_emb": 3, "scale_depth": 0.9, "dim_model_base": 12, "rms_norm_eps": 1e-4},
    ),
    "flint/sinks": (
        "flint",
        {**EXPERTS, "head_dim": 16, "sliding_window": 9, "layer_types": ["full_attention", *SLIDES]}
        | {"mlp_only_layers": [0], "shared_expert_intermediate_size": 40},
    ),
    "gptj/adjacent": ("gptj", {"rotary_dim": 4, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 400}),
    "gpt_bigcode/one_kv_head": (
        "gpt_bigcode",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 400, "n_inner": 40},
    ),
    "gpt_bigcode/all_kv_heads": (
        "gpt_bigcode",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 400, "multi_query": False},
    ),
    "gpt_neo/windows": (
        "gpt_neo",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 9},
    ),
    "step3p5/limited": (
        "step3p5",
        {"num_key_value_heads": 2, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        | {"share_expert_dim": 40, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 9, "pad_token_id": 1}
        | {"layer_types": [*SLIDES, *SLIDES], "num_sliding_attention_heads": 24, "moe_router_scaling_factor": 1.7}
        | {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
        | {"swiglu_limits": [0, 0, 0.3, 0.2], "swiglu_limits_shared": [0, 0.2, 0, 0.3]}
        | {
            "rope_parameters": {
                "full_attention": {**ROTATED_HALF["rope_parameters"], "rope_theta": 900.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            }
        },
    ),
    "youtu/latent": ("youtu", {key: value for key, value in DEEPSEEK.items() if key not in ROUTED}),
    "solar_open/shared": ("solar_open", {**ROUTED, "n_shared_experts": 2, "head_dim": 16}),
    "flex_olmo/normed_experts": ("flex_olmo", {"num_experts": 5, "num_experts_per_tok": 2, "num_key_value_heads": 2}),
    "cwm/windows": ("cwm", {"bos_token_id": 1, "head_dim": 16, "sliding_window": 9, "layer_types": SLIDES}),
    "mellum/windows": (
        "mellum",
        {**EXPERTS, **BOTH_ROPES, "head_dim": 16, "sliding_window": 9, "layer_types": ["full_attention", *SLIDES]}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "gemma4_unified/windows": ("gemma4_unified_text", GEMMA4),
}
