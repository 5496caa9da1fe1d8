"""Tiny random models of any class of the library transformers: its own configuration with small sizes.

A size is reduced wherever its key occurs, in parts for text, images and audio too; lists with an entry per layer are
left to the class's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VOCAB_SIZE = 331
NUM_LAYERS = 4
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size": 48,
    "hidden_size_per_layer_input": 8,
    "embed_dim": 48,
    "out_hidden_size": 48,
    "projector_hidden_size": 48,
    "word_embed_proj_dim": 48,
    "n_embd": 48,
    "d_model": 48,
    "intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "ffn_dim": 64,
    "ffn_hidden_size": 64,
    "shared_intermediate_size": 24,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_hidden_layers": NUM_LAYERS,
    "n_layer": NUM_LAYERS,
    "n_layers": NUM_LAYERS,
    "decoder_layers": NUM_LAYERS,
    "depth": 2,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "global_head_dim": 24,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "sliding_window": 24,
    "image_size": 56,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 12,
}
"""The most of each size."""
LISTS = ("layer_types", "layer_rope_theta", "no_rope_layers", "mlp_layer_types", "moe_layers", "per_layer_config")
"""Keys with an entry per layer."""
ROPE = ("rope_parameters", "rope_scaling")
MROPE = (
    "glm46v",
    "glm4v",
    "glm4v_moe",
    "glm_ocr",
    "paddleocr_vl",
    "qwen2_5_omni_thinker",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
)
"""Kinds that divide a head among three dimensions of a position, by default in parts that a small head lacks."""


def tiny_config(kind: str, **changes: Any) -> Any:
    """The configuration of ``model_type`` ``kind`` with small sizes; ``changes`` are made to the part for text.

    Raises what the library raises for sizes that do not go together.
    """
    from transformers import AutoConfig

    values = _smaller(AutoConfig.for_model(kind).to_dict())
    values.pop("model_type", None)
    text = values["text_config"] if isinstance(values.get("text_config"), dict) else values
    text.update(changes)
    config = AutoConfig.for_model(kind, **values)
    part = config.get_text_config()
    rope = getattr(part, "rope_parameters", None)
    if isinstance(rope, Mapping) and ("mrope_section" in rope or kind in MROPE):
        width = getattr(part, "head_dim", None) or part.hidden_size // part.num_attention_heads
        pairs = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
        part.rope_parameters = {**rope, "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]}
    return config


def _smaller(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and key not in (*ROPE, *LISTS):
            found[key] = _smaller(value)
        elif key in LISTS or value is None:
            continue
        elif isinstance(value, bool) or not isinstance(value, int):
            found[key] = 2 if key == "eos_token_id" else value
        elif key == "vocab_size":
            found[key] = VOCAB_SIZE
        elif key in SIZES:
            found[key] = min(value, SIZES[key])
        elif key.endswith(("token_id", "token_index")):
            found[key] = 2 if key.startswith("eos") else min(value, VOCAB_SIZE - 1)
        else:
            found[key] = value
    return found


def tiny_model(config: Any, model_class: Any, scale: float = 0.05) -> Any:
    """A model of this class with random float32 weights, of which none keeps its initial zero or one."""
    import torch

    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * scale)
    return model
