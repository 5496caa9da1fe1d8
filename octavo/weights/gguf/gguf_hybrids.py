"""GGUF architectures with recurrent layers; see ``gguf_families``.

llama.cpp's converter writes ``-exp(A_log)`` in place of ``A_log``, and adds one to the norms of Qwen's models.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.weights.gguf.gguf_dense import drop, read_factors
from octavo.weights.gguf.gguf_families import (
    has_bias,
    must_be_sigmoid,
    read_experts,
    read_llama,
    read_routing,
    with_sections,
)
from octavo.weights.gguf.gguf_metadata import Metadata
from octavo.weights.gguf.gguf_mixtures import GRANITE_MOE
from octavo.weights.gguf.gguf_rope import read_rope
from octavo.weights.gguf.tensor_names import (
    ATTENTION,
    DEEPSEEK,
    EXPERTS,
    GATED,
    HEAD_NORMS,
    LLAMA,
    SHARED,
    Config,
    GgufFamily,
)

# Qwen3-Next and Qwen3.5: the gated delta rule.

DELTA = {
    **ATTENTION,
    **HEAD_NORMS,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
DELTA_EXPERTS = {**DELTA, **EXPERTS, **SHARED, "ffn_gate_up_exps": "mlp.experts.*.gate_proj|mlp.experts.*.up_proj"}


def _delta(data: Metadata, config: Config) -> None:
    read_llama(data, config)
    _delta_sizes(data, config)


def _delta_experts(data: Metadata, config: Config) -> None:
    read_llama(data, config, ffn_size=data.count("expert_feed_forward_length"))
    read_experts(data, config, "num_local_experts", size="moe_intermediate_size")
    config["shared_expert_intermediate_size"] = data.count("expert_shared_feed_forward_length")
    config["norm_topk_prob"] = data.flag("expert_weights_norm", True)
    _delta_sizes(data, config)


def _delta_sizes(data: Metadata, config: Config) -> None:
    sizes = ("num_value_heads", "value_head_dim", "num_key_heads", "key_head_dim", "conv_kernel_dim")
    _read_heads(data, config, *(f"linear_{name}" for name in sizes))
    config["full_attention_interval"] = data.count("full_attention_interval", 4)
    if data.has("attention.recurrent_layers"):
        kinds = {True: "linear_attention", False: "full_attention"}
        config["layer_types"] = [
            kinds[is_recurrent]
            for is_recurrent in data.flags("attention.recurrent_layers", config["num_hidden_layers"])
        ]
    config["norms_include_one"] = True
    if data.has("rope.dimension_sections"):
        with_sections(data, config, is_interleaved=True)


TILED = {"has_tiled_heads": True}


def _tiled_order(config: Config, name: str, count: int) -> npt.NDArray[np.int64] | None:
    """Where the rows of value heads are: the first one of every key head, then the second of every one, and so on.

    The columns of ``out_proj`` are left in this order (``has_tiled_heads``), as blocks may be wider than a head.
    """
    G, N = config["linear_num_key_heads"], config["linear_num_value_heads"]
    module = name.partition(".linear_attn.")[2].removesuffix(".weight")
    if module not in ("in_proj_qkv", "conv1d", "in_proj_z", "in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        return None
    before = 2 * G * config["linear_key_head_dim"] if module in ("in_proj_qkv", "conv1d") else 0
    heads = np.arange(N).reshape(-1, G).T.ravel()
    own = np.arange(before, count).reshape(N, -1)[heads].ravel()
    return np.concatenate((np.arange(before), own))


def _read_heads(data: Metadata, config: Config, *names: str) -> None:
    """Set, under these names, the heads of a recurrent layer, their width, groups, the size of a state, the width of
    the convolution, and whether that and the map of inputs have biases."""
    heads = data.count("ssm.time_step_rank")
    if (inner := data.count("ssm.inner_size")) % heads:
        data.fail("ssm.inner_size", f"is {inner}, but must be a multiple of the number of heads, {heads}")
    sizes = (data.count(f"ssm.{name}") for name in ("group_count", "state_size", "conv_kernel"))
    biases = (has_bias(data, f"ssm_{name}") for name in ("conv1d", "in"))
    config |= zip(names, (heads, inner // heads, *sizes, *biases), strict=False)


# LFM2: short convolutions.

LFM2_EXPERTS = {
    **ATTENTION,
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b": "feed_forward.expert_bias",
    "ffn_gate_exps": "feed_forward.experts.*.w1",
    "ffn_up_exps": "feed_forward.experts.*.w3",
    "ffn_down_exps": "feed_forward.experts.*.w2",
}
LFM2_OUTER = {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"}


def _lfm2(data: Metadata, config: Config) -> None:
    kv_heads = _attention_layers(data, config)
    read_llama(data, config, kv_heads=max(kv_heads))
    config["norm_eps"] = config.pop("rms_norm_eps")
    config["layer_types"] = ["full_attention" if count else "conv" for count in kv_heads]
    config["conv_L_cache"] = data.count("shortconv.l_cache")
    config["conv_bias"] = has_bias(data, "shortconv.conv")
    config["block_auto_adjust_ff_dim"] = False
    drop(config, "hidden_act", "attention_bias")


def _lfm2_moe(data: Metadata, config: Config) -> None:
    _lfm2(data, config)
    del config["block_auto_adjust_ff_dim"]
    must_be_sigmoid(data)
    read_experts(data, config, "num_experts", size="moe_intermediate_size")
    config["num_dense_layers"] = data.count("leading_dense_block_count", 0, low=0)
    config["norm_topk_prob"] = data.flag("expert_weights_norm", True)
    config["routed_scaling_factor"] = data.real("expert_weights_scale", 1.0)
    config["use_expert_bias"] = any(".exp_probs_b" in name for name in data.file.tensors)


def _attention_layers(data: Metadata, config: Config) -> list[int]:
    """The KV heads of each layer, 0 for those without attention."""
    kv_heads = data.counts("attention.head_count_kv", config["num_hidden_layers"])
    if len(set(kv_heads) - {0}) > 1:
        data.fail("attention.head_count_kv", "layers with attention must have as many")
    return kv_heads


# Mamba-2, alone and beside other layers.


def _mamba_names(prefix: str) -> dict[str, str]:
    parts = {"in": "in_proj", "conv1d": "conv1d", "a": "A_log", "d": "D", "dt": "dt_bias", "norm": "norm"}
    return {f"ssm_{part}": f"{prefix}.{own}" for part, own in {**parts, "out": "out_proj"}.items()}


MAMBA = {**_mamba_names("mixer"), "attn_norm": "norm", "ssm_x": "mixer.x_proj", "ssm_dt": "mixer.dt_proj"}
MAMBA_OUTER = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
NEMOTRON = {
    **_mamba_names("mixer"),
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.*.up_proj",
    "ffn_down_exps": "mixer.experts.*.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
GRANITE = {
    **_mamba_names("mamba"),
    **GRANITE_MOE,
    "ffn_gate": "shared_mlp.gate_proj",
    "ffn_up": "shared_mlp.up_proj",
    "ffn_down": "shared_mlp.output_linear",
}
FALCON = {
    **_mamba_names("mamba"),
    **ATTENTION,
    "ffn_norm": "pre_ff_layernorm",
    **{name: own.replace("mlp", "feed_forward") for name, own in GATED.items()},
}
FALCON_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"}


BIASES = ("use_conv_bias", "use_bias")


def _mamba2(data: Metadata, config: Config) -> None:
    del config["num_attention_heads"]
    data.get("feed_forward_length")  # 0
    _read_heads(data, config, "num_heads", "head_dim", "n_groups", "state_size", "conv_kernel", *BIASES)
    config["expand"] = config["num_heads"] * config["head_dim"] // config["hidden_size"]
    config["layer_norm_epsilon"] = data.real("attention.layer_norm_rms_epsilon")


def _mamba(data: Metadata, config: Config) -> None:
    del config["num_attention_heads"]
    data.get("feed_forward_length")  # 0
    config["intermediate_size"], config["state_size"] = data.count("ssm.inner_size"), data.count("ssm.state_size")
    config["time_step_rank"], config["conv_kernel"] = data.count("ssm.time_step_rank"), data.count("ssm.conv_kernel")
    config["layer_norm_epsilon"] = data.real("attention.layer_norm_rms_epsilon")
    config["use_conv_bias"], config["use_bias"] = has_bias(data, "ssm_conv1d"), has_bias(data, "ssm_in")
    if data.flag("ssm.dt_b_c_rms", False):
        config["architectures"] = ["FalconMambaForCausalLM"]


def _nemotron_h(data: Metadata, config: Config) -> None:
    num_layers, kv_heads = config["num_hidden_layers"], _attention_layers(data, config)
    sizes, feeds = data.counts("feed_forward_length", num_layers), "moe" if data.has("expert_count") else "mlp"
    config["layers_block_type"] = [
        "attention" if heads else feeds if size else "mamba" for heads, size in zip(kv_heads, sizes, strict=True)
    ]
    config["intermediate_size"] = max(1, *sizes)
    config["num_key_value_heads"] = max(1, *kv_heads)
    config["head_dim"] = data.count("attention.key_length")
    data.get("attention.value_length")
    for key in ("freq_base", "dimension_count", "scaling.type"):
        data.get(f"rope.{key}")  # no position is rotated
    config["attention_bias"], config["mlp_bias"] = has_bias(data, "attn_q"), has_bias(data, "ffn_up")
    names = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")  # of older and newer files
    config["layer_norm_epsilon"] = data.real(names[not data.has(names[0])])
    for name in names:
        data.get(name)
    names_of_sizes = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
    _read_heads(data, config, *names_of_sizes, *BIASES)


def _nemotron_h_moe(data: Metadata, config: Config) -> None:
    _nemotron_h(data, config)
    read_routing(data, config)
    config["moe_shared_expert_intermediate_size"] = data.count("expert_shared_feed_forward_length")
    config["n_shared_experts"] = data.count("expert_shared_count", 1)
    config["moe_latent_size"] = data.count("moe_latent_size", 0, low=0)
    must_be_sigmoid(data)


def _bamba_sizes(data: Metadata, config: Config) -> None:
    names = ("n_heads", "d_head", "n_groups", "d_state", "d_conv", "conv_bias", "proj_bias")
    _read_heads(data, config, *(f"mamba_{name}" for name in names))


def _granite_hybrid(data: Metadata, config: Config) -> None:
    kv_heads = _attention_layers(data, config)
    read_llama(data, config, kv_heads=max(1, *kv_heads))
    if "partial_rotary_factor" in config:
        data.fail("rope.dimension_count", f"must be the width of a head, {config['head_dim']}")
    _bamba_sizes(data, config)
    config["mamba_expand"] = config["mamba_n_heads"] * config["mamba_d_head"] // config["hidden_size"]
    config["layer_types"] = ["attention" if count else "mamba" for count in kv_heads]
    config["position_embedding_type"] = "rope" if data.flag("rope.scaling.finetuned", False) else "nope"
    read_factors(data, config)
    config["has_separate_gates"] = True
    config["num_local_experts"] = data.count("expert_count", 0, low=0)
    config["shared_intermediate_size"] = data.count("expert_shared_feed_forward_length", config["intermediate_size"])
    config["num_experts_per_tok"] = data.count("expert_used_count", 0, low=0)
    if not config["num_local_experts"]:
        config["shared_intermediate_size"] = data.file.tensors["blk.0.ffn_gate.weight"].shape[0]


def _falcon_h1(data: Metadata, config: Config) -> None:
    """The converter multiplies the weights by the model's factors; where there is a norm, it is behind the gate."""
    read_llama(data, config)
    _bamba_sizes(data, config)
    config["mamba_d_ssm"] = config["mamba_n_heads"] * config["mamba_d_head"]
    config["mamba_rms_norm"] = "blk.0.ssm_norm.weight" in data.file.tensors
    config["mamba_norm_before_gate"] = False


