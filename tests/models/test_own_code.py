"""Families that transformers lacks: checkpoints of their relatives there, under the names that are published."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from octavo.errors import CheckpointError
from octavo.models.registry import read_config
from tests.models.families import SHAPE, VOCAB_SIZE, make_checkpoint, rope
from tests.models.test_architectures import PROMPTS, check_logits

Rename = Callable[[dict[str, Tensor]], dict[str, Tensor]]
HEAD_DIM = 8


def renamed(*pairs: tuple[str, str]) -> Rename:
    """Replaces parts of names."""

    def rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, tensor in tensors.items():
            for old, new in pairs:
                name = name.replace(old, new)
            found[name] = tensor
        return found

    return rename


def together(
    tensors: dict[str, Tensor], new: str, is_by_head: bool, old: str = "self_attn.{}_proj"
) -> dict[str, Tensor]:
    """Queries, keys and values in one matrix, one after the other or KV head by KV head."""
    found = dict(tensors)
    for name in [name for name in tensors if f".{old.format('q')}." in name]:
        parts = [found.pop(name.replace(old.format("q"), old.format(part))) for part in "qkv"]
        if is_by_head:
            heads = [part.reshape(2, -1, *part.shape[1:]) for part in parts]
            found[name.replace("self_attn.q_proj", new)] = torch.cat(heads, dim=1).flatten(0, 1)
        else:
            found[name.replace("self_attn.q_proj", new)] = torch.cat(parts)
    return found


def as_internlm2(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors = together(tensors, "attention.wqkv", is_by_head=True)
    names = (("self_attn.o_proj", "attention.wo"), ("input_layernorm", "attention_norm"), ("lm_head", "output"))
    more = (("post_attention_layernorm", "ffn_norm"), ("embed_tokens", "tok_embeddings"), ("mlp.", "feed_forward."))
    maps = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
    return renamed(*names, *more, *maps)(tensors)


def as_exaone(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    outer = (("model.layers", "transformer.h"), ("model.embed_tokens", "transformer.wte"))
    norms = (("model.norm", "transformer.ln_f"), ("input_layernorm", "ln_1"), ("post_attention_layernorm", "ln_2"))
    maps = (("mlp.gate_proj", "mlp.c_fc_0"), ("mlp.up_proj", "mlp.c_fc_1"), ("mlp.down_proj", "mlp.c_proj"))
    attention = (("self_attn.o_proj", "attn.attention.out_proj"), ("self_attn", "attn.attention"))
    return renamed(*outer, *norms, *maps, *attention)(tensors)


def as_chatglm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors = together(tensors, "self_attention.query_key_value", is_by_head=False)
    outer = (("model.layers", "transformer.encoder.layers"), ("model.norm", "transformer.encoder.final_layernorm"))
    ends = (("model.embed_tokens", "transformer.embedding.word_embeddings"), ("lm_head", "transformer.output_layer"))
    maps = (("self_attn.o_proj", "self_attention.dense"), ("gate_up_proj", "dense_h_to_4h"))
    found = renamed(*outer, *ends, *maps, ("down_proj", "dense_4h_to_h"))(tensors)
    return {**found, "transformer.rotary_pos_emb.inv_freq": torch.ones(HEAD_DIM // 4)}


def with_mtp(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "model.mtp_layers.0.input_proj.weight": torch.ones(2, 4)}


LLAMA3 = {
    "rope_theta": 500.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
CHATGLM = {
    "padded_vocab_size": VOCAB_SIZE,
    "num_layers": 2,
    "ffn_hidden_size": SHAPE["intermediate_size"],
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "kv_channels": HEAD_DIM,
    "seq_length": SHAPE["max_position_embeddings"],
    "layernorm_epsilon": 1e-5,
    "rope_ratio": 0.05,
    "rmsnorm": True,
    "original_rope": True,
    "add_qkv_bias": True,
    "add_bias_linear": False,
}
LLAMAS = ("rms_norm_eps", "hidden_act", "num_hidden_layers", "rope_parameters")
SIZES = ("vocab_size", "head_dim", "intermediate_size", "num_key_value_heads", "max_position_embeddings")
GONE: dict[str, tuple[str, ...]] = {
    "InternLM3ForCausalLM": ("attention_bias", "mlp_bias"),
    "ExaoneForCausalLM": LLAMAS,
    "ChatGLMModel": (*LLAMAS, *SIZES, "attention_bias"),
}
"""Keys of the relative that the family has other names for."""
CASES: dict[str, tuple[str, Mapping[str, Any], Rename, Mapping[str, Any]]] = {
    "InternLM2ForCausalLM": ("llama/gqa", {"bias": False}, as_internlm2, {}),
    "InternLM3ForCausalLM": ("llama/biases", {"qkv_bias": True, "bias": True}, dict, {}),
    "ExaoneForCausalLM": (
        "llama/llama3_rope",
        {"num_layers": 2, "activation_function": "silu", "layer_norm_epsilon": 1e-5, **LLAMA3},
        as_exaone,
        {},
    ),
    "ChatGLMModel": (
        "glm/fused",
        CHATGLM,
        as_chatglm,
        {"attention_bias": True, **rope("default", partial_rotary_factor=0.5)},
    ),
    "MiMoForCausalLM": ("qwen2/biases", {"num_nextn_predict_layers": 1}, with_mtp, {}),
    "IQuestCoderForCausalLM": ("llama/wide_heads", {}, dict, {}),
}
"""Architecture: the row of its relative, its own keys, what becomes of the tensors, changes of the row."""


def rewrite(folder: Path, architecture: str, keys: Mapping[str, Any], rename: Rename) -> None:
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in GONE.get(architecture, ())}
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture], **keys}))
    tensors = {name: tensor.contiguous() for name, tensor in rename(load_file(folder / "model.safetensors")).items()}
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("architecture", CASES)
def test_logits_are_those_of_a_relative(architecture: str, tmp_path: Path) -> None:
    row, keys, rename, changes = CASES[architecture]
    model = make_checkpoint(tmp_path, row, **changes)
    rewrite(tmp_path, architecture, keys, rename)
    check_logits(tmp_path, model, PROMPTS[-1])


def block(groups: int | None, **mlp: Any) -> dict[str, Any]:
    attention = {"n_heads_in_group": groups, "no_op": groups is None, "replace_with_linear": False}
    return {"attention": attention, "ffn": {"no_op": not mlp, "replace_with_linear": False, **mlp}}


BLOCKS = [
    block(2, ffn_mult=9.0),
    block(None, intermediate_size=24),
    block(4),
    block(1, intermediate_size=40),
    block(None),
]


def nas_model(folder: Path) -> PreTrainedModel:
    """A Llama whose layers differ, those without a part having zeros in its last map; and a checkpoint without it."""
    model: Any = make_checkpoint(folder, "llama/gqa", num_hidden_layers=len(BLOCKS))
    config, gone = model.config, list[str]()
    for i, part in enumerate(BLOCKS):
        layer: Any = model.model.layers[i]
        config.num_key_value_heads = config.num_attention_heads // (part["attention"]["n_heads_in_group"] or 1)
        config.intermediate_size = part["ffn"].get("intermediate_size", 256)
        layer.self_attn, layer.mlp = LlamaAttention(config, i), LlamaMLP(config)
        for weight in (*layer.self_attn.parameters(), *layer.mlp.parameters()):
            torch.nn.init.normal_(weight, std=0.2)
        if part["attention"]["no_op"]:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
            gone += [f"layers.{i}.self_attn", f"layers.{i}.input_layernorm"]
        if part["ffn"]["no_op"]:
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)
            gone += [f"layers.{i}.mlp", f"layers.{i}.post_attention_layernorm"]
    tensors = {name: part for name, part in model.state_dict().items() if not re.search("|".join(gone), name)}
    save_file(tensors, folder / "model.safetensors")
    return model.eval()


def test_layers_that_lack_parts(tmp_path: Path) -> None:
    """Nemotron-NAS: KV heads and widths of each layer, and layers without attention, without a feed-forward layer, or
    without either."""
    model = nas_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["num_key_value_heads"], config["intermediate_size"]
    changes = {"architectures": ["DeciLMForCausalLM"], "block_configs": BLOCKS}
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    check_logits(tmp_path, model, PROMPTS[-1])


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (None, "block_configs is None; it must be a list of 2 objects"),
        ([block(3, ffn_mult=1.0)] * 2, "n_heads_in_group is 3; it must be a divisor of num_attention_heads, 4"),
        ([block(None, ffn_mult=1.0)] * 2, "such that a layer has attention"),
        ([{"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}}] * 2, "replace_with_linear is True"),
    ],
)
def test_layers_that_are_not_known_are_refused(blocks: Any, message: str) -> None:
    keys = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    with pytest.raises(CheckpointError, match=message):
        read_config({"architectures": ["DeciLMForCausalLM"], "block_configs": blocks, **keys})
