"""What llama.cpp's converter does to models with recurrent layers, from its description; see ``gguf_files``."""

from __future__ import annotations

import re
from typing import Any

import gguf
import torch
from torch import Tensor

from tests.models.families import MAX_LEN

HYBRIDS = {
    "qwen3_next": "QWEN3NEXT",
    "qwen3_5_text": "QWEN35",
    "qwen3_5_moe_text": "QWEN35MOE",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2MOE",
    "mamba": "MAMBA",
    "falcon_mamba": "MAMBA",
    "mamba2": "MAMBA2",
    "nemotron_h": "NEMOTRON_H_MOE",
    "nemotron_h_dense": "NEMOTRON_H",
    "granitemoehybrid": "GRANITE_HYBRID",
    "falcon_h1": "FALCON_H1",
    "jamba": "JAMBA",
    "kimi_linear": "KIMI_LINEAR",
}


def converted(kind: str, config: dict[str, Any], name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A parameter under the names that it is written by, which may be several."""
    layer = "blk." + name.partition(".layers.")[2].partition(".")[0]
    if kind.startswith("qwen3"):
        return _delta(kind, config, name, tensor, layer)
    if kind == "granitemoehybrid":
        return _granite(config, name, tensor, layer)
    if kind == "kimi_linear":
        return _kimi(config, name, tensor)
    if kind == "falcon_h1":
        return _mamba(kind, config, name, _multiplied(config, name, tensor))
    if kind.startswith("lfm2"):
        name = name.replace("expert_bias", "expert_bias.bias")
        return {name: tensor.squeeze(1) if name.endswith("conv.conv.weight") else tensor}
    if kind in ("mamba", "falcon_mamba", "jamba"):
        return {name: -tensor.exp() if name.endswith("A_log") else tensor.squeeze(1) if "conv1d.w" in name else tensor}
    return _mamba(kind, config, name, tensor)


def _delta(kind: str, config: dict[str, Any], name: str, tensor: Tensor, layer: str) -> dict[str, Tensor]:
    if name == "mtp.fc.weight":
        return {f"blk.{config['num_hidden_layers']}.nextn.eh_proj.weight": tensor}
    G, N = config["linear_num_key_heads"], config["linear_num_value_heads"]
    K, V, tiles = config["linear_key_head_dim"], config["linear_value_head_dim"], kind != "qwen3_next"

    def tiled(values: Tensor, width: int) -> Tensor:
        """Rows of value heads: the first of each key head, then the second."""
        rows = values.reshape(G, N // G, width, -1)
        return rows.transpose(0, 1).reshape(values.shape) if tiles else values

    if name.endswith("in_proj_qkvz.weight"):
        sizes = [K, K, N // G * V, N // G * V]
        q, k, v, z = (part.flatten(0, 1) for part in tensor.view(G, sum(sizes), -1).split(sizes, dim=1))
        return {f"{layer}.attn_qkv.weight": torch.cat([q, k, v]), f"{layer}.attn_gate.weight": z}
    if name.endswith("A_log"):
        return {name: tiled(-tensor.exp(), 1)}
    if name.endswith("dt_bias"):
        return {name.replace("dt_bias", "dt_proj.bias"): tiled(tensor, 1)}
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        rows = tensor.squeeze(1)
        return {name: torch.cat([rows[: 2 * G * K], tiled(rows[2 * G * K :], V)])}
    if name.endswith("in_proj_z.weight"):
        return {name: tiled(tensor, V)}
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight")):
        return {name: tiled(tensor, 1)}
    if name.endswith("linear_attn.out_proj.weight"):
        return {name: tiled(tensor.t().contiguous(), V).t()}
    if name.endswith("shared_expert_gate.weight"):
        return {name: tensor.squeeze()}
    is_offset = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
    return {name: tensor + 1 if is_offset else tensor}


def fused_experts(stacked: dict[str, Tensor]) -> dict[str, Tensor]:
    """With gates and ups of all experts in one tensor, as an option of the converter has it."""
    found = {name: tensor for name, tensor in stacked.items() if "down_proj" in name}
    for name, gates in stacked.items():
        if "gate_proj" in name:
            layer = name.partition(".layers.")[2].partition(".")[0]
            ups = stacked[name.replace("gate_proj", "up_proj")]
            found[f"blk.{layer}.ffn_gate_up_exps.weight"] = torch.cat([gates, ups], dim=1)
    return found


def _mamba(kind: str, config: dict[str, Any], name: str, tensor: Tensor) -> dict[str, Tensor]:
    if name.endswith("A_log"):
        return {name: -tensor.exp().unsqueeze(1)}
    if name.endswith(".D"):
        return {name: tensor.unsqueeze(1)}
    if name.endswith("dt_bias"):
        return {name.replace("dt_bias", "dt.bias" if kind.startswith("nemotron") else "dt_proj.bias"): tensor}
    if name.endswith("conv1d.weight"):
        return {name: tensor.squeeze(1)}
    if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        return {name: tensor.view(config.get("n_groups") or config["mamba_n_groups"], -1)}
    return {name.replace("e_score_correction_bias", "e_score_correction.bias"): tensor}


def _granite(config: dict[str, Any], name: str, tensor: Tensor, layer: str) -> dict[str, Tensor]:
    if name.endswith("input_linear.weight"):
        kind = "_exps" if "block_sparse" in name else "_shexp" if config["num_local_experts"] else ""
        gate, up = tensor.chunk(2, dim=-2)
        return {f"{layer}.ffn_gate{kind}.weight": gate, f"{layer}.ffn_up{kind}.weight": up}
    if name.endswith("shared_mlp.output_linear.weight") and not config["num_local_experts"]:
        return {f"{layer}.ffn_down.weight": tensor}
    if match := re.search(r"self_attn\.([qk])_proj", name):
        heads = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
        return {name: tensor.reshape(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)}
    return _mamba("granite", config, name, tensor)


def _multiplied(config: dict[str, Any], name: str, tensor: Tensor) -> Tensor:
    """Falcon-H1's weights with its factors."""
    gates, downs = config["mlp_multipliers"]
    into, inner = config["attention_in_multiplier"], config["mamba_d_ssm"]
    shared = config["mamba_n_groups"] * config["mamba_d_state"]
    factors = {
        "gate_proj": gates,
        "down_proj": downs,
        "k_proj": into * config["key_multiplier"],
        "q_proj": into,
        "v_proj": into,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    if "mamba.in_proj" in name:
        counts = torch.tensor([inner, inner, shared, shared, config["mamba_n_heads"]])
        scales = torch.tensor(config["ssm_multipliers"]).repeat_interleave(counts)
        return tensor * config["ssm_in_multiplier"] * scales.unsqueeze(1)
    return tensor * next((factor for part, factor in factors.items() if f".{part}." in f".{name}"), 1.0)


def _kimi(config: dict[str, Any], name: str, tensor: Tensor) -> dict[str, Tensor]:
    if name.endswith("conv1d.weight"):
        return {name: tensor.reshape(1, len(tensor), 1, -1)}
    if name.endswith("A_log"):
        return {name: -tensor.exp()}
    if name.endswith("dt_bias"):
        return {name.replace("dt_bias", "dt_proj.bias"): tensor}
    if name.endswith("kv_b_proj.weight"):
        sizes = [config["qk_nope_head_dim"], config["v_head_dim"]]
        keys, values = tensor.view(config["num_attention_heads"], -1, config["kv_lora_rank"]).split(sizes, dim=1)
        return {name.replace("kv_b", "k_b"): keys.transpose(1, 2), name.replace("kv_b", "v_b"): values}
    dense = re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", name)  # as transformers writes them
    return {dense.replace("e_score_correction_bias", "e_score_correction.bias"): tensor}


def write_keys(writer: gguf.GGUFWriter, kind: str, config: dict[str, Any]) -> None:
    kinds = config.get("layer_types") or config.get("layers_block_type") or []
    drafting = config.get("mtp_num_hidden_layers", 0)
    writer.add_block_count((config.get("num_hidden_layers") or len(kinds)) + drafting)
    if drafting:
        writer.add_nextn_predict_layers(drafting)
    writer.add_context_length(config.get("max_position_embeddings", MAX_LEN))
    writer.add_embedding_length(config["hidden_size"])
    eps = next(config[key] for key in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon") if key in config)
    is_nemotron = kind.startswith("nemotron")
    (writer.add_layer_norm_eps if is_nemotron else writer.add_layer_norm_rms_eps)(eps)
    writer.add_vocab_size(config["vocab_size"])
    if kind in ("mamba", "falcon_mamba"):
        writer.add_head_count(0)
        writer.add_feed_forward_length(0)
        writer.add_ssm_conv_kernel(config["conv_kernel"])
        writer.add_ssm_inner_size(config["intermediate_size"])
        writer.add_ssm_state_size(config["state_size"])
        writer.add_ssm_time_step_rank(config["time_step_rank"])
        writer.add_ssm_dt_b_c_rms(kind == "falcon_mamba")
        return
    if kind == "jamba":
        kinds = ["linear_attention"] * config["num_hidden_layers"]
        for i in range(config["attn_layer_offset"], len(kinds), config["attn_layer_period"]):
            kinds[i] = "full_attention"
        writer.add_ssm_conv_kernel(config["mamba_d_conv"])
        writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
        writer.add_ssm_state_size(config["mamba_d_state"])
        writer.add_ssm_time_step_rank(config["mamba_dt_rank"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv([config["num_key_value_heads"] * (own == "full_attention") for own in kinds])
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        return
    if kind == "mamba2":
        writer.add_head_count(0)
        writer.add_feed_forward_length(0)
        _write_mamba(writer, config, config["num_heads"] * config["head_dim"], config["num_heads"])
        return
    writer.add_head_count(config["num_attention_heads"])
    _write_attention(writer, kind, config, kinds)
    _write_experts(writer, kind, config)
    if kind.startswith("qwen3"):
        heads = config["linear_num_value_heads"]
        writer.add_full_attention_interval(kinds.index("full_attention") + 1)
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_inner_size(heads * config["linear_value_head_dim"])
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", [of != "full_attention" for of in kinds])
        if kind.startswith("qwen3_5"):
            sections = config["rope_parameters"].get("mrope_section", [1, 1, 0])
            writer.add_rope_dimension_sections([*sections, 0])
    elif kind.startswith("lfm2"):
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    elif kind == "kimi_linear":
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_kda_head_dim(config["linear_head_dim"])
    elif kind.startswith("nemotron"):
        inner = config["mamba_num_heads"] * config["mamba_head_dim"]
        _write_mamba(writer, config, inner, config["mamba_num_heads"])
    else:
        _write_mamba(writer, config, config.get("mamba_d_ssm") or 2 * config["hidden_size"], config["mamba_n_heads"])
    if kind == "granitemoehybrid":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
        writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")


def _write_mamba(writer: gguf.GGUFWriter, config: dict[str, Any], inner: int, heads: int) -> None:
    def size(*keys: str) -> int:
        return next(int(config[key]) for key in keys if key in config)

    writer.add_ssm_conv_kernel(size("conv_kernel", "mamba_d_conv"))
    writer.add_ssm_state_size(size("state_size", "ssm_state_size", "mamba_d_state"))
    writer.add_ssm_group_count(size("n_groups", "mamba_n_groups"))
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_time_step_rank(heads)


def _write_attention(writer: gguf.GGUFWriter, kind: str, config: dict[str, Any], kinds: list[str]) -> None:
    by_layer = kind.startswith(("lfm2", "nemotron", "granite", "kimi"))
    kv_heads = 1 if kind == "kimi_linear" else config["num_key_value_heads"]
    writer.add_head_count_kv([kv_heads * (own == "full_attention") for own in kinds] if by_layer else kv_heads)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if kind == "kimi_linear":
        rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
        writer.add_rope_dimension_count(rotated)
        writer.add_kv_lora_rank(rank)
        writer.add_key_length(rank + rotated)
        writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
        writer.add_value_length_mla(config["v_head_dim"])
        return
    if kind != "granitemoehybrid":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if rope := config.get("rope_parameters"):
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))


def _write_experts(writer: gguf.GGUFWriter, kind: str, config: dict[str, Any]) -> None:
    kinds = config.get("layers_block_type") or []
    size = config.get("moe_intermediate_size") if kind == "nemotron_h" else config.get("intermediate_size")
    if kind.startswith("nemotron"):
        writer.add_feed_forward_length([size * (own in ("moe", "mlp")) for own in kinds])
    elif size is not None:
        dense = config.get("shared_intermediate_size") if not config.get("num_local_experts") else None
        writer.add_feed_forward_length(dense or size)
    counts = (config.get(key) for key in ("num_local_experts", "n_routed_experts", "num_experts"))
    count = next(filter(None, counts), 0)
    if kind == "granitemoehybrid" and not count:
        writer.add_expert_count(0)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if not count or kind == "nemotron_h_dense":
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.get("num_experts_per_tok") or config["num_experts_per_token"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    for key in ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"):
        if key in config:
            writer.add_expert_shared_feed_forward_length(config[key])
    if "routed_scaling_factor" in config:
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if kind == "lfm2_moe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if kind == "kimi_linear":
        writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
        writer.add_expert_shared_count(config["num_shared_experts"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config["num_expert_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if kind == "nemotron_h":
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_group_count(config["n_group"])
        if config.get("moe_latent_size"):
            writer.add_moe_latent_size(config["moe_latent_size"])
