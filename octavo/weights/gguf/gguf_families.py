"""Translates GGUF architectures to Hugging Face configurations and parameter names.

Metadata keys are defined by the GGUF specification; tensor names and weight transformations by llama.cpp's converter.
An unknown key or tensor may change what the model computes, so it is refused rather than ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError
from octavo.weights.gguf.gguf_metadata import Metadata
from octavo.weights.gguf.gguf_reader import GGUFFile
from octavo.weights.gguf.gguf_rope import FACTOR_TENSORS, read_rope

Config = dict[str, Any]

SOFTMAX, SIGMOID = 1, 2
"""Values of ``expert_gating_func``."""

OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
LLAMA = {**ATTENTION, **GATED, "ffn_norm": "post_attention_layernorm"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
EXPERTS = {
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
"""A star stands for the index of an expert; the tensor stacks all experts. With a bar, it has two parameters of each,
one after the other."""
FUSED = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}


class TensorPlace(NamedTuple):
    """A parameter's location: the tensor, and the index of its part if the tensor stacks several."""

    tensor: str
    part: int | None = None
    values: str | None = None
    """The tensor of the value projection, if key and value projections of a latent are stored separately."""
    half: int | None = None
    """Which half of the rows, if the tensor has gates and ups."""
    rows: slice | None = None
    """Which rows, if the tensor has queries, then keys, then values."""
    number: float | None = None
    """The only number, if metadata has it in place of a tensor."""


@dataclass(frozen=True)
class GgufFamily:
    """How to read one GGUF architecture."""

    architecture: str
    """Its name in ``config.json``."""
    layer: Mapping[str, str]
    """Tensor name in a layer to parameter name in a layer."""
    configure: Callable[[Metadata, Config], None]
    """Adds the architecture's keys to a configuration."""
    outer: Mapping[str, str] = field(default_factory=lambda: OUTER)
    layer_prefix: str = "model.layers."
    is_permuted: bool = False
    """Whether rows of query and key projections are permuted."""
    has_attention: bool = True
    heads_differ: bool = False
    """Whether files may have the number of query heads of each layer."""
    order: Callable[[Config, str, int], npt.NDArray[np.int64] | None] = lambda config, name, count: None
    """The index of the stored row for each of a parameter's rows, if they are in another order."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a configuration that files of the family do not say."""
    numbers: Mapping[str, str] = field(default_factory=dict)
    """Metadata keys, without any prefix, with a number of each layer, to the parameter in a layer that it is."""
    variants: Mapping[str, GgufFamily] = field(default_factory=dict)
    """The families instead of this one, by a tensor of the first layer that only their files have."""


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
    places = _places(file, name, family, config)
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


WITHOUT_SUFFIX = ("_bias", ".sinks", ".A_log", ".D", ".layer_scalar", "router.scale", ".per_expert_scale")
"""Suffixes of parameter names that are not followed by ".weight"."""
_LAYER_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z0-9_]+(?:\.[a-z_]+)??)(?:\.(weight|bias))?")


def _places(file: GGUFFile, architecture: str, family: GgufFamily, config: Config) -> dict[str, TensorPlace]:
    """Hugging Face name to location of each parameter; tensors of rotary factors are not parameters."""
    places: dict[str, TensorPlace] = {}
    block_count = file.metadata[f"{architecture}.block_count"]
    num_layers = config.get("num_hidden_layers", block_count)
    counts = (config.get(key) for key in ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"))
    num_experts = next(filter(None, counts), 0)
    for name, tensor in file.tensors.items():
        if name in FACTOR_TENSORS:
            continue
        stem, _, kind = name.rpartition(".")
        layer = _LAYER_NAME.fullmatch(name)
        if layer and num_layers <= int(layer[1]) < block_count:
            continue  # a layer that drafts tokens
        if stem in family.outer:
            places[f"{family.outer[stem]}.{kind}"] = TensorPlace(name)
        elif layer and layer[2] in SPLIT_MAPS and "attn_kv_b" in family.layer:
            own = f"{family.layer_prefix}{layer[1]}.self_attn.kv_b_proj.weight"
            places[own] = TensorPlace(f"blk.{layer[1]}.attn_k_b.weight", values=f"blk.{layer[1]}.attn_v_b.weight")
        elif layer and layer[2] == "attn_qkv" and "attn_qkv" not in family.layer and "attn_q" in family.layer:
            parts = zip(("attn_q", "attn_k", "attn_v"), _fused_rows(config), strict=True)
            prefix = f"{family.layer_prefix}{layer[1]}."
            places |= {f"{prefix}{family.layer[part]}.{kind}": TensorPlace(name, rows=rows) for part, rows in parts}
        elif layer and layer[2] in family.layer:
            halves = family.layer[layer[2]].split("|")
            for half, part in enumerate(halves):
                own = f"{family.layer_prefix}{layer[1]}.{part}"
                own += "" if own.endswith(WITHOUT_SUFFIX) else f".{layer[3] or 'weight'}"
                side = half if len(halves) > 1 else None
                if "*" not in own:
                    places[own] = TensorPlace(name)
                elif len(tensor.shape) > 1 and tensor.shape[0] == num_experts:
                    places |= {own.replace("*", str(i)): TensorPlace(name, i, half=side) for i in range(num_experts)}
                else:
                    problem = f"has shape {tensor.shape}, expected those of {num_experts} experts"
                    raise CheckpointError(f"{file.path}: tensor {name!r}: {problem}")
        else:
            raise CheckpointError(f"{file.path}: tensor {name[:100]!r} has no place in the {architecture} architecture")
    return places


def _fused_rows(config: Config) -> tuple[slice, slice, slice]:
    """The rows of queries, keys and values where one tensor has them."""
    head_dim, kv_heads = config["head_dim"], config["num_key_value_heads"]
    keys = config["num_attention_heads"] * head_dim
    values = keys + kv_heads * head_dim
    return slice(0, keys), slice(keys, values), slice(values, values + kv_heads * config.get("v_head_dim", head_dim))


SANDWICH = {**ATTENTION, "ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm"}
SANDWICH["post_ffw_norm"] = "post_feedforward_layernorm"
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
SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
DEEPSEEK = {
    **LLAMA,
    **EXPERTS,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
SPLIT_MAPS = {"attn_k_b", "attn_v_b"}
"""Newer files have these instead of ``attn_kv_b``: for each head, keys [latent, P] and values [V, latent]."""

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
