"""Tiny checkpoints of Qwen's families and of GLM's, which have the same images."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import (
    Glm4vImageProcessorPil,
    PreTrainedModel,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)

from tests.models.vision_base import (
    HYBRID_TEXT,
    IMAGE,
    QWEN_SIZE,
    ROPE,
    TEXT,
    Family,
    of_grid,
    without_torchvision,
    written_config,
)

QWEN3_PROCESSOR = partial(
    Qwen2VLImageProcessorPil,
    size={"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 30},
    patch_size=16,
    image_mean=[0.5] * 3,
    image_std=[0.5] * 3,
)
HALF_ROPE = {**ROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
QWEN_VISION = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64}
QWEN3_VISION = {**QWEN_VISION, "num_position_embeddings": 36}
GLM_VISION = {**QWEN_VISION, "image_size": 56}
GLM_PROCESSOR = partial(Glm4vImageProcessorPil, size={"shortest_edge": 28 * 28 * 8, "longest_edge": 28 * 28 * 60})
GLMGA_PROCESSOR = partial(
    without_torchvision("glmga", "image_processing_pil").GlmgaImageProcessorPil,
    size={"shortest_edge": 28 * 28 * 8, "longest_edge": 28 * 28 * 60},
)
COMPASS_PROCESSOR = partial(
    without_torchvision("cohere_compass", "image_processing_pil").CohereCompassImageProcessorPil,
    size={"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 30},
    patch_size=16,
)
AUDIO = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "output_dim": 64}


def _omni3() -> PreTrainedModel:
    """The part of Qwen3-Omni that reads images and writes text."""
    config = Qwen3OmniMoeThinkerConfig(
        text_config={
            **TEXT,
            "rope_parameters": {**ROPE, "mrope_interleaved": True},
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
        vision_config={**QWEN3_VISION, "depth": 3, "deepstack_visual_indexes": [0, 2]},
        audio_config={**AUDIO, "downsample_hidden_size": 8, "num_mel_bins": 16},
        image_token_id=IMAGE,
    )
    return Qwen3OmniMoeThinkerForConditionalGeneration._from_config(config, attn_implementation="eager")


def _omni25() -> PreTrainedModel:
    """That of Qwen2.5-Omni."""
    config = Qwen2_5OmniThinkerConfig(
        text_config={**TEXT, "rope_parameters": ROPE},
        vision_config={**QWEN_VISION, "depth": 3, "fullatt_block_indexes": [1], "window_size": 56},
        audio_config={**AUDIO, "num_mel_bins": 16},
        image_token_index=IMAGE,
    )
    return Qwen2_5OmniThinkerForConditionalGeneration._from_config(config, attn_implementation="eager")


def as_omni(folder: Path, whole: str) -> None:
    """Within the whole model, as it is published."""
    config, stored = written_config(folder), load_file(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architectures": [whole], "thinker_config": config}))
    names = {
        name: name.replace("model.language_model.", "model.").replace("model.visual.", "visual.") for name in stored
    }
    save_file({f"thinker.{names[name]}": tensor for name, tensor in stored.items()}, folder / "model.safetensors")


QWEN = {
    "qwen2_5_vl": Family(
        "qwen2_5_vl",
        {
            "text_config": {**TEXT, "rope_parameters": ROPE},
            "vision_config": {
                **QWEN_VISION,
                "depth": 3,
                "fullatt_block_indexes": [1],
                "patch_size": 14,
                "window_size": 56,
            },
            "image_token_id": IMAGE,
        },
        lambda: Qwen2VLImageProcessorPil(size=QWEN_SIZE),
        of_grid,
    ),
    "qwen3_vl": Family(
        "qwen3_vl",
        {
            "text_config": {**TEXT, "rope_parameters": {**ROPE, "mrope_interleaved": True, "mrope_section": [4, 2, 2]}},
            "vision_config": {**QWEN3_VISION, "depth": 4, "deepstack_visual_indexes": [0, 2, 3]},
            "image_token_id": IMAGE,
        },
        QWEN3_PROCESSOR,
        of_grid,
    ),
    "qwen3_vl_moe": Family(
        "qwen3_vl_moe",
        {
            "text_config": {
                **TEXT,
                "rope_parameters": {**ROPE, "mrope_interleaved": True},
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
            },
            "vision_config": {**QWEN3_VISION, "deepstack_visual_indexes": [1]},
            "image_token_id": IMAGE,
        },
        QWEN3_PROCESSOR,
        of_grid,
    ),
    "omni_qwen2_5": Family(
        "",
        {},
        lambda: Qwen2VLImageProcessorPil(size=QWEN_SIZE),
        of_grid,
        rewrite=partial(as_omni, whole="Qwen2_5OmniModel"),
        model=_omni25,
    ),
    "omni_qwen3": Family(
        "",
        {},
        QWEN3_PROCESSOR,
        of_grid,
        rewrite=partial(as_omni, whole="Qwen3OmniMoeForConditionalGeneration"),
        model=_omni3,
    ),
    "qwen3_5": Family(
        "qwen3_5",
        {
            "text_config": HYBRID_TEXT,
            "vision_config": QWEN3_VISION,
            "image_token_id": IMAGE,
        },
        QWEN3_PROCESSOR,
        of_grid,
    ),
    "qwen2_vl": Family(
        "qwen2_vl",
        {
            "text_config": {**TEXT, "rope_parameters": ROPE},
            "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 64},
            "image_token_id": IMAGE,
        },
        lambda: Qwen2VLImageProcessorPil(size=QWEN_SIZE),
        of_grid,
    ),
    "glm4v": Family(
        "glm4v",
        {"text_config": {**TEXT, "rope_parameters": HALF_ROPE}, "vision_config": GLM_VISION, "image_token_id": IMAGE},
        GLM_PROCESSOR,
        of_grid,
    ),
    "cohere_compass": Family(
        "cohere_compass",
        {
            "text_config": {
                **TEXT,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "sliding_window": 40,
                "rope_parameters": {
                    "sliding_attention": {**ROPE, "mrope_section": [4, 2, 2]},
                    "full_attention": {**ROPE, "rope_theta": 90.0, "mrope_section": [4, 2, 2]},
                },
            },
            "vision_config": {**QWEN3_VISION, "depth": 4, "deepstack_visual_indexes": [0, 2, 3]},
            "image_token_id": IMAGE,
        },
        COMPASS_PROCESSOR,
        of_grid,
    ),
    "glmga": Family(
        "glmga",
        {"text_config": {**TEXT, "rope_parameters": HALF_ROPE}, "vision_config": GLM_VISION, "image_token_id": IMAGE},
        GLMGA_PROCESSOR,
        of_grid,
    ),
    "glm4v_moe": Family(
        "glm4v_moe",
        {
            "text_config": {
                **TEXT,
                "rope_parameters": HALF_ROPE,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
            },
            "vision_config": {**GLM_VISION, "attention_bias": True},
            "image_token_id": IMAGE,
        },
        GLM_PROCESSOR,
        of_grid,
    ),
    "glm_ocr": Family(
        "glm_ocr",
        {"text_config": {**TEXT, "rope_parameters": ROPE}, "vision_config": GLM_VISION, "image_token_id": IMAGE},
        GLM_PROCESSOR,
        of_grid,
    ),
}
