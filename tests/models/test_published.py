"""Configurations with the keys of published checkpoints are understood whole: nothing refused, nothing left over."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import CheckpointError
from octavo.layers.rotary import SwitchedRope, YarnRope
from octavo.models.deepseek import DeepseekConfig
from octavo.models.deepseek_sparse import SparseConfig
from octavo.models.kimi_linear import KimiLinearConfig
from octavo.models.longcat import LongcatConfig
from octavo.models.minimax import MiniMaxConfig
from octavo.models.multimodal_text import text_config
from octavo.models.parts import DecoderConfig, ExpertsPart
from octavo.models.registry import read_config
from octavo.ops.moe import CappedSwish, ClampedSwish

COMMON = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.48.0",
    "use_cache": True,
}


def shape(name: str, V: int, D: int, F: int, L: int, N: int, K: int, C: int, **more: Any) -> dict[str, Any]:
    sizes = {
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": L,
        "num_attention_heads": N,
        "num_key_value_heads": K,
        "max_position_embeddings": C,
    }
    return {**COMMON, "architectures": [name], **sizes, **more}


def gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": width,
        "n_head": heads,
        "n_layer": layers,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    }


GPT2_SIZES = ((768, 12, 12), (1024, 24, 16), (1280, 36, 20), (1600, 48, 25))
DEEPSEEK_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
LATENT = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "attention_bias": False,
}
DOTS3_TYPES = ["sliding_attention"] * 3 + ["full_attention"]
PUBLISHED: dict[str, dict[str, Any]] = {
    **{f"gpt2-{width}": gpt2(width, *rest) for width, *rest in GPT2_SIZES},
    "mistral-7b": shape(
        "MistralForCausalLM", 32768, 4096, 14336, 32, 32, 8, 32768, rope_theta=1e6, sliding_window=None
    ),
    "qwen2.5-7b": shape(
        "Qwen2ForCausalLM", 152064, 3584, 18944, 28, 28, 4, 32768,
        rope_theta=1e6, sliding_window=131072, use_sliding_window=False, max_window_layers=28, use_mrope=False,
    ),
    "qwen3-8b": shape(
        "Qwen3ForCausalLM", 151936, 4096, 12288, 36, 32, 8, 40960,
        head_dim=128, rope_theta=1e6, sliding_window=None, use_sliding_window=False, max_window_layers=36,
        attention_bias=False,
    ),
    "qwen3-30b-a3b": shape(
        "Qwen3MoeForCausalLM", 151936, 2048, 6144, 48, 32, 4, 40960,
        head_dim=128, rope_theta=1e6, sliding_window=None, use_sliding_window=False, max_window_layers=48,
        attention_bias=False, decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True,
        num_experts=128, num_experts_per_tok=8, output_router_logits=False, router_aux_loss_coef=0.001,
    ),
    "qwen3-omni-30b-a3b": {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "text_config": {
            **shape(
                "Qwen3OmniMoeForConditionalGeneration", 152064, 2048, 768, 48, 32, 4, 65536,
                attention_bias=False, decoder_sparse_step=1, head_dim=128, mlp_only_layers=[],
                model_type="qwen3_omni_moe_text", moe_intermediate_size=768, norm_topk_prob=True, num_experts=128,
                num_experts_per_tok=8, output_router_logits=False, rope_theta=1e6, router_aux_loss_coef=0.001,
                shared_expert_intermediate_size=0, sliding_window=None, use_qk_norm=True, use_sliding_window=False,
            ),
            "rope_scaling": {"interleaved": True, "mrope_interleaved": True, "mrope_section": [24, 20, 20],
                             "rope_type": "default", "type": "default"},
        },
    },
    "mixtral-8x7b": shape(
        "MixtralForCausalLM", 32000, 4096, 14336, 32, 32, 8, 32768,
        num_local_experts=8, num_experts_per_tok=2, output_router_logits=False, router_aux_loss_coef=0.02,
        rope_theta=1e6, sliding_window=None, tie_word_embeddings=False,
    ),
    "phi-4-mini": shape(
        "Phi3ForCausalLM", 200064, 3072, 8192, 32, 24, 8, 131072,
        attention_bias=False, embd_pdrop=0.0, full_attn_mod=1, interpolate_factor=1, lm_head_bias=False, mlp_bias=False,
        original_max_position_embeddings=4096, partial_rotary_factor=0.75, resid_pdrop=0.0, sliding_window=262144,
        rope_scaling={"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"}, auto_map={},
        tie_word_embeddings=True,
    ),
    "minimax-m1": shape(
        "MiniMaxM1ForCausalLM", 200064, 6144, 9216, 8, 64, 8, 10240000,
        head_dim=128, rotary_dim=64, rope_theta=1e7, attn_type_list=[0] * 7 + [1], num_local_experts=32,
        num_experts_per_tok=2, postnorm=True, shared_intermediate_size=0, shared_moe_mode="sigmoid",
        router_aux_loss_coef=0.001, router_jitter_noise=0.0, output_router_logits=False, tie_word_embeddings=False,
        layernorm_full_attention_alpha=3.5565588200778455, layernorm_full_attention_beta=1.0,
        layernorm_linear_attention_alpha=3.5565588200778455, layernorm_linear_attention_beta=1.0,
        layernorm_mlp_alpha=3.5565588200778455, layernorm_mlp_beta=1.0,
    ),
    "jamba-1.5-mini": {
        **shape(
            "JambaForCausalLM", 65536, 4096, 14336, 8, 32, 8, 262144,
            attn_layer_offset=4, attn_layer_period=8, expert_layer_offset=1, expert_layer_period=2,
            mamba_conv_bias=True, mamba_d_conv=4, mamba_d_state=16, mamba_dt_rank=256, mamba_expand=2,
            mamba_inner_layernorms=True, mamba_proj_bias=False, num_experts=16, num_experts_per_tok=2,
            num_logits_to_keep=1, output_router_logits=False, pad_token_id=0, router_aux_loss_coef=0.001,
            sliding_window=None, tie_word_embeddings=False, use_mamba_kernels=True,
        ),
        "rms_norm_eps": 1e-6,
    },
    "zamba2-1.2b": shape(
        "Zamba2ForCausalLM", 32000, 2048, 8192, 38, 32, 32, 4096,
        adapter_rank=128, add_bias_linear=False, attention_head_dim=128, attention_hidden_size=4096, chunk_size=256,
        hidden_act="gelu", hybrid_layer_ids=[5, 11, 17, 23, 29, 35], kv_channels=64, mamba_d_conv=4, mamba_d_state=128,
        layers_block_type=(["mamba"] * 5 + ["hybrid"]) * 6 + ["mamba"] * 2, mamba_expand=2, mamba_headdim=64,
        mamba_ngroups=1, n_mamba_heads=64, num_logits_to_keep=1, num_mem_blocks=1, num_query_groups=32, pad_token_id=0,
        rope_theta=10000, time_step_floor=0.0001, time_step_max=0.1, time_step_min=0.001, use_conv_bias=True,
        use_long_context=False, use_mamba_kernels=True, use_mem_eff_path=True, use_mem_rope=True,
        use_shared_attention_adapter=True, tie_word_embeddings=True,
    ),
    "trinity-mini": shape(
        "AfmoeForCausalLM", 200192, 2048, 6144, 32, 32, 4, 131072,
        head_dim=128, global_attn_every_n_layers=4, sliding_window=2048, layer_types=["sliding_attention"] * 3 * 8
        + ["full_attention"] * 8, load_balance_coeff=0.001, moe_intermediate_size=1024, mup_enabled=True, n_group=1,
        num_dense_layers=2, num_expert_groups=1, num_experts=128, num_experts_per_tok=8, num_limited_groups=1,
        num_shared_experts=1, rope_theta=10000, route_norm=True, route_scale=2.826, score_func="sigmoid",
        tie_word_embeddings=False, topk_group=1, use_grouped_mm=True, auto_map={},
    ),
    "step-3.5-flash": {
        **shape(
            "Step3p5ForCausalLM", 128896, 4096, 11264, 45, 64, 8, 262144,
            num_attention_groups=8, head_dim=128, att_impl_type="GQA", moe_num_experts=288, moe_top_k=8, use_moe=True,
            moe_intermediate_size=1280, share_expert_dim=1280, moe_layers_enum=",".join(map(str, range(3, 45))),
            moe_every_n_layer=1, moe_layer_offset=0, moe_router_activation="sigmoid", moe_router_scaling_factor=3.0,
            need_fp32_gate=True, norm_expert_weight=True, num_nextn_predict_layers=3, max_seq_len=262144,
            layer_types=["full_attention", *["sliding_attention"] * 3] * 12, sliding_window=512, use_qk_norm=False,
            rope_theta=[5e6, 1e4, 1e4, 1e4] * 12, partial_rotary_factors=[0.5, 1.0, 1.0, 1.0] * 12, use_rope_layers=[],
            rope_scaling={"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0,
                          "original_max_position_embeddings": 131072},
            yarn_only_types=["full_attention"], use_head_wise_attn_gate=True, use_moe_router_bias=True, sink=False,
            swiglu_limits=[0.0] * 43 + [7.0, 7.0] + [0.0] * 3, swiglu_limits_shared=[0.0] * 43 + [16.0] * 2 + [0.0] * 3,
            attention_other_setting={"attention_type": "sliding_attention", "head_dim": 128, "num_attention_groups": 8,
                                     "num_attention_heads": 96, "true_head_dim": 128},
            tie_word_embeddings=False, zero_centered=True, auto_map={},
        ),
        "num_key_value_heads": None,
    },
    "minimax-m3": shape(
        "MiniMaxM3VLForCausalLM", 200064, 6144, 3072, 60, 64, 4, 524288,
        head_dim=128, hidden_act="swigluoai", dense_intermediate_size=12288, shared_intermediate_size=3072,
        rope_theta=5e6, rotary_dim=64, partial_rotary_factor=0.5, swiglu_alpha=1.702, swiglu_limit=7.0,
        num_local_experts=128, num_experts_per_tok=4, routed_scaling_factor=2.0, moe_layer_freq=[0] * 3 + [1] * 57,
        sparse_attention_config={
            "sparse_num_index_heads": 4, "sparse_index_dim": 128, "sparse_block_size": 128, "sparse_topk_blocks": 16,
            "sparse_local_block": 1, "sparse_attention_freq": [0] * 3 + [1] * 57,
        },
    ),
    "ling-mini-2.0": shape(
        "BailingMoeV2ForCausalLM", 157184, 2048, 5120, 20, 16, 4, 32768,
        embedding_dropout=0.0, first_k_dense_replace=1, head_dim=128, moe_intermediate_size=512, n_group=8,
        moe_router_enable_expert_bias=True, moe_shared_expert_intermediate_size=512, norm_topk_prob=True,
        num_experts=256, num_experts_per_tok=8, num_nextn_predict_layers=0, num_shared_experts=1, output_dropout=0.0,
        partial_rotary_factor=0.5, rope_scaling=None, rope_theta=600000, routed_scaling_factor=2.5,
        router_dtype="fp32", score_function="sigmoid", topk_group=4, use_bias=False, use_qk_norm=True,
        use_qkv_bias=False, use_rmsnorm=True, tie_word_embeddings=False, auto_map={},
    ),
    "longcat-flash": {
        **shape(
            "LongcatFlashForCausalLM", 131072, 6144, 12288, 28, 64, 64, 131072,
            **LATENT, attention_method="MLA", expert_ffn_hidden_size=2048,
            ffn_hidden_size=12288, mla_scale_kv_lora=True, mla_scale_q_lora=True, moe_topk=12, n_routed_experts=512,
            num_layers=28, q_lora_rank=1536, rope_theta=1e7, routed_scaling_factor=6.0, router_bias=False,
            tie_word_embeddings=False, zero_expert_num=256, zero_expert_type="identity", auto_map={},
        ),
        **dict.fromkeys(("intermediate_size", "num_hidden_layers")),
    },
    "kimi-linear-48b": {
        **shape(
            "KimiLinearForCausalLM", 163840, 2304, 9216, 5, 32, 32, 0,
            first_k_dense_replace=1, head_dim=72, kv_lora_rank=512, mla_use_nope=True, model_max_length=1048576,
            linear_attn_config={"full_attn_layers": [4, 5], "head_dim": 128, "kda_layers": [1, 2, 3], "num_heads": 32,
                                "short_conv_kernel_size": 4},
            moe_intermediate_size=1024, moe_layer_freq=1, moe_renormalize=True, moe_router_activation_func="sigmoid",
            num_expert_group=1, num_experts=256, num_experts_per_token=8, num_nextn_predict_layers=0,
            num_shared_experts=1, pad_token_id=163839, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64,
            rope_theta=10000.0, routed_scaling_factor=2.446, tie_word_embeddings=False, topk_group=1,
            use_grouped_topk=True, v_head_dim=128,
        ),
        "max_position_embeddings": None,
    },
    "gemma-2-2b": shape(
        "Gemma2ForCausalLM", 256000, 2304, 9216, 26, 8, 4, 8192,
        head_dim=256, hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh",
        cache_implementation="hybrid", attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0, query_pre_attn_scalar=256, sliding_window=4096,
        attention_bias=False, rope_theta=10000.0,
    ),
    "gemma-3-1b": shape(
        "Gemma3ForCausalLM", 262144, 1152, 6912, 26, 4, 1, 32768,
        hidden_act=None, head_dim=256, hidden_activation="gelu_pytorch_tanh", cache_implementation="hybrid",
        attn_logit_softcapping=None, final_logit_softcapping=None, query_pre_attn_scalar=256, sliding_window=512,
        sliding_window_pattern=6, attention_bias=False, rope_theta=1000000, rope_local_base_freq=10000,
    ),
    "olmo-2-7b": shape(
        "Olmo2ForCausalLM", 100352, 4096, 11008, 32, 32, 32, 4096, attention_bias=False, rope_theta=500000
    ),
    "glm-4-9b": shape(
        "Glm4ForCausalLM", 151552, 4096, 13696, 40, 32, 2, 32768,
        head_dim=128, partial_rotary_factor=0.5, attention_bias=False, rope_theta=10000.0, tie_word_embeddings=False,
    ),
    "gpt-oss-20b": shape(
        "GptOssForCausalLM", 201088, 2880, 2880, 24, 64, 8, 131072,
        attention_bias=True, experts_per_token=4, head_dim=64, initial_context_length=4096,
        layer_types=["sliding_attention", "full_attention"] * 12, num_experts_per_tok=4, num_local_experts=32,
        output_router_logits=False,
        quantization_config={"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
        rope_scaling={
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=128, swiglu_limit=7.0, tie_word_embeddings=False,
    ),
    "deepseek-v2-lite": shape(
        "DeepseekV2ForCausalLM", 102400, 2048, 10944, 27, 16, 16, 163840,
        **LATENT, q_lora_rank=None, aux_loss_alpha=0.001, ep_size=1, first_k_dense_replace=1,
        moe_intermediate_size=1408, moe_layer_freq=1, n_group=1, n_routed_experts=64, n_shared_experts=2,
        norm_topk_prob=False, num_experts_per_tok=6, pretraining_tp=1,
        routed_scaling_factor=1.0, scoring_func="softmax", seq_aux=True, topk_group=1,
        topk_method="greedy", rope_scaling={**DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, auto_map={},
    ),
    "deepseek-v3-widened": shape(
        "DeepseekV3ForCausalLM", 129280, 7168, 18432, 61, 128, 128, 163840,
        **LATENT, q_lora_rank=1536, ep_size=1, first_k_dense_replace=3, moe_intermediate_size=2048, moe_layer_freq=1,
        n_group=8, n_routed_experts=256, n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=8,
        num_nextn_predict_layers=1, routed_scaling_factor=2.5, scoring_func="sigmoid", topk_group=4,
        topk_method="noaux_tc", rope_scaling={**DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, auto_map={},
    ),
    "glm-5": shape(
        "GlmMoeDsaForCausalLM", 154880, 6144, 12288, 78, 64, 64, 202752,
        attention_bias=False, ep_size=1, first_k_dense_replace=3, head_dim=64, index_head_dim=128, index_n_heads=32,
        index_topk=2048, indexer_rope_interleave=True, kv_lora_rank=512, moe_intermediate_size=2048, moe_layer_freq=1,
        n_group=1, n_routed_experts=256, n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=8,
        num_nextn_predict_layers=1, pretraining_tp=1, q_lora_rank=2048, qk_head_dim=256, qk_nope_head_dim=192,
        qk_rope_head_dim=64, rope_interleave=True, rope_parameters={"rope_theta": 1000000, "rope_type": "default"},
        routed_scaling_factor=2.5, scoring_func="sigmoid", topk_group=1, topk_method="noaux_tc", v_head_dim=256,
    ),
    "dots3-note": shape(
        "Dots3NoteForCausalLM", 152064, 5120, 13824, 46, 128, 128, 524288,
        apply_mla_qkv_lora_rescale=True, attention_bias=False, attention_gate_type="headwise",
        first_k_dense_replace=1, head_dim=256, index_head_dim=128, index_n_heads=64, index_topk=2048,
        k_rope_only_layernorm=True, kv_lora_rank=512, layer_types=["full_attention"] * 2 + DOTS3_TYPES * 11,
        moe_intermediate_size=1536, moe_layer_freq=[1] * 46, moe_shared_expert_intermediate_size=1536, n_group=1,
        n_routed_experts=256, n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=8, q_lora_rank=1024,
        qk_nope_head_dim=128, qk_rope_head_dim=64, rope_theta=80000000, routed_scaling_factor=1.0,
        scoring_func="sigmoid", sliding_window_size=512, swa_attention_gate_type="headwise", swa_head_dim=256,
        swa_kv_lora_rank=1024, swa_num_attention_heads=64, swa_num_key_value_heads=64, swa_q_lora_rank=1024,
        swa_qk_nope_head_dim=192, swa_qk_rope_head_dim=64, swa_rope_theta=50000, swa_v_head_dim=128, topk_group=1,
        topk_method="noaux_tc", use_dsa=True, v_head_dim=128,
    ),
}  # fmt: skip
PUBLISHED["deepseek-v3.2"] = {
    **{key: value for key, value in PUBLISHED["deepseek-v3-widened"].items() if key != "auto_map"},
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_understood_without_a_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert read_config(PUBLISHED[name]).architecture == text_config(PUBLISHED[name])["architectures"][0]
    assert not caplog.records


def test_layers_of_dots_3_differ_in_what_they_cache() -> None:
    config = read("dots3-note", DecoderConfig)
    assert [(spec.head_dim, spec.window, spec.index_dim) for spec in config.cache[:6]] == [
        *[(576, 0, 128)] * 2,
        *[(1088, 512, 0)] * 3,
        (576, 0, 128),
    ]
    assert [part.attention.num_heads for part in config.layers[1:3]] == [128, 64]
    scales = [part.attention.scale for part in config.layers[1:3]]
    assert scales == pytest.approx([(5 / 192) ** 0.5, (5 / 256) ** 0.5])
    for key, value, wanted in (
        ("layer_types", ["linear_attention"] * 46, "layer_types"),
        ("moe_layer_freq", [1, 2], "moe_layer_freq"),
        ("moe_layer_freq", 2, "moe_layer_freq"),
        ("per_layer_config", {"0": {"kv_lora_rank": 8}}, "per_layer_config"),
        ("use_dsa", False, "use_dsa"),
    ):
        with pytest.raises(CheckpointError, match=wanted):
            read_config({**PUBLISHED["dots3-note"], key: value})


def read(name: str, kind: type[Any], max_len: int | None = None) -> Any:
    config = read_config(PUBLISHED[name], max_len)
    assert isinstance(config, kind)
    return config


def test_what_they_say() -> None:
    assert [read(f"gpt2-{width}", DecoderConfig).head_dim for width in (768, 1024, 1280, 1600)] == [64] * 4
    phi = read("phi-4-mini", DecoderConfig)
    [(rope, width)] = phi.ropes
    assert isinstance(rope, SwitchedRope)
    assert (width, rope.original, set(phi.windows)) == (96, 4096, {0})
    assert read("phi-4-mini", DecoderConfig, 4096).ropes[0][0].factors[0] == 1.0
    gemma2, gemma3 = read("gemma-2-2b", DecoderConfig), read("gemma-3-1b", DecoderConfig)
    attention = gemma2.layers[0].attention
    assert (gemma2.windows[:3], attention.scale, attention.softcap) == ((4096, 0, 4096), 1 / 16, 50.0)
    thetas = [gemma3.ropes[part.attention.rope][0].theta for part in gemma3.layers[:7]]
    assert (gemma3.windows[:7], thetas) == ((512,) * 5 + (0, 512), [1e4] * 5 + [1e6, 1e4])
    gpt_oss = read("gpt-oss-20b", DecoderConfig)
    [(rope, _)], experts = gpt_oss.ropes, gpt_oss.layers[0].mlp
    assert isinstance(rope, YarnRope)
    assert isinstance(experts, ExpertsPart)
    assert experts.moe.activation == ClampedSwish(1.702, 7.0)
    assert (gpt_oss.windows[:2], rope.truncate) == ((128, 0), False)
    assert read("qwen3-30b-a3b", DecoderConfig).ffn_size == 8 * 768
    v3 = read("deepseek-v3-widened", DeepseekConfig)
    assert (v3.head_dim, v3.num_kv_heads, v3.layers[-1].mlp.routing.groups) == (576, 1, (8, 4))
    assert v3.layers[0].attention.scale == pytest.approx(192**-0.5 * 1.3689**2, rel=1e-4)
    v32, glm = (read(name, SparseConfig) for name in ("deepseek-v3.2", "glm-5"))
    assert {(spec.head_dim, spec.index_dim) for spec in (*v32.cache, *glm.cache)} == {(576, 128)}
    assert [(config.index.num_heads, config.index.is_adjacent) for config in (v32, glm)] == [(64, False), (32, True)]
    step = read("step-3.5-flash", DecoderConfig)
    assert [(part.attention.num_heads, part.attention.window) for part in step.layers[:2]] == [(64, 0), (96, 512)]
    assert [width for _, width in step.ropes] == [64, 128]
    assert [part.mlp.shared_activation for part in step.layers[-3:]] == ["silu", CappedSwish(16.0), CappedSwish(16.0)]
    assert [part.mlp.moe.activation for part in step.layers[-3:]] == ["silu", CappedSwish(7.0), CappedSwish(7.0)]
    ling, longcat = read("ling-mini-2.0", DecoderConfig), read("longcat-flash", LongcatConfig)
    assert (ling.ropes[0][1], ling.layers[1].mlp.routing.groups) == (64, (8, 4))
    assert (longcat.num_layers, longcat.ffn_size, longcat.latent_factor) == (56, 12 * 2048, 12**0.5)
    assert longcat.layers[0].attention.scale == pytest.approx(192**-0.5 * 2)
    kimi, m1 = read("kimi-linear-48b", KimiLinearConfig), read("minimax-m1", MiniMaxConfig)
    assert [spec.kind for spec in kimi.cache] == ["state"] * 3 + ["latent"] * 2
    assert (m1.ropes[0][1], [spec.kind for spec in m1.cache]) == (64, ["state"] * 7 + ["attention"])


@pytest.mark.parametrize("chosen", [None, 2])
def test_jamba_without_experts(chosen: int | None) -> None:
    config = read_config({**PUBLISHED["jamba-1.5-mini"], "num_experts": 1, "num_experts_per_tok": chosen})
    assert not any(isinstance(part.mlp, ExpertsPart) for part in config.layers)


@pytest.mark.parametrize("types", [[[["global"], 10**12]], [[[], 10**12]], [[["global"], "x"]], [[[["global"]], 2]]])
def test_layers_of_gpt_neo_are_bounded_before_they_are_listed(types: list[Any]) -> None:
    values = {"num_heads": 4, "vocab_size": 64, "max_position_embeddings": 64, "attention_types": types}
    with pytest.raises(CheckpointError, match=r"attention_types is .* 2 in all"):
        read_config({"architectures": ["GPTNeoForCausalLM"], "hidden_size": 32, "num_layers": 2, **values})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek-v3-widened", {"quantization_config": {"quant_method": "quip"}}, "quantization_config"),
        ("deepseek-v3-widened", {"topk_method": "greedy"}, "topk_method is 'greedy'; it must be one of noaux_tc"),
        ("deepseek-v3-widened", {"n_group": 7}, "n_group"),
        ("deepseek-v2-lite", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("deepseek-v2-lite", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek-v2-lite", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("trinity-mini", {"route_norm": False}, "route_norm is False; it must be True"),
        (
            "step-3.5-flash",
            {"swiglu_limits_shared": [1.0] * 45},
            "swiglu_limits_shared is 1.0; it must be 0 for layer 0",
        ),
        (
            "step-3.5-flash",
            {"rope_theta": [*range(1, 46)]},
            "rope_theta is .*; it must be the same in all layers of full",
        ),
        ("ling-mini-2.0", {"norm_head": True}, "norm_head is True; it must be False"),
        ("longcat-flash", {"zero_expert_type": "copy"}, "zero_expert_type is 'copy'; it must be 'identity'"),
        ("step-3.5-flash", {"rope_theta": [1e4]}, "rope_theta is .*; it must be a list of 45 or more"),
        ("step-3.5-flash", {"attention_other_setting": {"head_dim": 64}}, "head_dim is 64; it must be 128"),
        ("step-3.5-flash", {"rope_scaling": "x"}, "rope_scaling is 'x'; it must be an object"),
        ("step-3.5-flash", {"rope_parameters": {"full_attention": 3}}, "full_attention is 3; it must be an object"),
        ("step-3.5-flash", {"moe_layers_enum": 3}, "moe_layers_enum is 3; it must be a list of the layers"),
        ("step-3.5-flash", {"moe_layers_enum": True}, "moe_layers_enum is True"),
        ("step-3.5-flash", {"moe_layers_enum": "3,x"}, "moe_layers_enum is '3,x'"),
        ("step-3.5-flash", {"swiglu_limits": ["7"] * 45}, "swiglu_limits is .*; it must be a list of numbers"),
        ("step-3.5-flash", {"swiglu_limits_shared": [[7.0]] * 45}, "swiglu_limits_shared"),
        ("step-3.5-flash", {"layer_types": [["full_attention"]] * 45}, "layer_types"),
        ("step-3.5-flash", {"mlp_layer_types": ["moe"] * 45}, "mlp_layer_types is .*; it must be a list of sparse and"),
        ("longcat-flash", {"zero_expert_num": 1 << 15}, "zero_expert_num is 32768; .* from 0 to 16384"),
        ("jamba-1.5-mini", {"num_experts": None}, "num_experts"),
        ("kimi-linear-48b", {"mla_use_nope": False}, "mla_use_nope is False; it must be true"),
        ("kimi-linear-48b", {"linear_attn_config": {"heads": 3}}, "linear_attn_config"),
        (
            "jamba-1.5-mini",
            {"attn_layer_offset": 8},
            "attn_layer_offset is 8; it must be less than attn_layer_period, 8",
        ),
        ("jamba-1.5-mini", {"mamba_inner_layernorms": False}, "mamba_inner_layernorms"),
        ("zamba2-1.2b", {"num_key_value_heads": 8}, "num_key_value_heads is 8; it must be num_attention_heads, 32"),
        ("zamba2-1.2b", {"use_long_context": True}, "use_long_context is True; it must be false"),
        ("zamba2-1.2b", {"layers_block_type": ["mamba"]}, "layers_block_type"),
        ("minimax-m1", {"postnorm": False}, "postnorm is False; it must be true"),
        ("minimax-m1", {"attn_type_list": [1, 2]}, "attn_type_list"),
        ("qwen2.5-7b", {"use_mrope": True}, "use_mrope"),
        ("qwen3-30b-a3b", {"num_experts_per_tok": 129}, "num_experts_per_tok"),
        ("mistral-7b", {"num_local_experts": 8}, "num_local_experts"),
        ("phi-4-mini", {"lm_head_bias": True}, "lm_head_bias"),
        ("phi-4-mini", {"partial_rotary_factor": 0.5}, "short_factor is 'a list of 48'; it must be a list of 32"),
        ("gemma-2-2b", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma-3-1b", {"rope_parameters": {"full_attention": 3}}, r"rope_parameters\.full_attention"),
        ("gpt2-768", {"n_head": 7}, "n_embd"),
        ("gpt2-768", {"activation_function": "tanh"}, "activation_function"),
        ("gpt2-768", {"add_cross_attention": True}, "add_cross_attention"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config({**PUBLISHED[name], **changes})
