"""The names of tensors in GGUF files, those of llama.cpp's converter, and the parameters that they are.

A tensor without a place may change what the model computes, so it is refused rather than ignored.
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
from octavo.weights.gguf.gguf_rope import FACTOR_TENSORS

Config = dict[str, Any]

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
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
SANDWICH = {**ATTENTION, "ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm"}
SANDWICH["post_ffw_norm"] = "post_feedforward_layernorm"
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


WITHOUT_SUFFIX = ("_bias", ".sinks", ".A_log", ".D", ".layer_scalar", "router.scale", ".per_expert_scale")
"""Suffixes of parameter names that are not followed by ".weight"."""
_LAYER_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z0-9_]+(?:\.[a-z_]+)??)(?:\.(weight|bias))?")


def places_of(file: GGUFFile, architecture: str, family: GgufFamily, config: Config) -> dict[str, TensorPlace]:
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
