"""What llama.cpp's converter does to further decoders, from its description; see ``gguf_files``."""

from __future__ import annotations

import re
from typing import Any

import gguf
import torch
from torch import Tensor

DECODERS = {
    "afmoe": "AFMOE",
    "apertus": "APERTUS",
    "arcee": "ARCEE",
    "bailing_moe_v2": "BAILINGMOE2",
    "bloom": "BLOOM",
    "cohere": "COMMAND_R",
    "cohere2": "COHERE2",
    "cohere2_moe": "GLM4_MOE",
    "dots1": "DOTS1",
    "ernie4_5": "ERNIE4_5",
    "ernie4_5_moe": "ERNIE4_5_MOE",
    "exaone4": "EXAONE4",
    "exaone_moe": "EXAONE_MOE",
    "falcon": "FALCON",
    "glm": "CHATGLM",
    "glm4_moe": "GLM4_MOE",
    "gpt_neox": "GPTNEOX",
    "granite": "GRANITE",
    "granitemoe": "GRANITE_MOE",
    "granitemoeshared": "GRANITE_MOE",
    "hunyuan_v1_dense": "HUNYUAN_DENSE",
    "hunyuan_v1_moe": "HUNYUAN_MOE",
    "hy_v3": "DOTS1",
    "jais2": "JAIS2",
    "laguna": "STEP35",
    "llama4_text": "LLAMA4",
    "mellum": "QWEN3MOE",
    "mimo_v2_flash": "MIMO2",
    "minicpm": "MINICPM",
    "minimax_m2": "MINIMAXM2",
    "ministral3": "MISTRAL3",
    "mpt": "MPT",
    "nemotron": "NEMOTRON",
    "olmo": "OLMO",
    "olmo3": "OLMO2",
    "olmoe": "OLMOE",
    "phi": "PHI2",
    "phimoe": "PHIMOE",
    "seed_oss": "SEED_OSS",
    "smollm3": "SMOLLM3",
    "stablelm": "STABLELM",
    "starcoder2": "STARCODER2",
    "step3p5": "STEP35",
}
WRITTEN = {"cohere2_moe": "cohere2moe", "hy_v3": "hy_v3", "laguna": "laguna", "mellum": "mellum"}
"""Architectures that the package does not know: their names, with the tensors of a known one."""
PERMUTED = ("arcee", "granite", "granitemoe", "granitemoeshared", "minicpm", "ministral3", "olmo", "smollm3")
LISTED = ("afmoe", "cohere2_moe", "exaone4", "exaone_moe", "mellum", "mimo_v2_flash", "olmo3", "step3p5")
"""Those whose files say which layers have windows."""
SIGMOID = ("afmoe", "bailing_moe_v2", "dots1", "exaone_moe", "glm4_moe", "hy_v3", "mimo_v2_flash", "minimax_m2")


