"""GGUF architectures of mixtures of experts; see ``gguf_families``, which has the first of them."""

from __future__ import annotations

from octavo.weights.gguf.gguf_dense import (
    COHERE,
    FULL,
    HUNYUAN,
    LAYER_NORM,
    PATTERN,
    SLIDING,
    drop,
    read_granite,
    read_windows,
)
from octavo.weights.gguf.gguf_families import (
    MIXTRAL,
    SIGMOID,
    SOFTMAX,
    must_be_sigmoid,
    read_deepseek2,
    read_experts,
    read_llama,
    read_qwen_moe,
    read_routing,
    read_scoring,
    with_sections,
)
from octavo.weights.gguf.gguf_metadata import Metadata
from octavo.weights.gguf.tensor_names import ATTENTION, DEEPSEEK, EXPERTS, HEAD_NORMS, LLAMA, OUTER, Config, GgufFamily

SHARED = {name: own for name, own in DEEPSEEK.items() if name.endswith("_shexp")}
GLM = {**LLAMA, **HEAD_NORMS, **EXPERTS, **SHARED, "exp_probs_b": "mlp.gate.e_score_correction_bias"}


def first_sparse(data: Metadata, config: Config) -> int:
    """The first layer with experts."""
    tensors = data.file.tensors
    layers = range(config["num_hidden_layers"])
    found = next((i for i in layers if f"blk.{i}.ffn_gate_inp.weight" in tensors), len(layers))
    if data.count("leading_dense_block_count", found, low=0) != found:
        data.fail("leading_dense_block_count", f"but layer {found} is the first that has experts")
    return found


def read_sparse(data: Metadata, config: Config, kv_heads: int | None = None, head_dim: int | None = None) -> None:
    """The keys that DeepSeek's, GLM's and their relatives' configurations share; see ``read_llama``."""
    read_llama(data, config, data.count("expert_feed_forward_length"), kv_heads, head_dim=head_dim)
    read_routing(data, config)
    must_be_sigmoid(data)
    config["n_shared_experts"] = data.count("expert_shared_count", 0, low=0)
    config["first_k_dense_replace"] = first_sparse(data, config)


def _list_sparse_layers(config: Config) -> None:
    """Say of each layer what ``first_k_dense_replace`` says of the first."""
    first = config.pop("first_k_dense_replace")
    config["mlp_layer_types"] = ["dense" if i < first else "sparse" for i in range(config["num_hidden_layers"])]


def split_ropes(data: Metadata, config: Config, local_share: float | None = None, theta: float | None = None) -> None:
    """Rotary keys of layers without windows, and of those with: not scaled, by default with the others' ``theta`` and
    as large a part of a head."""
    base, share = config.pop("rope_theta"), config.pop("partial_rotary_factor", 1.0)
    local = {"rope_type": "default", "rope_theta": data.real("rope.freq_base_swa", theta or base)}
    full = {**(config.pop("rope_scaling") or {"rope_type": "default"}), "rope_theta": base}
    shares = {FULL: (full, share), SLIDING: (local, local_share or share)}
    config["rope_parameters"] = {kind: {**of, "partial_rotary_factor": part} for kind, (of, part) in shares.items()}


GLM4V_MOE = "Glm4vMoeForConditionalGeneration"


def _glm4_moe(data: Metadata, config: Config) -> None:
    read_sparse(data, config)
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in data.file.tensors
    config.setdefault("partial_rotary_factor", 1.0)
    if data.has("rope.dimension_sections"):
        config["architectures"] = [GLM4V_MOE]
        with_sections(data, config)


def _exaone_moe(data: Metadata, config: Config) -> None:
    read_sparse(data, config)
    config["num_experts"] = config.pop("n_routed_experts")
    config["num_shared_experts"] = config.pop("n_shared_experts")
    data.get("expert_shared_feed_forward_length")
    drop(config, "attention_bias")
    read_windows(data, config, every=4)


def _ernie_moe(data: Metadata, config: Config) -> None:
    read_llama(data, config)
    config["use_bias"] = config.pop("attention_bias")
    read_experts(data, config, "moe_num_experts", "moe_k", "moe_intermediate_size")
    config["moe_num_shared_experts"] = data.count("expert_shared_count", 0, low=0)
    data.get("expert_shared_feed_forward_length")
    config["moe_layer_start_index"] = data.count("leading_dense_block_count", 0, low=0)
    config["moe_layer_interval"] = data.count("interleave_moe_layer_step", 1)