# Jamba: Mamba with norms of its parts, attention, and experts in some layers.

JAMBA = {
    **_mamba_names("mamba"),
    **{name: own for name, own in FALCON.items() if not name.startswith("ssm")},
    "ssm_x": "mamba.x_proj",
    "ssm_dt": "mamba.dt_proj",
    "ssm_dt_norm": "mamba.dt_layernorm",
    "ssm_b_norm": "mamba.b_layernorm",
    "ssm_c_norm": "mamba.c_layernorm",
    "ffn_gate_inp": "feed_forward.router",
    "ffn_gate_exps": "feed_forward.experts.*.gate_proj",
    "ffn_up_exps": "feed_forward.experts.*.up_proj",
    "ffn_down_exps": "feed_forward.experts.*.down_proj",
}


def _jamba(data: Metadata, config: Config) -> None:
    num_layers, kv_heads = config["num_hidden_layers"], _attention_layers(data, config)
    config["hidden_act"], config["intermediate_size"] = "silu", data.count("feed_forward_length")
    config["num_key_value_heads"] = max(1, *kv_heads)
    config["rms_norm_eps"] = data.real("attention.layer_norm_rms_epsilon")
    inner, D = data.count("ssm.inner_size"), config["hidden_size"]
    if inner % D:
        data.fail("ssm.inner_size", f"is {inner}, but must be a multiple of embedding_length, {D}")
    config["mamba_expand"], config["mamba_d_conv"] = inner // D, data.count("ssm.conv_kernel")
    config["mamba_d_state"], config["mamba_dt_rank"] = data.count("ssm.state_size"), data.count("ssm.time_step_rank")
    config["mamba_conv_bias"], config["mamba_proj_bias"] = has_bias(data, "ssm_conv1d"), has_bias(data, "ssm_in")
    config["num_experts"] = data.count("expert_count", 1, low=0) or 1
    config["num_experts_per_tok"] = data.count("expert_used_count", 1, low=0) or 1
    routed = [f"blk.{i}.ffn_gate_inp.weight" in data.file.tensors for i in range(num_layers)]
    for name, marks in (("attn_layer", kv_heads), ("expert_layer", routed)):
        found = [i for i, mark in enumerate(marks) if mark] + [num_layers]
        period, offset = found[1] - found[0] if len(found) > 2 else num_layers + 1, found[0]
        if [i for i in range(num_layers) if i % period == offset] != found[:-1]:
            data.fail("attention.head_count_kv", f"layers of the kind {name} must be one of every so many")
        config[f"{name}_period"], config[f"{name}_offset"] = period, offset


