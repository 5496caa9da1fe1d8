"""Tiny random vision-language checkpoints, and what transformers computes with them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma3ImageProcessorPil,
    Gemma4ImageProcessorPil,
    Glm4vImageProcessorPil,
    PixtralImageProcessorPil,
    PreTrainedModel,
    Qwen2VLImageProcessorPil,
)
from transformers.models.gemma4 import image_processing_pil_gemma4

IMAGE = 250
"""Id of the placeholder."""
TEXT = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Family(NamedTuple):
    """How a family's checkpoints and their images are made."""

    model_type: str
    config: dict[str, Any]
    processor: Callable[[], Any]
    placeholders: Callable[[Any], Sequence[list[int]]]
    """Tokens of each image, from what the processor gives."""


def _of_grid(found: Any) -> Sequence[list[int]]:
    return [[IMAGE] * (int(grid.prod()) // 4) for grid in found["image_grid_thw"]]


def _in_rows(found: Any) -> Sequence[list[int]]:
    """With Pixtral's tokens behind each row, and behind the last one."""
    sizes = [(int(rows) // 28, int(columns) // 28) for rows, columns in found["image_sizes"]]
    return [[*([*[IMAGE] * columns, 12] * rows)[:-1], 13] for rows, columns in sizes]


def _of_squares(found: Any) -> Sequence[list[int]]:
    return [[IMAGE] * int(count) for count in found["num_soft_tokens_per_image"]]


image_processing_pil_gemma4._SUPPORTED_SOFT_TOKENS += (12,)  # those of the library make long prompts
GEMMA4_PROCESSOR = partial(Gemma4ImageProcessorPil, patch_size=4, pooling_kernel_size=2, max_soft_tokens=12)
GEMMA4 = {
    **TEXT,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 256,
}
GEMMA4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 40,
}
QWEN_SIZE = {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 30}
QWEN3_PROCESSOR = partial(
    Qwen2VLImageProcessorPil,
    size={"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 30},
    patch_size=16,
    image_mean=[0.5] * 3,
    image_std=[0.5] * 3,
)
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
GLM_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "image_size": 56,
    "intermediate_size": 48,
    "out_hidden_size": 64,
}
GLM_PROCESSOR = partial(Glm4vImageProcessorPil, size={"shortest_edge": 28 * 28 * 8, "longest_edge": 28 * 28 * 60})
INPUTS = ("pixel_values", "image_grid_thw", "image_position_ids", "image_sizes")
"""What models take of what processors give."""
FAMILIES = {
    "qwen2_5_vl": Family(
        "qwen2_5_vl",
        {
            "text_config": {**TEXT, "rope_parameters": ROPE},
            "vision_config": {
                "depth": 3,
                "hidden_size": 32,
                "num_heads": 2,
                "intermediate_size": 48,
                "out_hidden_size": 64,
                "fullatt_block_indexes": [1],
                "patch_size": 14,
                "window_size": 56,
            },
            "image_token_id": IMAGE,
        },
        lambda: Qwen2VLImageProcessorPil(size=QWEN_SIZE),
        _of_grid,
    ),
    "qwen3_vl": Family(
        "qwen3_vl",
        {
            "text_config": {**TEXT, "rope_parameters": {**ROPE, "mrope_interleaved": True, "mrope_section": [4, 2, 2]}},
            "vision_config": {
                "depth": 4,
                "hidden_size": 32,
                "num_heads": 2,
                "intermediate_size": 48,
                "out_hidden_size": 64,
                "deepstack_visual_indexes": [0, 2, 3],
                "num_position_embeddings": 36,
            },
            "image_token_id": IMAGE,
        },
        QWEN3_PROCESSOR,
        _of_grid,
    ),
    "qwen3_5": Family(
        "qwen3_5",
        {
            "text_config": {
                **TEXT,
                "head_dim": 32,
                "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_interleaved": True},
                "layer_types": ["linear_attention", "full_attention"] * 2,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "num_heads": 2,
                "intermediate_size": 48,
                "out_hidden_size": 64,
                "num_position_embeddings": 36,
            },
            "image_token_id": IMAGE,
        },
        QWEN3_PROCESSOR,
        _of_grid,
    ),
    "qwen2_vl": Family(
        "qwen2_vl",
        {
            "text_config": {**TEXT, "rope_parameters": ROPE},
            "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 64},
            "image_token_id": IMAGE,
        },
        lambda: Qwen2VLImageProcessorPil(size=QWEN_SIZE),
        _of_grid,
    ),
    "glm4v": Family(
        "glm4v",
        {"text_config": {**TEXT, "rope_parameters": ROPE}, "vision_config": GLM_VISION, "image_token_id": IMAGE},
        GLM_PROCESSOR,
        _of_grid,
    ),
    "glm4v_moe": Family(
        "glm4v_moe",
        {
            "text_config": {
                **TEXT,
                "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
            },
            "vision_config": {**GLM_VISION, "attention_bias": True},
            "image_token_id": IMAGE,
        },
        GLM_PROCESSOR,
        _of_grid,
    ),
    "gemma4": Family(
        "gemma4",
        {
            "text_config": {**GEMMA4, "use_bidirectional_attention": "vision"},
            "vision_config": {**GEMMA4_VISION, "use_clipped_linears": True, "standardize": True},
            "image_token_id": IMAGE,
        },
        GEMMA4_PROCESSOR,
        _of_squares,
    ),
    "gemma4_causal": Family(
        "gemma4",
        {
            "text_config": {**GEMMA4, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2},
            "vision_config": GEMMA4_VISION,
            "image_token_id": IMAGE,
        },
        GEMMA4_PROCESSOR,
        _of_squares,
    ),
    "gemma4_unified": Family(
        "gemma4_unified",
        {
            "text_config": {**GEMMA4, "hidden_size_per_layer_input": 0},
            "vision_config": {
                "patch_size": 4,
                "pooling_kernel_size": 2,
                "mm_embed_dim": 32,
                "output_proj_dims": 32,
                "mm_posemb_size": 20,
            },
            "image_token_id": IMAGE,
        },
        partial(Gemma4ImageProcessorPil, patch_size=8, pooling_kernel_size=1, max_soft_tokens=12),
        _of_squares,
    ),
    "mistral3": Family(
        "mistral3",
        {
            "text_config": {"model_type": "mistral", **TEXT},
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "patch_size": 14,
            },
            "spatial_merge_size": 2,
            "image_token_id": IMAGE,
            "image_token_index": IMAGE,
        },
        lambda: PixtralImageProcessorPil(size={"longest_edge": 112}, patch_size=28),
        _in_rows,
    ),
    "gemma3": Family(
        "gemma3",
        {
            "text_config": {**TEXT, "sliding_window": 24, "sliding_window_pattern": 2},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 56,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 16 // 4,
            "image_token_id": IMAGE,
        },
        lambda: Gemma3ImageProcessorPil(size={"height": 56, "width": 56}),
        lambda found: [[IMAGE] * 4] * len(found["pixel_values"]),
    ),
}


def make(folder: Path, name: str) -> PreTrainedModel:
    """Save a random checkpoint with the configuration of its processor."""
    torch.manual_seed(5)
    family = FAMILIES[name]
    config = AutoConfig.for_model(family.model_type, **family.config)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, buffer in model.named_buffers():  # of Gemma 4, whose limits are infinite and others empty
            if name.endswith(("_min", "_max")):
                buffer.fill_(-2.0 if name.endswith("_min") else 1.5)
            elif ".std_" in name:
                buffer.normal_()
        for weight_name, weight in model.named_parameters():
            if "norm" in weight_name and weight_name.endswith("weight"):
                weight.add_(torch.randn_like(weight) * 0.2)
            elif not weight.any():  # a projection of Gemma begins with zeros
                weight.normal_(std=0.3)
            elif weight.dim() > 1:
                weight.mul_(4)  # so that attention looks at some positions more than at others
    model.eval().save_pretrained(folder)
    family.processor().save_pretrained(folder)
    return model


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A random image with coarse structure, so that resizing keeps some of it."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def as_png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def expected_logprobs(name: str, model: PreTrainedModel, prompt: list[int], images: list[Image.Image]) -> torch.Tensor:
    """Log-probabilities of the next token at each position of the expanded prompt."""
    family = FAMILIES[name]
    found = dict(family.processor()(images, return_tensors="pt")) if images else {}
    placeholders = iter(family.placeholders(found) if images else [])
    tokens = list[int]()
    for token in prompt:
        tokens += next(placeholders) if token == IMAGE else [token]
    ids = torch.tensor([tokens])
    more = {"gemma3": "token_type_ids", "mistral3": None}.get(name, "mm_token_type_ids")
    kinds: dict[str, Any] = {} if more is None else {more: (ids == IMAGE).int()}
    if name == "gemma4_unified":  # whose forward alone has other masks than its generation
        masks = model.create_masks_for_generate
        kinds["attention_mask"] = masks(model.config, model.get_input_embeddings()(ids), None, None, None, **kinds)
    found = {key: value for key, value in found.items() if key in INPUTS}
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids, **kinds, **found).logits[0]
    return logits.float().log_softmax(dim=-1)


def written_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config
