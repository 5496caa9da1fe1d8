"""GGUF architectures of decoders without experts; see ``gguf_families``, which has those closest to Llama."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from octavo.weights.gguf.gguf_families import has_bias, read_llama, with_sections
from octavo.weights.gguf.gguf_metadata import Metadata
from octavo.weights.gguf.tensor_names import (
    ATTENTION,
    FUSED,
    GATED,
    HEAD_NORMS,
    LLAMA,
    OUTER,
    SANDWICH,
    Config,
    GgufFamily,
)

LAYER_NORM = "attention.layer_norm_epsilon"
PATTERN = "attention.sliding_window_pattern"
SLIDING, FULL = "sliding_attention", "full_attention"


def read_windows(data: Metadata, config: Config, every: int, default: int | None = None) -> None:
    """``sliding_window`` and ``layer_types``: the file says which layers slide, or every so many-th does not."""
    config["sliding_window"] = data.count("attention.sliding_window", default)
    num_layers = config["num_hidden_layers"]
    if isinstance(data.get(PATTERN), np.ndarray):
        slides = data.flags(PATTERN, num_layers)
    else:
        every = data.count(PATTERN, every)
        slides = [(i + 1) % every > 0 for i in range(num_layers)]
    config["layer_types"] = [SLIDING if is_sliding else FULL for is_sliding in slides]


def drop(config: Config, *names: str) -> None:
    """Remove what the family has no key for."""
    for name in names:
        config.pop(name, None)


# Norms, activations and biases other than Llama's.

POSTNORM = {**SANDWICH, **GATED, **HEAD_NORMS}
POSTNORM["post_attention_norm"], POSTNORM["post_ffw_norm"] = "post_attention_layernorm", "post_feedforward_layernorm"
UNGATED = {**ATTENTION, "ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


def _nemotron(data: Metadata, config: Config) -> None:
    """The converter has already added 1 to the norm weights."""
    read_llama(data, config, eps=(LAYER_NORM, "norm_eps"))
    data.get("attention.layer_norm_rms_epsilon")


def _jais2(data: Metadata, config: Config) -> None:
    read_llama(data, config, eps=(LAYER_NORM, "layer_norm_eps"))
    config["hidden_act"] = "relu2"
    config.setdefault("mlp_bias", False)


def _apertus(data: Metadata, config: Config) -> None:
    read_llama(data, config)
    config["hidden_act"] = "xielu"
    everything = Metadata(data.file, "")
    for key, value in (("xielu.beta", 0.5), ("xielu.eps", -1e-6)):
        if not np.allclose(everything.array(key), value, rtol=1e-2, atol=0):  # they were rounded to bfloat16
            everything.fail(key, f"must be {value} in all layers")


def _minicpm(data: Metadata, config: Config) -> None:
    """Older files do not have the factors, which are those of the first models then."""
    read_llama(data, config)
    count, width = config["num_hidden_layers"], config["hidden_size"]
    config["scale_emb"] = data.real("embedding_scale", 12.0)
    config["scale_depth"] = data.real("residual_scale", 1.4 / count**0.5) * count**0.5
    config["dim_model_base"] = width / data.real("logit_scale", width / 256)


def read_granite(data: Metadata, config: Config) -> None:
    read_llama(data, config)
    read_factors(data, config)


def read_factors(data: Metadata, config: Config) -> None:
    """Granite's multipliers."""
    config["attention_multiplier"] = data.real("attention.scale", config["head_dim"] ** -0.5)
    config["embedding_multiplier"] = data.real("embedding_scale", 1.0)
    config["residual_multiplier"] = data.real("residual_scale", 1.0)
    config["logits_scaling"] = data.real("logit_scale", 1.0)


def _seed_oss(data: Metadata, config: Config) -> None:
    read_llama(data, config)
    config["attention_out_bias"] = has_bias(data, "attn_output")


def _ernie(data: Metadata, config: Config) -> None:
    read_llama(data, config)
    drop(config, "attention_bias", "mlp_bias")
    config["use_bias"] = has_bias(data, "attn_q")


