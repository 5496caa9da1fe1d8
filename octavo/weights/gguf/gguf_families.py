"""Translates GGUF architectures to Hugging Face configurations; ``tensor_names`` has the names of parameters.

Metadata keys are defined by the GGUF specification, weight transformations by llama.cpp's converter.
An unknown key or tensor may change what the model computes, so it is refused rather than ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError
from octavo.weights.gguf.gguf_metadata import Metadata
from octavo.weights.gguf.gguf_reader import GGUFFile
from octavo.weights.gguf.gguf_rope import read_rope
from octavo.weights.gguf.tensor_names import (
    ATTENTION,
    DEEPSEEK,
    EXPERTS,
    FUSED,
    GATED,
    HEAD_NORMS,
    LLAMA,
    OUTER,
    SANDWICH,
    SHARED,
    Config,
    GgufFamily,
    TensorPlace,
    places_of,
)

SOFTMAX, SIGMOID = 1, 2
"""Values of ``expert_gating_func``."""


def translate(file: GGUFFile, families: Mapping[str, GgufFamily]) -> tuple[GgufFamily, Config, dict[str, TensorPlace]]:
    """The file's family, its configuration, and the location of each parameter. Raises ``CheckpointError``."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in families:
        raise CheckpointError(
            f"{file.path}: architecture {str(name)[:100]!r} is not supported in GGUF files, "
            f"supported are {', '.join(families)}"
        )
    data = Metadata(file, name + ".")
    family = families[name]
    for tensor, other in family.variants.items():
        family = other if f"blk.0.{tensor}.weight" in file.tensors else family
    config = _common(data, family)
    family.configure(data, config)
    config |= family.values
    places = places_of(file, name, family, config)
    for key, own in family.numbers.items():
        found = Metadata(file, "").array(key)
        if len(found) != config["num_hidden_layers"]:
            raise CheckpointError(
                f"{file.path}: metadata {key!r}: has {len(found)} numbers, expected one of each layer"
            )
        places |= {f"{family.layer_prefix}{i}.{own}": TensorPlace(key, number=value) for i, value in enumerate(found)}
    data.finish()
    return family, config, places


def _common(data: Metadata, family: GgufFamily) -> Config:
    file, config = data.file, Config(architectures=[family.architecture])
    drafting = data.count("nextn_predict_layers", 0, low=0)  # the last layers, which draft tokens
    config["num_hidden_layers"] = data.count("block_count", low=drafting + 1) - drafting
    config["hidden_size"] = data.count("embedding_length")
    config["vocab_size"] = _vocab_size(data, config["hidden_size"])
    config["num_attention_heads"] = _num_heads(data, family, config["num_hidden_layers"])
    config["max_position_embeddings"] = data.count("context_length")
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    if config["num_hidden_layers"] > len(file.tensors):
        data.fail("block_count", f"{config['num_hidden_layers']}, but there are only {len(file.tensors)} tensors")
    return config


def _num_heads(data: Metadata, family: GgufFamily, num_layers: int) -> int:
    """The query heads of a layer, of the first if they differ."""
    if family.heads_differ:
        return data.counts("attention.head_count", num_layers)[0]
    return data.count("attention.head_count", low=int(family.has_attention))


