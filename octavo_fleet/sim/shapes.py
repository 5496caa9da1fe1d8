"""Shapes of public models by name, as their published ``config.json`` have them, without any weights."""

from __future__ import annotations

from typing import Any

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn, "hidden_act": "silu",
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "attention_bias": False,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, **more,
    }  # fmt: skip


def _llama3(
    layers: int, hidden: int, heads: int, head_dim: int, ffn: int, factor: float, **more: Any
) -> dict[str, Any]:
    rope = {"rope_theta": 500_000.0, "rope_scaling": {**LLAMA3_ROPE, "factor": factor}}
    sizes = {"vocab_size": 128_256, "max_position_embeddings": 131_072}
    return _llama(layers, hidden, heads, 8, head_dim, ffn, **rope, **sizes, **more)


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    names = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6}
    rope = {"rope_theta": 1_000_000.0, "max_position_embeddings": 40_960, "vocab_size": 151_936}
    return _llama(layers, hidden, heads, 8, 128, ffn, **{**names, **rope, **more})


def _qwen2(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    names = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6}
    rope = {"rope_theta": 1_000_000.0, "max_position_embeddings": 32_768, "vocab_size": 152_064}
    return _llama(layers, hidden, heads, kv_heads, hidden // heads, ffn, **{**names, **rope, **more})


def _mistral(layers: int, hidden: int, ffn: int, vocab: int, rope_theta: float, **more: Any) -> dict[str, Any]:
    names = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    sizes = {"vocab_size": vocab, "max_position_embeddings": 32_768, "rope_theta": rope_theta}
    return _llama(layers, hidden, 32, 8, 128, ffn, **{**names, **sizes, **more})


LONG_GEMMA3: dict[str, Any] = {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}


def _gemma3(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, window: int, **more: Any) -> dict[str, Any]:
    names = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "rms_norm_eps": 1e-6}
    rope = {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, "query_pre_attn_scalar": 256}
    own: dict[str, Any] = {"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", **names, **rope}
    own |= {"sliding_window": window, "sliding_window_pattern": 6}
    return {**_llama(layers, hidden, heads, kv_heads, 256, ffn, **own), **more}


def _gemma4(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, window: int, **more: Any) -> dict[str, Any]:
    """Five of six layers have a window; the others have wider heads, whose values are their keys."""
    rope = {"sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    rope["full_attention"] = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}
    names = {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "rms_norm_eps": 1e-6}
    own: dict[str, Any] = {"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", **names}
    own |= {"sliding_window": window, "final_logit_softcapping": 30.0, "attention_k_eq_v": True}
    own |= {"global_head_dim": 512, "hidden_size_per_layer_input": 0, "rope_parameters": rope}
    own |= {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * (layers // 6)}
    own |= {"vocab_size": 262_144, "max_position_embeddings": 262_144}
    return {**_llama(layers, hidden, heads, kv_heads, 256, ffn, **own), **more}


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    names = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True}
    return _llama(
        layers, 2880, 64, 8, 64, 2880,
        **names, vocab_size=201_088, max_position_embeddings=131_072, rope_theta=150_000.0,
        rope_scaling={**rope, "original_max_position_embeddings": 4096},
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        sliding_window=128, num_local_experts=experts, num_experts_per_tok=4, swiglu_limit=7.0,
    )  # fmt: skip


_MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
    ],
}


def _deepseek_v2_lite() -> dict[str, Any]:
    rope = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707}
    names = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "rms_norm_eps": 1e-6}
    shape = _llama(
        27, 2048, 16, 16, 64, 10_944,
        **names, vocab_size=102_400, max_position_embeddings=163_840, rope_theta=10_000.0,
        rope_scaling={**rope, "original_max_position_embeddings": 4096},
        q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1408,
        moe_layer_freq=1, first_k_dense_replace=1, topk_method="greedy", n_group=1, topk_group=1,
        norm_topk_prob=False, routed_scaling_factor=1.0, scoring_func="softmax",
    )  # fmt: skip
    del shape["head_dim"]  # that of latent attention is given by its parts
    return shape


def _qwen3_5(layers: int, hidden: int, kv_heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    """Three of four layers have a gated delta rule; sizes are the defaults of transformers' configurations."""
    delta = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4}
    delta |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 128)
    names = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "rms_norm_eps": 1e-6}
    rope = {"rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25}
    sizes = {"vocab_size": 248_320, "max_position_embeddings": 262_144}
    kinds = ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(layers)]
    shape = _llama(layers, hidden, 16, kv_heads, 256, ffn, **{**names, **sizes, **delta, **more})
    return {**shape, "rope_parameters": {"rope_type": "default", **rope}, "layer_types": kinds}


def _experts_of_qwen(experts: int, chosen: int, width: int) -> dict[str, Any]:
    sizes = {"num_experts": experts, "num_experts_per_tok": chosen, "moe_intermediate_size": width}
    return {**sizes, "shared_expert_intermediate_size": width, "norm_topk_prob": True}


NEMOTRON_LETTERS = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}


def _nemotron_h(letters: str, hidden: int, ffn: int, heads: int) -> dict[str, Any]:
    """Each letter is a layer."""
    shape = _llama(len(letters), hidden, 32, 8, 128, ffn, vocab_size=131_072, max_position_embeddings=8192)
    own: dict[str, Any] = {"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h"}
    own["mlp_hidden_act"] = "relu2"
    own |= {"layers_block_type": [NEMOTRON_LETTERS[letter] for letter in letters], "layer_norm_epsilon": 1e-5}
    own |= {"mamba_num_heads": heads, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4}
    own |= {"use_conv_bias": True}
    unused = ("hidden_act", "rms_norm_eps", "num_hidden_layers")
    return {**{key: value for key, value in shape.items() if key not in unused}, **own}