def _ministral3(data: Metadata, config: Config) -> None:
    """Without scaled rotary frequencies it is Mistral Small 3."""
    read_llama(data, config)
    scale = data.real("attention.temperature_scale", 0.0, low=0.0)
    if config["rope_scaling"] is None:
        config["architectures"] = ["MistralForCausalLM"]
        config["sliding_window"] = None
        drop(config, "attention_bias")
    elif scale:
        config["rope_scaling"]["llama_4_scaling_beta"] = scale


def _olmo(data: Metadata, config: Config) -> None:
    """Norms without weights, whose epsilon is fixed."""
    read_llama(data, config, eps=(LAYER_NORM, "layer_norm_eps"))
    drop(config, "layer_norm_eps")
    config["clip_qkv"] = data.real("attention.clamp_kqv") if data.has("attention.clamp_kqv") else None


def _olmo2(data: Metadata, config: Config) -> None:
    """With windows it is Olmo 3, whose sliding layers have rotary frequencies that are not scaled."""
    read_llama(data, config)
    if not data.has("attention.sliding_window"):
        return
    config["architectures"] = ["Olmo3ForCausalLM"]
    read_windows(data, config, every=4)
    data.get("rope.freq_base_swa")  # the same for all layers
    drop(config, "hidden_act")


def _exaone4(data: Metadata, config: Config) -> None:
    read_llama(data, config)
    drop(config, "attention_bias")
    is_large = config["num_hidden_layers"] == 64  # of which older files do not say that it has windows
    if data.has("attention.sliding_window") or is_large:
        read_windows(data, config, every=4, default=4096)
    else:
        config["sliding_window"] = None


def _hunyuan(data: Metadata, config: Config) -> None:
    """The converter has already put alpha into the base of the rotary frequencies."""
    read_llama(data, config)
    if data.count("expert_count", 1) > 1:
        data.fail("expert_count", "must be 1")


def _glm(data: Metadata, config: Config) -> None:
    read_llama(data, config)
    config.setdefault("partial_rotary_factor", 1.0)


def _cohere(data: Metadata, config: Config) -> None:
    read_llama(data, config, eps=(LAYER_NORM, "layer_norm_eps"))
    config["logit_scale"] = data.real("logit_scale", 0.0625)
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in data.file.tensors


def _cohere2(data: Metadata, config: Config) -> None:
    _cohere(data, config)
    drop(config, "use_qk_norm")
    read_windows(data, config, every=4)


def _qwen2vl(data: Metadata, config: Config) -> None:
    read_llama(data, config)
    with_sections(data, config)


def _qwen3vl(data: Metadata, config: Config) -> None:
    read_llama(data, config)
    with_sections(data, config, is_interleaved=True)
    data.get("n_deepstack_layers")  # as the tower says


# Decoders from before Llama.


def _fused_order(config: Config, name: str, count: int) -> npt.NDArray[np.int64] | None:
    """Files have the queries of all heads, then keys, then values; checkpoints have those of each KV head together."""
    if ".query_key_value." not in name:
        return None
    heads: int = config["num_attention_heads"]
    kv_heads: int = config.get("num_kv_heads", heads)
    rows = np.arange(count).reshape(heads + 2 * kv_heads, -1)
    queries, keys, values = np.split(rows, (heads, heads + kv_heads))
    parts = (queries.reshape(kv_heads, -1), keys, values)
    return np.concatenate(parts, axis=1).ravel()