# Kimi-Linear: Kimi Delta Attention and latent attention.

KIMI = {
    **{name: own.replace("mlp.", "block_sparse_moe.") for name, own in DEEPSEEK.items()},
    **LLAMA,
    "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
    "ffn_up_exps": "block_sparse_moe.experts.*.w3",
    "ffn_down_exps": "block_sparse_moe.experts.*.w2",
    "ssm_conv1d_q": "self_attn.q_conv1d",
    "ssm_conv1d_k": "self_attn.k_conv1d",
    "ssm_conv1d_v": "self_attn.v_conv1d",
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A_log",
    "ssm_dt": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}


def _kimi_linear(data: Metadata, config: Config) -> None:
    num_layers = config["num_hidden_layers"]
    attends = [i + 1 for i, heads in enumerate(data.counts("attention.head_count_kv", num_layers)) if heads]
    config["linear_attn_config"] = {
        "full_attn_layers": attends,
        "kda_layers": [i + 1 for i in range(num_layers) if i + 1 not in attends],
        "num_heads": config["num_attention_heads"],
        "head_dim": data.count("kda.head_dim"),
        "short_conv_kernel_size": data.count("ssm.conv_kernel"),
    }
    rotated = data.count("rope.dimension_count")
    read_rope(data, rotated)  # no position is rotated
    for key in ("key_length", "value_length"):
        data.get(f"attention.{key}")  # of a cache of latents
    config["qk_rope_head_dim"] = rotated
    config["qk_nope_head_dim"] = data.count("attention.key_length_mla") - rotated
    config["v_head_dim"] = data.count("attention.value_length_mla")
    config["kv_lora_rank"] = data.count("attention.kv_lora_rank")
    config["q_lora_rank"] = data.count("attention.q_lora_rank", 0, low=0) or None
    config["rms_norm_eps"] = data.real("attention.layer_norm_rms_epsilon")
    config["hidden_act"] = "silu"
    config["intermediate_size"] = data.count("feed_forward_length")
    config["moe_intermediate_size"] = data.count("expert_feed_forward_length")
    config["num_experts"] = data.count("expert_count")
    config["num_experts_per_token"] = data.count("expert_used_count")
    config["num_shared_experts"] = data.count("expert_shared_count")
    config["first_k_dense_replace"] = data.count("leading_dense_block_count", 0, low=0)
    config["routed_scaling_factor"] = data.real("expert_weights_scale", 1.0)
    config["moe_renormalize"] = data.flag("expert_weights_norm", True)
    config["num_expert_group"] = data.count("expert_group_count", 1)
    config["topk_group"] = data.count("expert_group_used_count", 1)
    must_be_sigmoid(data)