def _hunyuan_moe(data: Metadata, config: Config) -> None:
    read_llama(data, config)
    read_experts(data, config, "num_experts", "moe_topk", "moe_intermediate_size")
    config["num_shared_expert"] = data.count("expert_shared_count", 1)
    data.get("expert_shared_feed_forward_length")


def _hy_v3(data: Metadata, config: Config) -> None:
    read_sparse(data, config)
    _list_sparse_layers(config)
    config["num_experts"] = config.pop("n_routed_experts")
    config["num_shared_experts"] = data.count("expert_shared_feed_forward_length") // config["moe_intermediate_size"]
    config["router_scaling_factor"] = config.pop("routed_scaling_factor")
    if not config["norm_topk_prob"]:
        data.fail("expert_weights_norm", "must be true")
    drop(config, "n_shared_experts", "norm_topk_prob", "n_group", "topk_group")


def _llama4(data: Metadata, config: Config) -> None:
    """Chunks of 8,192 positions, and queries of layers without positions that grow, are not in the file."""
    read_llama(data, config, ffn_size=data.count("expert_feed_forward_length"))
    config["intermediate_size_mlp"] = config["intermediate_size"]
    read_experts(data, config, "num_local_experts", size="intermediate_size")
    config["interleave_moe_layer_step"] = data.count("interleave_moe_layer_step", 1)
    config["use_qk_norm"] = config["num_local_experts"] != 128  # those of Maverick are not normalised


def _olmoe(data: Metadata, config: Config) -> None:
    read_llama(data, config)
    read_experts(data, config, "num_experts")
    config["clip_qkv"] = data.real("attention.clamp_kqv") if data.has("attention.clamp_kqv") else None


def _granite_moe(data: Metadata, config: Config) -> None:
    read_granite(data, config)
    config["has_separate_gates"] = True
    read_experts(data, config, "num_local_experts")
    if data.has("expert_shared_feed_forward_length"):
        config["architectures"] = ["GraniteMoeSharedForCausalLM"]
        config["shared_intermediate_size"] = data.count("expert_shared_feed_forward_length")


def _cohere2_moe(data: Metadata, config: Config) -> None:
    expert_size = data.count("expert_feed_forward_length")
    read_llama(data, config, ffn_size=expert_size, eps=(LAYER_NORM, "layer_norm_eps"))
    if data.has("attention.layer_norm_rms_epsilon"):
        config["rms_norm_eps"] = data.real("attention.layer_norm_rms_epsilon")
    config["logit_scale"] = data.real("logit_scale", 0.0625)
    config["prefix_dense_intermediate_size"] = config["intermediate_size"]
    read_experts(data, config, "num_experts", size="intermediate_size")
    config["num_shared_experts"] = data.count("expert_shared_count", 0, low=0)
    data.get("expert_shared_feed_forward_length")
    config["first_k_dense_replace"] = first_sparse(data, config)
    config["expert_selection_fn"] = {SIGMOID: "sigmoid", SOFTMAX: "softmax"}[read_scoring(data, SIGMOID)]
    config["norm_topk_prob"] = data.flag("expert_weights_norm", True)
    read_windows(data, config, every=4)
    drop(config, "attention_bias")


def _afmoe(data: Metadata, config: Config) -> None:
    """Files are of models whose embeddings are scaled, and do not say so."""
    read_sparse(data, config)
    config["num_experts"] = config.pop("n_routed_experts")
    config["num_shared_experts"] = config.pop("n_shared_experts")
    config["num_dense_layers"] = config.pop("first_k_dense_replace")
    config["route_norm"], config["route_scale"] = config.pop("norm_topk_prob"), config.pop("routed_scaling_factor")
    config["mup_enabled"] = True
    data.get("expert_shared_feed_forward_length")
    read_windows(data, config, every=4)


def _bailing2(data: Metadata, config: Config) -> None:
    read_sparse(data, config)
    tensors = data.file.tensors
    config["num_experts"], count = config.pop("n_routed_experts"), config.pop("n_shared_experts")
    config["num_shared_experts"] = count
    shared = data.count("expert_shared_feed_forward_length", count * config["moe_intermediate_size"], low=0)
    config["moe_shared_expert_intermediate_size"] = shared // max(count, 1) or None
    config["use_qkv_bias"] = config.pop("attention_bias")
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in tensors
    config["score_function"] = "sigmoid"
    config["moe_router_enable_expert_bias"] = any(".exp_probs_b." in name for name in tensors)