def converted_decoder(kind: str, config: dict[str, Any], name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A parameter under the names that it is written by, which may be several."""
    layer = "blk." + name.partition(".layers.")[2].partition(".")[0]
    heads = config.get("num_attention_heads") or config.get("n_head")
    if kind in PERMUTED and (match := re.search(r"\.([qk])_proj\.", name)):
        count = heads if match[1] == "q" else config["num_key_value_heads"]
        return {name: tensor.reshape(count, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)}
    if "query_key_value" in name and kind != "bailing_moe_v2":
        groups = config["num_kv_heads"] if config.get("new_decoder_architecture") else heads
        groups = 1 if config.get("multi_query") and not config.get("new_decoder_architecture") else groups
        each = heads // groups
        rows = tensor.reshape(groups, each + 2, -1, *tensor.shape[1:])
        parts = (rows[:, :each], rows[:, each], rows[:, each + 1])
        joined = torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])
        return {name.removeprefix("transformer.") if kind == "bloom" else name: joined}
    if kind == "bloom":
        return {name.removeprefix("transformer."): tensor}
    if name.endswith(".moe.router_bias"):
        return {f"{layer}.exp_probs_b.bias": tensor}
    if kind in ("nemotron", "step3p5") and name.endswith("norm.weight"):
        return {name: tensor + 1}
    if match := re.search(r"(input_linear|output_linear)\.weight", name):
        kinds = "exps" if "block_sparse" in name else "shexp"
        if match[1] == "output_linear":
            return {f"{layer}.ffn_down_{kinds}.weight": tensor}
        gates, ups = tensor.chunk(2, dim=-2)
        return {f"{layer}.ffn_gate_{kinds}.weight": gates, f"{layer}.ffn_up_{kinds}.weight": ups}
    if kind == "llama4_text" and name.endswith("experts.gate_up_proj"):
        gates, ups = tensor.transpose(1, 2).chunk(2, dim=1)
        return {f"{layer}.ffn_gate_exps.weight": gates, f"{layer}.ffn_up_exps.weight": ups}
    if kind == "llama4_text" and name.endswith("experts.down_proj"):
        return {f"{layer}.ffn_down_exps.weight": tensor.transpose(1, 2)}
    if ".act_fn." in name:
        return {}
    if name.endswith("expert_bias") and kind in ("afmoe", "bailing_moe_v2"):
        return {f"{layer}.exp_probs_b.bias": tensor}
    if kind == "hy_v3":
        name = name.replace("shared_mlp", "shared_experts").replace("router.gate", "gate")
        return {f"{layer}.exp_probs_b.bias" if name.endswith("expert_bias") else name: tensor}
    if name.endswith("attention_sink_bias"):
        return {f"{layer}.attn_sinks.weight": tensor}
    if name.endswith("e_score_correction_bias"):
        return {f"{layer}.exp_probs_b.bias": tensor}
    return {name: tensor}


def write_decoder_keys(writer: gguf.GGUFWriter, kind: str, config: dict[str, Any]) -> None:
    """The metadata of one of ``DECODERS``."""

    def first(*names: str) -> Any:
        return next((config[name] for name in names if config.get(name) is not None), None)

    hidden, heads = first("hidden_size", "d_model"), first("num_attention_heads", "n_head", "n_heads")
    layers = first("num_hidden_layers", "n_layer", "n_layers")
    writer.add_block_count(layers)
    writer.add_context_length(first("max_position_embeddings", "seq_length", "max_seq_len") or 2048)
    writer.add_embedding_length(hidden)
    writer.add_head_count(_heads_of_layers(kind, config, layers) or heads)
    if (eps := first("layer_norm_epsilon", "layer_norm_eps", "norm_eps", "norm_epsilon")) is not None or kind == "olmo":
        writer.add_layer_norm_eps(eps or 1e-5)
    if config.get("rms_norm_eps") is not None:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _write_heads(writer, kind, config, hidden, heads)
    _write_windows(writer, kind, config)
    _write_mixture(writer, kind, config)
    for name, key in (
        ("attention_multiplier", "attention_scale"),
        ("embedding_multiplier", "embedding_scale"),
        ("residual_multiplier", "residual_scale"),
        ("logits_scaling", "logit_scale"),
        ("logit_scale", "logit_scale"),
        ("clip_qkv", "clamp_kqv"),
    ):
        if config.get(name) is not None:
            getattr(writer, f"add_{key}")(config[name])
    if kind in ("gpt_neox", "stablelm"):
        writer.add_parallel_residual(config["use_parallel_residual"])
    if kind == "minicpm":
        writer.add_embedding_scale(config["scale_emb"])
        writer.add_residual_scale(config["scale_depth"] / layers**0.5)
        writer.add_logit_scale(hidden / config["dim_model_base"])
    if kind == "apertus":
        writer.add_xielu_beta([0.5] * layers)
        writer.add_xielu_eps([-1e-6] * layers)
    if kind == "laguna":
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
        writer.add_expert_weights_scale(config["moe_routed_scaling_factor"])
        writer.add_expert_weights_norm(True)
        writer.add_leading_dense_block_count(config["mlp_layer_types"].index("sparse"))
        writer.add_sliding_window_pattern(2)
        writer.add_rope_dimension_count_swa(config["head_dim"])
    if kind == "step3p5":
        writer.add_expert_shared_feed_forward_length(config["share_expert_dim"])
        writer.add_expert_weights_scale(config["moe_router_scaling_factor"])
        writer.add_expert_weights_norm(True)
        writer.add_leading_dense_block_count(config["mlp_layer_types"].index("sparse"))
        writer.add_moe_every_n_layers(1)
        writer.add_swiglu_clamp_exp([float(limit) for limit in config["swiglu_limits"]])
        writer.add_swiglu_clamp_shexp([float(limit) for limit in config["swiglu_limits_shared"]])
    if kind == "mpt":
        writer.add_clamp_kqv(config["attn_config"]["clip_qkv"])
        writer.add_max_alibi_bias(config["attn_config"]["alibi_bias_max"])


def _heads_of_layers(kind: str, config: dict[str, Any], layers: int) -> list[int] | None:
    """The query heads of each layer, of families whose files have them."""
    if kind != "step3p5":
        return config.get("num_attention_heads_per_layer")
    own = (config["per_layer_config"].get(str(i), {}) for i in range(layers))
    return [part.get("num_attention_heads", config["num_attention_heads"]) for part in own]


def _write_heads(writer: gguf.GGUFWriter, kind: str, config: dict[str, Any], hidden: int, heads: int) -> None:
    """Sizes, numbers of heads, and rotary frequencies."""
    size = config.get("intermediate_size_mlp" if kind == "llama4_text" else "intermediate_size")
    size = config.get("prefix_dense_intermediate_size") or size
    writer.add_feed_forward_length(size or config.get("ffn_hidden_size") or 4 * hidden)
    kv_heads = config.get("num_kv_heads" if kind == "falcon" else "num_key_value_heads", heads)
    if kind == "falcon" and not config["new_decoder_architecture"]:
        kv_heads = 1 if config["multi_query"] else heads
    if kind == "mimo_v2_flash":
        kv_heads = [kv_heads * (1 + (of == "sliding_attention")) for of in config["layer_types"]]
    writer.add_head_count_kv(kv_heads)
    head_dim = config.get("head_dim") or hidden // heads
    if config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(config.get("v_head_dim", head_dim))
    if (rope := config.get("rope_parameters")) is None:
        return
    if "full_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
        if kind == "step3p5":  # readers know that it is half of a head without windows
            rope = {**rope, "partial_rotary_factor": 1.0}
    base = rope["rope_theta"]
    if "alpha" in rope:
        base *= rope["alpha"] ** (head_dim / (head_dim - 2))
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1)
        writer.add_rope_scaling_orig_ctx_len(1000)
    writer.add_rope_freq_base(base)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "llama_4_scaling_beta" in rope:
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _write_windows(writer: gguf.GGUFWriter, kind: str, config: dict[str, Any]) -> None:
    if config.get("sliding_window") is None:
        return
    writer.add_sliding_window(config["sliding_window"])
    if kind in LISTED:
        writer.add_sliding_window_pattern([of == "sliding_attention" for of in config["layer_types"]])


def _write_mixture(writer: gguf.GGUFWriter, kind: str, config: dict[str, Any]) -> None:
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if not (count := next((config[name] for name in names if config.get(name)), 0)):
        return
    writer.add_expert_count(count)
    used = [config.get(name) for name in ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk")]
    writer.add_expert_used_count(next(filter(None, used)))
    size = config.get("moe_intermediate_size") or config["intermediate_size"]
    if kind not in ("granitemoe", "granitemoeshared", "olmoe", "phimoe"):
        writer.add_expert_feed_forward_length(size)
    shared = [config.get(name) for name in ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")]
    if num_shared := next(filter(None, shared), 0):
        writer.add_expert_shared_count(num_shared)
        if kind not in ("dots1", "glm4_moe", "mimo_v2_flash"):
            writer.add_expert_shared_feed_forward_length(num_shared * size)
    if "shared_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if sections := (config.get("rope_parameters") or {}).get("mrope_section"):
        writer.add_rope_dimension_sections([*sections, 0])
    if kind in SIGMOID or config.get("expert_selection_fn") == "sigmoid":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    elif kind == "cohere2_moe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    scales = (config.get(f"{name}_factor") for name in ("routed_scaling", "router_scaling"))
    if (scale := next(filter(None, (*scales, config.get("route_scale"))), None)) is not None:
        writer.add_expert_weights_scale(scale)
    if "norm_topk_prob" in config and kind != "olmoe":
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if (config.get("n_group") or 1) > 1:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if kind == "afmoe":
        writer.add_expert_weights_norm(True)
        writer.add_leading_dense_block_count(config["num_dense_layers"])
    if "first_k_dense_replace" in config:
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    if "moe_layer_start_index" in config:
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    for name in ("interleave_moe_layer_step", "moe_layer_interval"):
        if name in config:
            writer.add_interleave_moe_layer_step(config[name])
