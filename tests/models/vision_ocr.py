"""Tiny checkpoints of families that read documents with SAM's encoder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    DeepseekOcr2ImageProcessorPil,
    GotOcr2ImageProcessorPil,
    PreTrainedModel,
)

from tests.models.vision_base import HALF, IMAGE, SMALL_TOWER, TEXT, Family, cut_up, without_torchvision

SIDE, TILE = 80, 60
"""Pixels of the entire image and of a tile; 16 patches of 5 and 4 embeddings in a row, 12 and 3."""
ODD_SIDE = 70
"""With 14 patches in a row, which are halved twice: to 7, then to 4."""
SAM = {**SMALL_TOWER, "image_size": SIDE, "patch_size": 5, "mlp_dim": 128, "output_channels": 16}
SAM |= {"window_size": 5, "global_attn_indexes": [1], "downsample_channels": [24, 32], "initializer_range": 0.05}
EXPERTS = {
    **{key: value for key, value in TEXT.items() if key != "head_dim"},
    "n_routed_experts": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "mlp_layer_types": ["dense", *["sparse"] * 3],
    "topk_method": "greedy",
}
SAVED = {"size": {"height": SIDE, "width": SIDE}, "tile_size": TILE, "max_patches": 2}


class Views:
    """The library's processor, which needs torchvision, with Pillow in its place, as DeepSeek has it."""

    def __call__(self, images: list[Image.Image], return_tensors: str) -> dict[str, Any]:
        theirs = without_torchvision("unlimited_ocr", "image_processing")
        tiles, wholes, grids = list[Image.Image](), list[Image.Image](), list[tuple[int, int]]()
        for image in images:
            columns, rows = 0, 0
            if max(image.size) > TILE:
                columns, rows = theirs.get_optimal_tiled_canvas((image.height, image.width), (TILE, TILE), 2, 2)
                tiles += cut_up(image.resize((columns * TILE, rows * TILE)), rows, columns, TILE)
            wholes.append(ImageOps.pad(image, (SIDE, SIDE), color=(127, 127, 127)))
            grids.append((columns, rows))
        found = {"patches_grid": grids, "num_local_patches": [columns * rows for columns, rows in grids]}
        found |= {"pixel_values": _numbers(wholes)}
        return found | ({"pixel_values_local": _numbers(tiles)} if tiles else {})

    def save_pretrained(self, folder: Path) -> None:
        (folder / "preprocessor_config.json").write_text(json.dumps({**SAVED, **HALF, "patch_size": 5}))


def _numbers(tiles: Sequence[Image.Image]) -> torch.Tensor:
    pixels = np.stack([np.asarray(tile, np.float32) / 255 * 2 - 1 for tile in tiles])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2)


def _as_deepseek(folder: Path) -> None:
    """With the configuration of DeepSeek-OCR, whose weights have these names."""
    config = json.loads((folder / "config.json").read_text())
    text = {key: value for key, value in EXPERTS.items() if key != "mlp_layer_types"}
    text |= {"model_type": "deepseek_v2", "use_mla": False, "first_k_dense_replace": 1, "kv_lora_rank": None}
    text |= {"qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0, "q_lora_rank": None}
    widths = {
        "clip-l-14-224": {"heads": 2, "image_size": 28, "layers": 2, "patch_size": 14, "width": 32},
        "sam_vit_b": {"heads": 2, "layers": 3, "width": 32, "downsample_channels": [24, 32]}
        | {key: SAM[key] for key in ("image_size", "patch_size", "output_channels", "window_size")}
        | {"global_attn_indexes": [1]},
    }
    vision = {"image_size": SIDE, "model_type": "vision", "model_name": "deeplip_b_l", "width": widths}
    own = {"architectures": ["DeepseekOCRForCausalLM"], "model_type": "deepseek_vl_v2", "language_config": text}
    own |= {"vision_config": vision, "torch_dtype": config["dtype"], "image_token_id": IMAGE}
    (folder / "config.json").write_text(json.dumps(own))


def _with_few_queries() -> PreTrainedModel:
    """DeepSeek-OCR 2 with as many queries as its tiny images have patches; the library knows two sizes."""
    config = AutoConfig.for_model(
        "deepseek_ocr2",
        text_config=EXPERTS,
        vision_config={
            "sam_config": SAM,
            "encoder_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
        image_token_id=IMAGE,
    )
    model: Any = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    tower = model.model.vision_tower
    tables = {9: torch.nn.Embedding(9, 32), 16: torch.nn.Embedding(16, 32)}
    tower.query_768_resolution, tower.query_1024_resolution = tables.values()

    def choose(_: Any, __: Any, found: Any) -> None:
        tower.query_768_resolution = tables[found.last_hidden_state[0, 0].numel()]

    tower.sam_encoder.register_forward_hook(choose)
    made: PreTrainedModel = model
    return made


def _of_views(found: Any, line_end: int) -> list[list[int]]:
    counts = []
    for i, number in enumerate(found["num_local_patches"]):
        columns, rows = found["patches_grid"][i] if line_end else (number, 1)
        counts.append(3 * rows * (3 * columns + line_end) + 4 * (4 + line_end) + 1)
    return [[IMAGE] * int(count) for count in counts]


OCR = {
    "deepseek_ocr": Family(
        "unlimited_ocr",
        {
            "text_config": {**EXPERTS, "sliding_window": 4096},
            "vision_config": {
                "sam_config": SAM,
                "encoder_config": {
                    **{key: SMALL_TOWER[key] for key in ("hidden_size", "num_attention_heads", "patch_size")},
                    "intermediate_size": 128,
                    "num_hidden_layers": 2,
                    "image_size": 28,
                },
            },
            "image_token_id": IMAGE,
        },
        Views,
        partial(_of_views, line_end=1),
        rewrite=_as_deepseek,
    ),
    "deepseek_ocr2": Family(
        "deepseek_ocr2",
        {},
        partial(DeepseekOcr2ImageProcessorPil, **SAVED, patch_size=5),
        partial(_of_views, line_end=0),
        model=_with_few_queries,
    ),
    "got_ocr2": Family(
        "got_ocr2",
        {
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": {key: value for key, value in SAM.items() if key != "downsample_channels"}
            | {"image_size": ODD_SIDE},
            "image_token_id": IMAGE,
        },
        partial(GotOcr2ImageProcessorPil, size={"height": ODD_SIDE, "width": ODD_SIDE}),
        lambda found: [[IMAGE] * (16 * int(count)) for count in found["num_patches"]],
    ),
}