BLOOM = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
BLOOM_OUTER = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
NEOX = {name: own.replace("self_attention", "attention") for name, own in BLOOM.items()}
NEOX_OUTER = {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"}


def _read_old(data: Metadata, config: Config, eps: str = "layer_norm_eps") -> None:
    read_llama(data, config, eps=(LAYER_NORM, eps))
    drop(config, "hidden_act")


def _bloom(data: Metadata, config: Config) -> None:
    _read_old(data, config, eps="layer_norm_epsilon")
    config["seq_length"] = config["max_position_embeddings"]
    drop(config, "intermediate_size", "num_key_value_heads", "attention_bias", "mlp_bias", "rope_theta", "rope_scaling")


def _falcon(data: Metadata, config: Config) -> None:
    _read_old(data, config, eps="layer_norm_epsilon")
    config["num_kv_heads"] = config.pop("num_key_value_heads")
    has_two_norms = "blk.0.attn_norm_2.weight" in data.file.tensors
    is_new = has_two_norms or config["num_kv_heads"] not in (1, config["num_attention_heads"])
    config["new_decoder_architecture"] = is_new
    if is_new:  # Falcon 2 11B has one
        config["num_ln_in_parallel_attn"] = 1 + has_two_norms
    config["multi_query"], config["bias"] = config["num_kv_heads"] == 1, has_bias(data, "attn_qkv")
    config["ffn_hidden_size"] = data.rows("blk.0.ffn_up.weight")
    drop(config, "intermediate_size", "attention_bias", "mlp_bias")


def _neox(data: Metadata, config: Config) -> None:
    _read_old(data, config)
    config.setdefault("partial_rotary_factor", 1.0)
    config["use_parallel_residual"] = data.flag("use_parallel_residual", True)
    config["attention_bias"] = has_bias(data, "attn_qkv")
    drop(config, "mlp_bias")


def _mpt(data: Metadata, config: Config) -> None:
    clip = data.real("attention.clamp_kqv") if data.has("attention.clamp_kqv") else None
    attention = {"clip_qkv": clip, "alibi_bias_max": data.real("attention.max_alibi_bias", 8.0)}
    hidden_size, ffn_size = config["hidden_size"], data.count("feed_forward_length")
    if ffn_size % hidden_size:
        data.fail("feed_forward_length", f"is {ffn_size}, but must be a multiple of {hidden_size}")
    config["attn_config"], config["expansion_ratio"] = attention, ffn_size // hidden_size
    config["layer_norm_epsilon"] = data.real(LAYER_NORM)
    data.count("attention.head_count_kv", config["num_attention_heads"])
    names = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
    for name, own in {**names, "max_position_embeddings": "max_seq_len"}.items():
        config[own] = config.pop(name)


def _starcoder2(data: Metadata, config: Config) -> None:
    """Files do not say that there is a window, which the published models have at 4,096."""
    _read_old(data, config, eps="norm_epsilon")
    config["use_bias"] = has_bias(data, "attn_q")
    config["sliding_window"] = data.count("attention.sliding_window", 4096)
    drop(config, "attention_bias", "mlp_bias")


def _stablelm(data: Metadata, config: Config) -> None:
    _read_old(data, config)
    config.setdefault("partial_rotary_factor", 1.0)
    config["use_qkv_bias"] = has_bias(data, "attn_q")
    data.flag("use_parallel_residual", True)  # older files say so of all models
    config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in data.file.tensors
    config["qk_layernorm"] = "blk.0.attn_q_norm.weight" in data.file.tensors  # of the 12B model
    drop(config, "attention_bias", "mlp_bias")


def _phi2(data: Metadata, config: Config) -> None:
    read_llama(data, config, eps=(LAYER_NORM, "layer_norm_eps"))
    config["intermediate_size"] = data.rows("blk.0.ffn_up.weight")  # files have four times the width always
    if "blk.0.attn_k.weight" in data.file.tensors:  # files have as many as queries always
        config["num_key_value_heads"] = data.rows("blk.0.attn_k.weight") // config["head_dim"]
    config["hidden_act"] = "gelu_new"
    drop(config, "attention_bias", "mlp_bias")


COHERE = {name: own for name, own in LLAMA.items() if name != "ffn_norm"} | HEAD_NORMS
GLM = {**ATTENTION, **FUSED, "ffn_norm": "post_attention_layernorm"}
SEED = {**ATTENTION, **GATED, "post_attention_norm": "post_attention_layernorm"}
HUNYUAN = {**LLAMA, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
FALCON_TWO = {**BLOOM, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
MPT = {
    "attn_norm": "norm_1",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "ffn_norm": "norm_2",
    "ffn_up": "ffn.up_proj",
    "ffn_down": "ffn.down_proj",
}
MPT_OUTER = {"token_embd": "transformer.wte", "output_norm": "transformer.norm_f", "output": "lm_head"}
STARCODER = {**ATTENTION, "ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
STABLELM = {**LLAMA, "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"}
NEMOTRON = {"hidden_act": "relu2", "norms_include_one": True}
APERTUS = {**UNGATED, **HEAD_NORMS, "attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
XIELU = {f"xielu.{name}": f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n")}
PHI = {**ATTENTION, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
PHI_OUTER = {**OUTER, "output_norm": "model.final_layernorm"}
FALCON = GgufFamily("FalconForCausalLM", BLOOM, _falcon, BLOOM_OUTER, "transformer.h.", order=_fused_order)

DECODERS: dict[str, GgufFamily] = {
    "apertus": GgufFamily("ApertusForCausalLM", APERTUS, _apertus, numbers=XIELU),
    "arcee": GgufFamily("ArceeForCausalLM", UNGATED, read_llama, is_permuted=True, values={"hidden_act": "relu2"}),
    "bloom": GgufFamily("BloomForCausalLM", BLOOM, _bloom, BLOOM_OUTER, "transformer.h.", order=_fused_order),
    "chatglm": GgufFamily("GlmForCausalLM", GLM, _glm),
    "command-r": GgufFamily("CohereForCausalLM", COHERE, _cohere),
    "cohere2": GgufFamily("Cohere2ForCausalLM", COHERE, _cohere2),
    "ernie4_5": GgufFamily("Ernie4_5ForCausalLM", LLAMA, _ernie),
    "exaone4": GgufFamily("Exaone4ForCausalLM", POSTNORM, _exaone4),
    "exaone": GgufFamily("LlamaForCausalLM", LLAMA, read_llama),
    "falcon": replace(FALCON, variants={"attn_norm_2": replace(FALCON, layer=FALCON_TWO)}),
    "gptneox": GgufFamily("GPTNeoXForCausalLM", NEOX, _neox, NEOX_OUTER, "gpt_neox.layers.", order=_fused_order),
    "granite": GgufFamily("GraniteForCausalLM", LLAMA, read_granite, is_permuted=True),
    "hunyuan-dense": GgufFamily("HunYuanDenseV1ForCausalLM", HUNYUAN, _hunyuan),
    "internlm2": GgufFamily("LlamaForCausalLM", LLAMA, read_llama, is_permuted=True),
    "jais2": GgufFamily("Jais2ForCausalLM", UNGATED, _jais2),
    "minicpm": GgufFamily("MiniCPMForCausalLM", LLAMA, _minicpm, is_permuted=True),
    "mistral3": GgufFamily("Ministral3ForCausalLM", LLAMA, _ministral3, is_permuted=True),
    "mpt": GgufFamily("MptForCausalLM", MPT, _mpt, MPT_OUTER, "transformer.blocks."),
    "nemotron": GgufFamily("NemotronForCausalLM", UNGATED, _nemotron, values=NEMOTRON),
    "olmo": GgufFamily("OlmoForCausalLM", LLAMA, _olmo, is_permuted=True),
    "olmo2": GgufFamily("Olmo2ForCausalLM", POSTNORM, _olmo2),
    "phi2": GgufFamily("PhiForCausalLM", PHI, _phi2, PHI_OUTER),
    "qwen2vl": GgufFamily("Qwen2_5_VLForConditionalGeneration", LLAMA, _qwen2vl),
    "qwen3vl": GgufFamily("Qwen3VLForConditionalGeneration", {**LLAMA, **HEAD_NORMS}, _qwen3vl),
    "seed_oss": GgufFamily("SeedOssForCausalLM", SEED, _seed_oss),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", LLAMA, read_llama, is_permuted=True),
    "stablelm": GgufFamily("StableLmForCausalLM", STABLELM, _stablelm),
    "starcoder2": GgufFamily("Starcoder2ForCausalLM", STARCODER, _starcoder2),
}