def read_llama(
    data: Metadata,
    config: Config,
    ffn_size: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    eps: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
) -> None:
    """Keys common to the Llama family; biases are detected by their tensors.

    ``ffn_size``: if the file has none; ``kv_heads``: if the file has some for each layer;
    ``head_dim``: if values have another; ``eps``: what the epsilon of
    the norms is called in the file and in ``config.json``.
    """
    heads = config["num_attention_heads"]
    config["hidden_act"] = "silu"
    config["intermediate_size"] = data.count("feed_forward_length", ffn_size)
    config["num_key_value_heads"] = kv_heads or data.count("attention.head_count_kv", heads)
    config[eps[1]] = data.real(eps[0])
    config["head_dim"] = head_dim or _head_dim(data, config["hidden_size"] // heads)
    config.update(read_rope(data, config["head_dim"]))
    config["attention_bias"] = has_bias(data, "attn_q") or has_bias(data, "attn_qkv")
    if has_bias(data, "ffn_up"):
        config["mlp_bias"] = True


def has_bias(data: Metadata, module: str) -> bool:
    """Whether any layer has a bias of this module."""
    return any(name.endswith(f".{module}.bias") for name in data.file.tensors)


def _head_dim(data: Metadata, default: int) -> int:
    """The width of a head, which must be the same for keys and values."""
    width = data.count("attention.key_length", default)
    if (other := data.count("attention.value_length", width)) != width:
        data.fail("attention.value_length", f"is {other}, but must equal attention.key_length, {width}")
    return width


def read_experts(
    data: Metadata, config: Config, total: str, used: str = "num_experts_per_tok", size: str | None = None
) -> None:
    """Set, under these names, the number of experts, that of a token's, and the size of one."""
    config[total], config[used] = data.count("expert_count"), data.count("expert_used_count")
    if size is not None:
        config[size] = data.count("expert_feed_forward_length")


def read_routing(data: Metadata, config: Config, is_normalised: bool = True) -> None:
    """Set what DeepSeek's and related configurations say of routed experts. ``is_normalised``: whether the weights of a
    token's experts sum to 1 where the file does not say."""
    read_experts(data, config, "n_routed_experts", size="moe_intermediate_size")
    config["routed_scaling_factor"] = data.real("expert_weights_scale", 1.0)
    config["norm_topk_prob"] = data.flag("expert_weights_norm", is_normalised)
    config["n_group"] = data.count("expert_group_count", 1)
    config["topk_group"] = data.count("expert_group_used_count", 1)


def read_scoring(data: Metadata, default: int | None = None) -> int:
    """How scores of experts become weights: SIGMOID or SOFTMAX."""
    scoring = data.count("expert_gating_func", default)
    if scoring not in (SIGMOID, SOFTMAX):
        data.fail("expert_gating_func", f"is {scoring}, supported are {SOFTMAX}, softmax, and {SIGMOID}, sigmoid")
    return scoring


def must_be_sigmoid(data: Metadata) -> None:
    if read_scoring(data, SIGMOID) != SIGMOID:
        data.fail("expert_gating_func", f"must be {SIGMOID}, sigmoid")


def _mixtral(data: Metadata, config: Config) -> None:
    read_llama(data, config)
    read_experts(data, config, "num_local_experts")


def read_qwen_moe(data: Metadata, config: Config) -> None:
    """The keys of Qwen2 and 3 with experts."""
    read_llama(data, config)
    read_experts(data, config, "num_local_experts", size="moe_intermediate_size")
    config["norm_topk_prob"] = data.flag("expert_weights_norm", config["architectures"] != ["Qwen2MoeForCausalLM"])


def _qwen2_moe(data: Metadata, config: Config) -> None:
    read_qwen_moe(data, config)
    config["qkv_bias"] = config["attention_bias"]
    config["shared_expert_intermediate_size"] = data.count("expert_shared_feed_forward_length")


def _phi3(data: Metadata, config: Config) -> None:
    read_llama(data, config)
    config["sliding_window"] = data.count("attention.sliding_window", 0, low=0) or None


GLM4V = "Glm4vForConditionalGeneration"


def _glm4(data: Metadata, config: Config) -> None:
    read_llama(data, config)
    config.setdefault("partial_rotary_factor", 1.0)
    if data.has("rope.dimension_sections"):
        config["architectures"] = [GLM4V]
        with_sections(data, config)


def _glm4_order(config: Config, name: str, count: int) -> npt.NDArray[np.int64] | None:
    """In files of GLM-4V the two numbers of a rotary pair are half the rotated part apart; here they are adjacent."""
    if config["architectures"] != [GLM4V] or not (".q_proj." in name or ".k_proj." in name):
        return None
    rows = np.arange(count).reshape(-1, config["head_dim"])
    rotated = int(config["head_dim"] * config["partial_rotary_factor"])
    pairs = rows[:, :rotated].reshape(len(rows), 2, -1).swapaxes(1, 2).reshape(len(rows), -1)
    return np.concatenate([pairs, rows[:, rotated:]], axis=1).ravel()


def _gemma(data: Metadata, config: Config) -> None:
    """The converter has already added 1 to the norm weights."""
    read_llama(data, config)
    del config["hidden_act"]
    config["hidden_activation"] = "gelu_pytorch_tanh"
    config["norms_include_one"] = True


def _gemma2(data: Metadata, config: Config) -> None:
    _gemma(data, config)
    config["sliding_window"] = data.count("attention.sliding_window", 4096)
    config["attn_logit_softcapping"] = data.real("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = data.real("final_logit_softcapping", 30.0)
    config["query_pre_attn_scalar"] = _gemma_scalar(config, largest=46)


def _gemma3(data: Metadata, config: Config) -> None:
    _gemma(data, config)
    config["sliding_window"] = data.count("attention.sliding_window", 1024)
    config["sliding_window_pattern"] = data.count("attention.sliding_window_pattern", 6)
    config["rope_local_base_freq"] = data.real("rope.freq_base_swa", 10_000.0)
    config["rope_theta"] = data.real("rope.freq_base", 1_000_000.0)
    if data.has("final_logit_softcapping"):
        config["final_logit_softcapping"] = data.real("final_logit_softcapping")
    config["query_pre_attn_scalar"] = _gemma_scalar(config, largest=62)


def _gemma4(data: Metadata, config: Config) -> None:
    """Numbers may differ between layers with a window and those without; the latter's rotated part is in a tensor."""
    num_layers, tensors = config["num_hidden_layers"], data.file.tensors
    windowed = [bool(has) for has in data.array("attention.sliding_window_pattern")][:num_layers]
    if len(windowed) != num_layers or all(windowed):
        data.fail(
            "attention.sliding_window_pattern", f"is {windowed}, expected for {num_layers} layers whether they have"
        )
    sizes, kv_heads = data.counts("feed_forward_length", num_layers), data.counts("attention.head_count_kv", num_layers)
    full = windowed.index(False)
    local = windowed.index(True) if any(windowed) else full
    width, experts = data.count("attention.key_length"), data.count("expert_count", 0, low=0)
    config |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": sizes[-1] != sizes[0],
        "rms_norm_eps": data.real("attention.layer_norm_rms_epsilon"),
        "head_dim": data.count("attention.key_length_swa"),
        "global_head_dim": width,
        "num_key_value_heads": kv_heads[local],
        "num_global_key_value_heads": kv_heads[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in tensors,
        "layer_types": ["sliding_attention" if has else "full_attention" for has in windowed],
        "sliding_window": data.count("attention.sliding_window"),
        "num_kv_shared_layers": data.count("attention.shared_kv_layers", 0, low=0),
        "hidden_size_per_layer_input": data.count("embedding_length_per_layer_input", 0, low=0),
        "final_logit_softcapping": data.real("final_logit_softcapping")
        if data.has("final_logit_softcapping")
        else None,
        "enable_moe_block": experts > 0,
    }
    for key in (
        "attention.value_length",
        "attention.value_length_swa",
        "rope.dimension_count",
        "rope.dimension_count_swa",
    ):
        other = config["head_dim" if key.endswith("_swa") else "global_head_dim"]
        if data.count(key, other) != other:
            data.fail(key, f"must be {other}, the width of a head")
    full_rope = {"rope_type": "proportional", "partial_rotary_factor": _rotated_share(data, width // 2)}
    config["rope_parameters"] = {
        "full_attention": {**full_rope, "rope_theta": data.real("rope.freq_base", 1_000_000.0)},
        "sliding_attention": {"rope_type": "default", "rope_theta": data.real("rope.freq_base_swa", 10_000.0)},
    }
    if config["hidden_size_per_layer_input"]:
        config["vocab_size_per_layer_input"] = tensors["per_layer_token_embd.weight"].shape[0]
    else:  # the larger models, in which an image's embeddings attend to each other
        config["use_bidirectional_attention"] = "vision"
    if experts:
        read_experts(data, config, "num_experts", "top_k_experts", "moe_intermediate_size")


def _rotated_share(data: Metadata, num_pairs: int) -> float:
    """The part of a head that Gemma 4 rotates, whose pairs have the factor 1: others' is so large that they stay."""
    if "rope_freqs.weight" not in data.file.tensors:
        return 1.0
    factors = data.floats("rope_freqs.weight", num_pairs)
    if factors != sorted(factors) or any(factor != 1 and factor < 1e20 for factor in factors):
        raise CheckpointError(f"{data.file.path}: tensor 'rope_freqs.weight': expected ones, then numbers from 1e20 on")
    return factors.count(1) / num_pairs


def _gemma_scalar(config: Config, largest: int) -> float:
    """``query_pre_attn_scalar``, which files omit: the head dimension, except in the model with ``largest`` layers."""
    if config["num_hidden_layers"] == largest:
        return float(config["hidden_size"] / config["num_attention_heads"])
    return float(config["head_dim"])


def with_sections(data: Metadata, config: Config, is_interleaved: bool = False) -> None:
    """Add which rotated pairs are of time, rows and columns, for images."""
    sections = [int(count) for count in data.get("rope.dimension_sections", ())]
    if len(sections) not in (3, 4) or any(sections[3:]):
        data.fail("rope.dimension_sections", f"is {sections}, expected the rotated pairs of time, rows and columns")
    scaling = {"rope_type": "default", **(config["rope_scaling"] or {}), "mrope_section": sections[:3]}
    config["rope_scaling"] = {**scaling, "mrope_interleaved": is_interleaved}


def _gpt2(data: Metadata, config: Config) -> None:
    names = {
        "num_hidden_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    }
    for name, own in names.items():
        config[own] = config.pop(name)
    config["n_inner"] = data.count("feed_forward_length")
    config["layer_norm_epsilon"] = data.real("attention.layer_norm_epsilon")
    config["has_transposed_weights"] = False
    data.count("attention.head_count_kv", config["n_head"])
    data.get("rope.dimension_count")  # some converters write it, although GPT-2 has no rotary embedding


def _gpt_oss(data: Metadata, config: Config) -> None:
    read_llama(data, config)
    read_experts(data, config, "num_local_experts", size="intermediate_size")
    config["sliding_window"] = data.count("attention.sliding_window")
    if config["rope_scaling"] is None or config["rope_scaling"]["rope_type"] != "yarn":
        data.fail("rope.scaling.type", "must be yarn")
    config["rope_scaling"]["truncate"] = False


def read_deepseek2(data: Metadata, config: Config) -> None:
    """Expert groups are used only if the file has their number."""
    corrected = any(name.endswith(".exp_probs_b.bias") for name in data.file.tensors)  # scores of version 3
    gating = read_scoring(data, SIGMOID if corrected else SOFTMAX)
    if gating == SIGMOID:
        config["architectures"] = ["DeepseekV3ForCausalLM"]
    rotated = data.count("rope.dimension_count")
    config["qk_rope_head_dim"] = rotated
    config.update(read_rope(data, rotated))
    for own, key in (("key_length", "qk_nope_head_dim"), ("value_length", "v_head_dim")):
        config[key] = data.count(f"attention.{own}_mla", data.count(f"attention.{own}"))
    config["qk_nope_head_dim"] -= rotated
    data.get("attention.head_count_kv")  # 1 in newer files, the number of heads in older ones
    config["hidden_act"] = "silu"
    config["rms_norm_eps"] = data.real("attention.layer_norm_rms_epsilon")
    config["q_lora_rank"] = data.count("attention.q_lora_rank", 0, low=0) or None
    config["kv_lora_rank"] = data.count("attention.kv_lora_rank")
    config["intermediate_size"] = data.count("feed_forward_length")
    if not data.has("expert_count"):
        config["architectures"] = ["YoutuForCausalLM"]
        for key in ("leading_dense_block_count", "expert_feed_forward_length", "expert_shared_count"):
            data.get(key)  # which llama.cpp wants of all
        return
    read_routing(data, config, is_normalised=False)
    config["n_shared_experts"] = data.count("expert_shared_count")
    config["first_k_dense_replace"] = data.count("leading_dense_block_count", 0, low=0)
    if gating == SOFTMAX and config["n_group"] > 1:
        config["topk_method"] = "group_limited_greedy"


def _vocab_size(data: Metadata, hidden_size: int) -> int:
    """The number of rows of the embedding; the optional metadata key must agree."""
    path, embedding = data.file.path, data.file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{path}: there is no tensor 'token_embd.weight'")
    rows = data.count("vocab_size", embedding.shape[0])
    if embedding.shape != (rows, hidden_size):
        raise CheckpointError(
            f"{path}: tensor 'token_embd.weight': has shape {embedding.shape}, expected {(rows, hidden_size)}"
        )
    return rows


GEMMA4 = {
    **SANDWICH,
    **GATED,
    **HEAD_NORMS,
    "layer_output_scale": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps": "experts.*.gate_proj|experts.*.up_proj",
    "ffn_down_exps": "experts.*.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
GEMMA4_OUTER = {
    **OUTER,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
MIXTRAL = GgufFamily(
    "MixtralForCausalLM",
    {
        **ATTENTION,
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
        "ffn_up_exps": "block_sparse_moe.experts.*.w3",
        "ffn_down_exps": "block_sparse_moe.experts.*.w2",
    },
    _mixtral,
    is_permuted=True,
)
FAMILIES: dict[str, GgufFamily] = {
    "llama": GgufFamily("LlamaForCausalLM", LLAMA, read_llama, is_permuted=True, variants={"ffn_gate_inp": MIXTRAL}),
    "qwen2": GgufFamily("Qwen2ForCausalLM", LLAMA, read_llama),
    "qwen3": GgufFamily("Qwen3ForCausalLM", {**LLAMA, **HEAD_NORMS}, read_llama),
    "qwen2moe": GgufFamily("Qwen2MoeForCausalLM", {**LLAMA, **EXPERTS, **SHARED}, _qwen2_moe),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", {**LLAMA, **HEAD_NORMS, **EXPERTS}, read_qwen_moe),
    "phi3": GgufFamily("Phi3ForCausalLM", {**LLAMA, **FUSED, "attn_qkv": "self_attn.qkv_proj"}, _phi3),
    "gemma": GgufFamily("GemmaForCausalLM", LLAMA, _gemma),
    "gemma2": GgufFamily("Gemma2ForCausalLM", {**SANDWICH, **GATED}, _gemma2),
    "gemma3": GgufFamily("Gemma3ForCausalLM", {**SANDWICH, **GATED, **HEAD_NORMS}, _gemma3),
    "gemma4": GgufFamily("Gemma4ForCausalLM", GEMMA4, _gemma4, GEMMA4_OUTER),
    "deepseek2": GgufFamily("DeepseekV2ForCausalLM", DEEPSEEK, read_deepseek2),
    "glm4": GgufFamily(
        "Glm4ForCausalLM",
        {
            **ATTENTION,
            **FUSED,
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        _glm4,
        order=_glm4_order,
    ),
    "gpt2": GgufFamily(
        "GPT2LMHeadModel",
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        _gpt2,
        {"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f", "output": "lm_head"},
        "h.",
    ),
    "gpt-oss": GgufFamily(
        "GptOssForCausalLM",
        {
            **ATTENTION,
            **EXPERTS,
            "attn_sinks": "self_attn.sinks",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
        _gpt_oss,
    ),
}
