"""The features of each architecture, detected by building a small model with the code that loads checkpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.models.config_keys import ConfigKeys
from octavo.models.hybrid import LINEAR
from octavo.models.model_config import FULL, SLIDING, ModelConfig
from octavo.models.registry import ARCHITECTURES, load_model
from octavo.quant.stored.stored_weight import WeightFormat

KEYS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "n_embd": 64,
    "n_layer": 12,
    "n_head": 4,
    "n_positions": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_topk": 2,
    "prefix_dense_intermediate_size": 64,
    "ffn_dim": 64,
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 12,
    "full_attn_idxs": [2, 5],
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "sliding_window": 8,
    "use_sliding_window": True,
    "max_window_layers": 1,
}
"""Sizes under the config keys of all families; each family reads its own."""


MINIMAX = ("MiniMaxForCausalLM", "MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM")
CHATGLM = {"padded_vocab_size": 64, "num_layers": 2, "ffn_hidden_size": 64, "kv_channels": 16, "seq_length": 64}
CHATGLM |= {"multi_query_attention": True, "multi_query_group_num": 2}
NAS_BLOCK = {"attention": {"n_heads_in_group": 2}, "ffn": {"intermediate_size": 64}}
OWN_KEYS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("ChatGLMForCausalLM", "ChatGLMForConditionalGeneration", "ChatGLMModel"), CHATGLM),
    "DeciLMForCausalLM": {"num_hidden_layers": 2, "block_configs": [NAS_BLOCK] * 2},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 4},
    **{
        name: {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL]}
        for name in ("CohereCompassForCausalLM", "LagunaForCausalLM", "MellumForCausalLM")
    },
    "Step3p5ForCausalLM": {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "moe_layers_enum": "1"},
    "BailingHybridForCausalLM": {"num_hidden_layers": 2, "layer_types": [LINEAR, FULL], "first_k_dense_replace": 1},
    "DeepseekV4ForCausalLM": {
        **dict.fromkeys(("head_dim", "o_lora_rank", "index_head_dim"), 16),
        **dict.fromkeys(("o_groups", "index_n_heads", "num_hidden_layers"), 2),
        "index_topk": 4,
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "Dots3NoteForCausalLM": {
        **dict.fromkeys(
            ("swa_num_attention_heads", "swa_num_key_value_heads", "num_hidden_layers", "index_n_heads"), 2
        ),
        **dict.fromkeys(("swa_q_lora_rank", "swa_kv_lora_rank", "swa_head_dim", "index_head_dim", "index_topk"), 16),
        **dict.fromkeys(("swa_qk_nope_head_dim", "swa_v_head_dim"), 8),
        "layer_types": ["indexed_attention", SLIDING],
    },
    "Glm5NextForCausalLM": {
        "qk_rope_head_dim": 0,
        "num_hidden_layers": 2,
        "layer_types": [LINEAR, "indexed_attention"],
        "first_k_dense_replace": 1,
    },
    "GPTJForCausalLM": {"rotary_dim": 8},
    "GPTNeoForCausalLM": {"num_layers": 2, "num_heads": 4},
    "LongcatFlashForCausalLM": {"num_layers": 2, "zero_expert_num": 2},
    "Mamba2ForCausalLM": {"num_heads": 4, "head_dim": 32, "expand": 2},
    **{name: {"shared_intermediate_size": 0} for name in MINIMAX},
    "Zamba2ForCausalLM": {"layers_block_type": ["mamba", "hybrid"] * 6},
    "Qwen4ExpForCausalLM": {
        **dict(zip(("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim"), (4, 1, 128), strict=True)),
        "indexer_budget": 32,
        "indexer_compress_ratio": 16,
        "hc_lowrank": 16,
        "ngram_vocab_size_base": 50,
        "num_hidden_layers": 2,
        "layer_types": [FULL, LINEAR],
        "ple_layer_ids": [2],
        "eos_token_id": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "heads_per_ngram": 2,
    },
    "InklingForCausalLM": {
        "num_hidden_layers": 2,
        "layer_types": ["hybrid", "hybrid_sliding"],
        "mlp_layer_types": ["dense", "sparse"],
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "rel_extent": 32,
    },
    "Inkling2ForCausalLM": {
        "num_hidden_layers": 2,
        "layer_types": ["hybrid", "hybrid_sliding"],
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "sliding_window_size": 8,
        "rel_extent": 32,
    },
    "ZayaForCausalLM": {
        "num_experts_per_tok": None,
        "num_hidden_layers": 2,
        "layer_types": ["hybrid", "hybrid_sliding"],
    },
    "NemotronHForCausalLM": {"layers_block_type": ["mamba", "attention", "moe"] * 4},
}
"""Keys of families that have no defaults for them."""


LAYER = re.compile(r"\.\d+\.")
"""Matches the layer index in a parameter name."""


class Nothing:
    """A weight source with any name and shape but no content; records which matrices were loaded."""

    is_dummy = True

    def __init__(self) -> None:
        self.matrices: list[str] = []

    def names(self) -> set[str]:
        return set()

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        raise KeyError(name)

    def load(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) > 1:
            self.matrices.append(name)
        return torch.empty(shape, device="meta")


@dataclass(frozen=True)
class Features:
    """Features of a decoder architecture."""

    not_adaptable: tuple[str, ...]
    """Layer matrices that LoRA adapters cannot change, with the name of their module where their own has another
    meaning, too, as in ``conv.conv``."""
    windows: str
    """Which layers may have a sliding window: "all", "some" or "-"."""


def features(architecture: str) -> Features:
    """Build a small model of this architecture and inspect it."""
    keys = ConfigKeys({"architectures": [architecture], **KEYS, **OWN_KEYS.get(architecture, {})})
    config: ModelConfig = ARCHITECTURES[architecture].read_config(keys, None)
    source = Nothing()
    loaded = load_model(config, source, WeightFormat(torch.float32, torch.device("meta")))
    others = [name for name in source.matrices if name.removesuffix(".weight") not in loaded.maps]
    adaptable = [f".{name}." for name in loaded.maps if LAYER.search(name)]
    parts = {"experts" if ".experts." in name else _part(name, adaptable) for name in others if LAYER.search(name)}
    windows = [spec.window for spec in config.cache]
    return Features(tuple(sorted(parts)), "all" if all(windows) else "some" if any(windows) else "-")


def _part(name: str, adaptable: Sequence[str]) -> str:
    """The name of a matrix by itself, or with that of its module where an adaptable map's name has the same part."""
    module, own = name.removesuffix(".weight").split(".")[-2:]
    return f"{module}.{own}" if any(f".{own}." in other for other in adaptable) else own