HYBRIDS: dict[str, GgufFamily] = {
    "qwen3next": GgufFamily("Qwen3NextForCausalLM", DELTA_EXPERTS, _delta_experts),
    "qwen35": GgufFamily("Qwen3_5ForCausalLM", {**DELTA, **GATED}, _delta, order=_tiled_order, values=TILED),
    "qwen35moe": GgufFamily("Qwen3_5MoeForCausalLM", DELTA_EXPERTS, _delta_experts, order=_tiled_order, values=TILED),
    "lfm2": GgufFamily("Lfm2ForCausalLM", LFM2_EXPERTS, _lfm2, LFM2_OUTER),
    "lfm2moe": GgufFamily("Lfm2MoeForCausalLM", LFM2_EXPERTS, _lfm2_moe, LFM2_OUTER),
    "mamba": GgufFamily(
        "MambaForCausalLM", MAMBA, _mamba, MAMBA_OUTER, layer_prefix="backbone.layers.", has_attention=False
    ),
    "mamba2": GgufFamily(
        "Mamba2ForCausalLM", NEMOTRON, _mamba2, MAMBA_OUTER, layer_prefix="backbone.layers.", has_attention=False
    ),
    "nemotron_h": GgufFamily(
        "NemotronHForCausalLM", NEMOTRON, _nemotron_h, MAMBA_OUTER, layer_prefix="backbone.layers."
    ),
    "nemotron_h_moe": GgufFamily(
        "NemotronHForCausalLM", NEMOTRON, _nemotron_h_moe, MAMBA_OUTER, layer_prefix="backbone.layers."
    ),
    "granitehybrid": GgufFamily("GraniteMoeHybridForCausalLM", GRANITE, _granite_hybrid, is_permuted=True),
    "falcon-h1": GgufFamily("FalconH1ForCausalLM", FALCON, _falcon_h1, FALCON_OUTER),
    "jamba": GgufFamily("JambaForCausalLM", JAMBA, _jamba, FALCON_OUTER),
    "kimi-linear": GgufFamily("KimiLinearForCausalLM", KIMI, _kimi_linear),
}