def _mistral4(data: Metadata, config: Config) -> None:
    read_deepseek2(data, config)
    if config["architectures"] != ["Mistral4ForCausalLM"]:
        data.fail("expert_gating_func", f"must be {SOFTMAX}, softmax")
    scaling = config["rope_scaling"] = config["rope_scaling"] or {"rope_type": "default"}
    if beta := data.real("attention.temperature_scale", 0.0, low=0.0):
        period = scaling.get("original_max_position_embeddings")
        if data.count("attention.temperature_length", period) != period:
            data.fail("attention.temperature_length", f"must be that of rope.scaling.original_context_length, {period}")
        scaling["llama_4_scaling_beta"] = beta


def _glm_dsa(data: Metadata, config: Config) -> None:
    read_deepseek2(data, config)
    must_be_sigmoid(data)
    config["architectures"] = ["GlmMoeDsaForCausalLM"]
    for own, key in (("head_count", "index_n_heads"), ("key_length", "index_head_dim"), ("top_k", "index_topk")):
        config[key] = data.count(f"attention.indexer.{own}")
    has_own = [f"blk.{i}.indexer.attn_k.weight" in data.file.tensors for i in range(config["num_hidden_layers"])]
    config["indexer_types"] = ["full" if own else "shared" for own in has_own]


def _minimax_m2(data: Metadata, config: Config) -> None:
    read_llama(data, config, ffn_size=data.count("expert_feed_forward_length"))
    must_be_sigmoid(data)
    read_experts(data, config, "num_local_experts", size="intermediate_size")
    config.setdefault("partial_rotary_factor", 1.0)
    drop(config, "attention_bias")


def _phimoe(data: Metadata, config: Config) -> None:
    read_llama(data, config)
    read_experts(data, config, "num_local_experts")
    config["sliding_window"] = data.count("attention.sliding_window", 0, low=0) or None
    config["lm_head_bias"] = "output.bias" in data.file.tensors


def _mimo2(data: Metadata, config: Config) -> None:
    """Heads of values are narrower than those of keys; the layers with windows have rotary frequencies of their own."""
    kv_heads = data.counts("attention.head_count_kv", config["num_hidden_layers"])
    read_windows(data, config, every=6)
    least = min(kv_heads)
    if kv_heads != [least * (1 + (kind == SLIDING)) for kind in config["layer_types"]]:
        data.fail("attention.head_count_kv", f"is {kv_heads}, expected twice as many in the layers with windows")
    read_sparse(data, config, least, data.count("attention.key_length"))
    config["v_head_dim"] = data.count("attention.value_length")
    if data.has("attention.value_scale"):
        config["attention_value_scale"] = data.real("attention.value_scale")
    _list_sparse_layers(config)
    split_ropes(data, config, theta=10_000.0)
    drop(config, "n_shared_experts")


def _qwen3vl_moe(data: Metadata, config: Config) -> None:
    read_qwen_moe(data, config)
    with_sections(data, config, is_interleaved=True)
    data.get("n_deepstack_layers")  # as the tower says
    config["model_type"] = "qwen3_vl_moe_text"