def _gpt2(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "dtype": "float32", "tie_word_embeddings": True,
        "n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": 1024, "vocab_size": 50_257,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    }  # fmt: skip


# fmt: off
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": _qwen3(36, 4096, 32, 12_288),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tie_word_embeddings=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tie_word_embeddings=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tie_word_embeddings=True),
    "qwen3-14b": _qwen3(40, 5120, 40, 17_408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25_600),
    "llama-3.1-8b": _llama3(32, 4096, 32, 128, 14_336, 8.0),
    "llama-3.1-70b": _llama3(80, 8192, 64, 128, 28_672, 8.0),
    "llama-3.2-1b": _llama3(16, 2048, 32, 64, 8192, 32.0, tie_word_embeddings=True),
    "llama-3.2-3b": _llama3(28, 3072, 24, 128, 8192, 32.0, tie_word_embeddings=True),
    "llama-3.3-70b": _llama3(80, 8192, 64, 128, 28_672, 8.0),
    "qwen2.5-0.5b": _qwen2(24, 896, 14, 2, 4864, vocab_size=151_936, tie_word_embeddings=True),
    "qwen2.5-1.5b": _qwen2(28, 1536, 12, 2, 8960, vocab_size=151_936, tie_word_embeddings=True),
    "qwen2.5-3b": _qwen2(36, 2048, 16, 2, 11_008, vocab_size=151_936, tie_word_embeddings=True),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18_944),
    "qwen2.5-14b": _qwen2(48, 5120, 40, 8, 13_824),
    "qwen2.5-32b": _qwen2(64, 5120, 40, 8, 27_648),
    "mistral-7b": _mistral(32, 4096, 14_336, 32_768, 1_000_000.0),
    "mistral-small-24b": _mistral(40, 5120, 32_768, 131_072, 100_000_000.0),
    "phi-4": _llama(
        40, 5120, 40, 10, 128, 17_920,
        architectures=["Phi3ForCausalLM"], model_type="phi3", vocab_size=100_352,
        max_position_embeddings=16_384, original_max_position_embeddings=16_384,
        rope_theta=250_000.0, sliding_window=None,
    ),
    "glm-4-9b": _llama(
        40, 4096, 32, 2, 128, 13_696,
        architectures=["Glm4ForCausalLM"], model_type="glm4", vocab_size=151_552, attention_bias=True,
        max_position_embeddings=32_768, rope_theta=10_000.0, partial_rotary_factor=0.5,
    ),
    "gemma-3-1b": _gemma3(26, 1152, 4, 1, 6912, 512, vocab_size=262_144, max_position_embeddings=32_768),
    "gemma-3-4b": _gemma3(34, 2560, 8, 4, 10_240, 1024, **LONG_GEMMA3),
    "gemma-3-12b": _gemma3(48, 3840, 16, 8, 15_360, 1024, **LONG_GEMMA3),
    "gemma-3-27b": _gemma3(62, 5376, 32, 16, 21_504, 1024, **LONG_GEMMA3, head_dim=128, query_pre_attn_scalar=168),
    "gemma-4-26b-a4b": _gemma4(
        30, 2816, 16, 8, 2112, 1024, num_global_key_value_heads=2,
        enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704,
    ),
    "qwen3-30b-a3b": _qwen3(
        48, 2048, 32, 6144,
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_key_value_heads=4,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[],
    ),
    "qwen3-235b-a22b": _qwen3(
        94, 4096, 64, 12_288,
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_key_value_heads=4,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[],
    ),
    "mixtral-8x7b": _mistral(
        32, 4096, 14_336, 32_000, 1_000_000.0,
        architectures=["MixtralForCausalLM"], model_type="mixtral",
        num_local_experts=8, num_experts_per_tok=2,
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-20b-mxfp4": {**_gpt_oss(24, 32), "quantization_config": _MXFP4},
    "gpt-oss-120b": _gpt_oss(36, 128),
    "gpt-oss-120b-mxfp4": {**_gpt_oss(36, 128), "quantization_config": _MXFP4},
    "deepseek-v2-lite": _deepseek_v2_lite(),
    "qwen3.5-9b": _qwen3_5(32, 4096, 4, 12_288),
    "qwen3.5-35b-a3b": _qwen3_5(
        40, 2048, 2, 512,
        architectures=["Qwen3_5MoeForCausalLM"], model_type="qwen3_5_moe_text",
        **_experts_of_qwen(256, 8, 512),
    ),
    "qwen3-next-80b-a3b": _qwen3_5(
        48, 2048, 2, 5120,
        architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", vocab_size=151_936,
        decoder_sparse_step=1, mlp_only_layers=[],
        **_experts_of_qwen(512, 10, 512),
    ),
    "nemotron-h-8b": _nemotron_h("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", 4096, 21_504, 128),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "tiny": _llama(2, 256, 4, 2, 64, 512, vocab_size=16_384, max_position_embeddings=8192, tie_word_embeddings=True),
}
# fmt: on
"""``tiny`` is not a published model: it is for trying out a measurement."""
