"""The ``llama`` architecture of GGUF files in the terms of Hugging Face: configuration and tensor names.

Metadata keys are defined by the GGUF specification. A key or tensor that is not known here may change
what the model computes, so it is refused rather than skipped.
"""

from __future__ import annotations

import math
import re
from typing import Any, NoReturn

from octavo.errors import CheckpointError
from octavo.weights.gguf import GGUFFile

PREFIX = "llama."
COUNTS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
"""Keys that must be there, positive integers, and their names in ``config.json``."""

OTHER_KEYS = {
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "tensor_data_layout",
    "vocab_size",
}

TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FACTORS = "rope_freqs.weight"
"""Optional float32 [head_dim / 2]: what to divide each rotary frequency by, how files of Llama 3 scale them."""

_LAYER_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.(weight|bias)")


def translate_names(file: GGUFFile) -> dict[str, str]:
    """Hugging Face parameter name to tensor name, for every tensor but the rotary factors."""
    names = {}
    for name in file.tensors:
        if name == FACTORS:
            continue
        layer = _LAYER_NAME.fullmatch(name)
        if name in TENSORS:
            names[TENSORS[name]] = name
        elif layer and layer[2] in LAYER_TENSORS:
            names[f"model.layers.{layer[1]}.{LAYER_TENSORS[layer[2]]}.{layer[3]}"] = name
        else:
            raise CheckpointError(f"{file.path}: tensor {name[:100]!r} has no place in the llama architecture")
    return names


def translate_config(file: GGUFFile) -> dict[str, Any]:
    """The metadata of a llama file as the keys of ``config.json``; raise ``CheckpointError`` naming the key."""
    _refuse_unknown_keys(file)
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    for key, name in COUNTS.items():
        config[name] = _count(file, key)
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = _count(file, "attention.head_count_kv", heads)
    config["head_dim"] = _head_dim(file, config["hidden_size"] // heads)
    config["rms_norm_eps"] = _real(file, "attention.layer_norm_rms_epsilon")
    config["rope_theta"] = _real(file, "rope.freq_base", 10000.0)
    config["rope_scaling"] = _rope_scaling(file, config["head_dim"])
    config["vocab_size"] = _vocab_size(file, config["hidden_size"])
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    if config["num_hidden_layers"] > len(file.tensors):
        _fail(file, "block_count", f"{config['num_hidden_layers']}, but there are only {len(file.tensors)} tensors")
    return config


def _refuse_unknown_keys(file: GGUFFile) -> None:
    if _count(file, "expert_count", 0, low=0):
        _fail(file, "expert_count", "mixtures of experts are not supported in GGUF files")
    known = {"expert_count", "expert_used_count", *COUNTS, *OTHER_KEYS}
    for key in file.metadata:
        if key.startswith(PREFIX) and key.removeprefix(PREFIX) not in known:
            _fail(file, key.removeprefix(PREFIX)[:100], "this key is not known, and may change what the model computes")


def _head_dim(file: GGUFFile, default: int) -> int:
    """The width of a head, which must be the same for keys, values and the rotary embedding."""
    rotary = _count(file, "rope.dimension_count", default)
    for key in ("attention.key_length", "attention.value_length"):
        if (length := _count(file, key, rotary)) != rotary:
            _fail(file, key, f"is {length}, but must equal the rotary width {rotary}")
    if rotary % 2:
        _fail(file, "rope.dimension_count", f"is {rotary}, but must be even")
    return rotary


def _rope_scaling(file: GGUFFile, head_dim: int) -> dict[str, Any] | None:
    """``{"rope_type": "factors", "factors": [head_dim / 2 numbers]}`` from the factors' tensor, or
    ``{"rope_type": ..., "factor": ...}`` from the metadata, or ``None``."""
    default = "linear" if PREFIX + "rope.scaling.factor" in file.metadata else "none"
    kind = file.metadata.get(PREFIX + "rope.scaling.type", default)
    if FACTORS in file.tensors:
        tensor = file.tensors[FACTORS]
        if tensor.kind != "F32" or tensor.shape != (head_dim // 2,) or kind != "none":
            raise CheckpointError(
                f"{file.path}: tensor {FACTORS!r}: is {tensor.kind} {tensor.shape} with rope.scaling.type {kind!r}, "
                f"expected F32 {(head_dim // 2,)} and no other scaling"
            )
        return {"rope_type": "factors", "factors": file.data(FACTORS).view("<f4").tolist()}
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        _fail(file, "rope.scaling.type", f"is {str(kind)[:100]!r}, supported are none, linear and yarn")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _real(file, "rope.scaling.factor")}
    if kind == "yarn":
        length = _count(file, "rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = length
    return scaling


def _vocab_size(file: GGUFFile, hidden_size: int) -> int:
    """Rows of the embedding; the key of that name is optional and must agree."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: there is no tensor 'token_embd.weight'")
    rows = _count(file, "vocab_size", embedding.shape[0])
    if embedding.shape != (rows, hidden_size):
        raise CheckpointError(
            f"{file.path}: tensor 'token_embd.weight': has shape {embedding.shape}, expected {(rows, hidden_size)}"
        )
    return rows


def _count(file: GGUFFile, key: str, default: int | None = None, low: int = 1) -> int:
    """An integer of the metadata from ``low`` to 2**31; without a default it must be there."""
    value = file.metadata.get(PREFIX + key, default)
    if type(value) is not int or not low <= value < 1 << 31:
        _fail(file, key, f"is {str(value)[:100]}, expected an integer from {low} to 2**31 - 1")
    return value


def _real(file: GGUFFile, key: str, default: float | None = None) -> float:
    """A positive number of the metadata; without a default it must be there."""
    value = file.metadata.get(PREFIX + key, default)
    if type(value) is not float or not 0 < value < math.inf:
        _fail(file, key, f"is {str(value)[:100]}, expected a positive number")
    return value


def _fail(file: GGUFFile, key: str, problem: str) -> NoReturn:
    raise CheckpointError(f"{file.path}: metadata {PREFIX + key!r}: {problem}")