def _step3p5(data: Metadata, config: Config) -> None:
    """Layers with windows have other heads, and rotate all of them; those without rotate half of a head."""
    count = config["num_hidden_layers"]
    read_windows(data, config, every=4)
    kinds, heads = config["layer_types"], data.counts("attention.head_count", count)
    kv_heads = set(data.counts("attention.head_count_kv", count))
    if len(kv_heads) > 1 or len(set(zip(kinds, heads, strict=True))) > len(set(kinds)):
        data.fail(
            "attention.head_count", "must be the same in all layers of a kind, and attention.head_count_kv in all"
        )
    of_kind = dict(zip(kinds, heads, strict=True))
    config["num_attention_heads"] = of_kind.get(FULL, heads[0])
    config["num_sliding_attention_heads"] = of_kind.get(SLIDING, heads[0])
    read_sparse(data, config, kv_heads.pop(), head_dim=data.count("attention.key_length"))
    width = data.count("attention.value_length", config["head_dim"])
    if width != config["head_dim"] or not config.pop("norm_topk_prob"):
        data.fail("expert_weights_norm", "must be true, and attention.value_length that of a key")
    if data.count("moe_every_n_layers", 1) != 1:
        data.fail("moe_every_n_layers", "must be 1")
    _list_sparse_layers(config)
    config["share_expert_dim"] = data.count("expert_shared_feed_forward_length")
    config["moe_router_scaling_factor"] = config.pop("routed_scaling_factor")
    tensors = data.file.tensors
    config["use_moe_router_bias"] = any(name.endswith(".exp_probs_b.bias") for name in tensors)
    config["use_head_wise_attn_gate"] = "blk.0.attn_gate.weight" in tensors
    for key, name in (("swiglu_clamp_exp", "swiglu_limits"), ("swiglu_clamp_shexp", "swiglu_limits_shared")):
        config[name] = data.array(key)[:count] if data.has(key) else None
    if "factors" in (config["rope_scaling"] or {}):
        factors = config["rope_scaling"]["factors"]
        config["rope_scaling"]["factors"] = factors[: len(factors) // 2]
    share = config.pop("partial_rotary_factor", 1.0)
    config["partial_rotary_factor"] = share / 2
    split_ropes(data, config, share)
    config["norms_include_one"], config["has_separate_experts"] = True, True
    drop(config, "n_shared_experts", "n_group", "topk_group", "attention_bias")


def _laguna(data: Metadata, config: Config) -> None:
    """Every so many-th layer from the first on has no window, and other heads."""
    count = config["num_hidden_layers"]
    config["num_attention_heads_per_layer"] = data.counts("attention.head_count", count)
    read_sparse(data, config, head_dim=data.count("attention.key_length"))
    if not config.pop("norm_topk_prob"):
        data.fail("expert_weights_norm", "must be true")
    _list_sparse_layers(config)
    width, every = data.count("attention.value_length", config["head_dim"]), data.count(PATTERN, 4)
    window = data.count("attention.sliding_window", 0, low=0)
    config["layer_types"] = [SLIDING if window and i % every else FULL for i in range(count)]
    config["sliding_window"] = window or None
    config["num_experts"] = config.pop("n_routed_experts")
    config["shared_expert_intermediate_size"] = data.count("expert_shared_feed_forward_length")
    config["moe_routed_scaling_factor"] = config.pop("routed_scaling_factor")
    heads = config["num_attention_heads_per_layer"][0]
    config["gating"] = "per-head" if data.rows("blk.0.attn_gate.weight") == heads else "per-element"
    split_ropes(data, config, data.count("rope.dimension_count_swa", width) / width)
    drop(config, "n_shared_experts", "n_group", "topk_group", "attention_bias")


def _mellum(data: Metadata, config: Config) -> None:
    read_qwen_moe(data, config)
    read_windows(data, config, every=4)
    split_ropes(data, config)


MINIMAX = {**MIXTRAL.layer, **HEAD_NORMS, "exp_probs_b": "block_sparse_moe.e_score_correction_bias"}
COHERE_MOE = {name: own for name, own in {**COHERE, **EXPERTS, **SHARED}.items() if name not in HEAD_NORMS}
HUNYUAN_SHARED = {name: own.replace("shared_experts", "shared_mlp") for name, own in SHARED.items()}
LLAMA4 = {
    name: own.replace("mlp.", "feed_forward.").replace("shared_experts", "shared_expert")
    for name, own in {**LLAMA, **EXPERTS, **SHARED, "ffn_gate_inp": "mlp.router"}.items()
}
GRANITE_MOE = {
    **ATTENTION,
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.experts.*.gate_proj",
    "ffn_up_exps": "block_sparse_moe.experts.*.up_proj",
    "ffn_down_exps": "block_sparse_moe.experts.*.down_proj",
    "ffn_gate_shexp": "shared_mlp.gate_proj",
    "ffn_up_shexp": "shared_mlp.up_proj",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
HY = {**GLM, **HUNYUAN_SHARED, "ffn_gate_inp": "mlp.router.gate", "exp_probs_b": "mlp.expert_bias"}
GLM4 = {name: own for name, own in GLM.items() if name != "ffn_norm"}
GLM4["post_attention_norm"] = "post_attention_layernorm"

AFMOE = {
    **GLM,
    "attn_gate": "self_attn.gate_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_gate_inp": "mlp.router.gate",
    "exp_probs_b": "mlp.expert_bias",
}
BAILING = {
    **GLM,
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "attn_q_norm": "attention.query_layernorm",
    "attn_k_norm": "attention.key_layernorm",
    "exp_probs_b": "mlp.gate.expert_bias",
}
BAILING_OUTER = {**OUTER, "token_embd": "model.word_embeddings"}
STEP = {
    **{name: own.replace("mlp.", "moe.") if name in EXPERTS else own for name, own in GLM.items()},
    **{name: own.replace("mlp.shared_experts", "share_expert") for name, own in SHARED.items()},
    "attn_gate": "self_attn.g_proj",
    "exp_probs_b": "moe.router_bias",
}
LAGUNA = {
    **{name: own.replace("shared_experts", "shared_expert") for name, own in GLM.items()},
    "attn_gate": "self_attn.g_proj",
    "exp_probs_b": "mlp.experts.e_score_correction_bias",
}
MIMO = {**GLM, "attn_sinks": "self_attn.attention_sink_bias"}
GLM_DSA = {
    **DEEPSEEK,
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}

MIXTURES: dict[str, GgufFamily] = {
    "afmoe": GgufFamily("AfmoeForCausalLM", AFMOE, _afmoe),
    "bailingmoe2": GgufFamily(
        "BailingMoeV2ForCausalLM",
        {name: own for name, own in BAILING.items() if not own.startswith("self_attn.")},
        _bailing2,
        BAILING_OUTER,
    ),
    "cohere2moe": GgufFamily("Cohere2MoeForCausalLM", COHERE_MOE, _cohere2_moe),
    "dots1": GgufFamily("Dots1ForCausalLM", GLM, read_sparse, values={"sliding_window": None}),
    "ernie4_5-moe": GgufFamily(
        "Ernie4_5_MoeForCausalLM", {**GLM, "exp_probs_b": "mlp.moe_statics.e_score_correction_bias"}, _ernie_moe
    ),
    "exaone-moe": GgufFamily(
        "ExaoneMoeForCausalLM", {**GLM, "exp_probs_b": "mlp.e_score_correction_bias"}, _exaone_moe
    ),
    "glm-dsa": GgufFamily("GlmMoeDsaForCausalLM", GLM_DSA, _glm_dsa),
    "glm4moe": GgufFamily("Glm4MoeForCausalLM", GLM4, _glm4_moe),
    "granitemoe": GgufFamily("GraniteMoeForCausalLM", GRANITE_MOE, _granite_moe, is_permuted=True),
    "hunyuan-moe": GgufFamily(
        "HunYuanMoEV1ForCausalLM", {**HUNYUAN, **EXPERTS, **HUNYUAN_SHARED, "ffn_gate_inp": "mlp.gate.wg"}, _hunyuan_moe
    ),
    "hy_v3": GgufFamily("HYV3ForCausalLM", HY, _hy_v3),
    "laguna": GgufFamily("LagunaForCausalLM", LAGUNA, _laguna, heads_differ=True),
    "llama4": GgufFamily("Llama4ForCausalLM", LLAMA4, _llama4),
    "mellum": GgufFamily("MellumForCausalLM", {**LLAMA, **HEAD_NORMS, **EXPERTS}, _mellum),
    "mimo2": GgufFamily("MiMoV2FlashForCausalLM", MIMO, _mimo2),
    "minimax-m2": GgufFamily("MiniMaxM2ForCausalLM", MINIMAX, _minimax_m2),
    "mistral4": GgufFamily(
        "Mistral4ForCausalLM",
        {**DEEPSEEK, "ffn_gate_up_exps": "mlp.experts.*.gate_proj|mlp.experts.*.up_proj"},
        _mistral4,
    ),
    "olmoe": GgufFamily("OlmoeForCausalLM", {**LLAMA, **HEAD_NORMS, **EXPERTS}, _olmoe),
    "phimoe": GgufFamily("PhimoeForCausalLM", MIXTRAL.layer, _phimoe),
    "qwen3vlmoe": GgufFamily("Qwen3VLMoeForConditionalGeneration", {**LLAMA, **HEAD_NORMS, **EXPERTS}, _qwen3vl_moe),
    "step35": GgufFamily("Step3p5ForCausalLM", STEP, _step3p5, heads_differ=True),
}
