"""Tiny checkpoints of families whose processors need torchvision: Pillow resizes in its place, as in this engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import (
    AyaVisionProcessor,
    Cohere2VisionProcessor,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    GotOcr2ImageProcessorPil,
    Lfm2VlProcessor,
    Llama4Processor,
    MiniCPMV4_6ImageProcessorPil,
    MiniCPMV4_6Processor,
    PaddleOCRVLImageProcessorPil,
    PixtralImageProcessorPil,
    ProcessorMixin,
    Qwen2VLImageProcessorPil,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from transformers.image_utils import SizeDict

from tests.models.vision_base import (
    HALF,
    HYBRID_TEXT,
    IMAGE,
    PIXTRAL_VISION,
    QWEN_SIZE,
    ROPE,
    SMALL_TOWER,
    TEXT,
    Family,
    cut_up,
    of_grid,
    tokenizer,
    without_torchvision,
)

TILE = 56
Cut = tuple[list[Image.Image], tuple[int, ...]]
"""The tiles of an image and last the entire one, and what the library's processor says of them."""


class Tiles:
    """Gives what a processor of the library would, for images that are cut by ``cut``."""

    def __init__(self, cut: Callable[[Image.Image], Cut], saved: dict[str, Any], packs: int = 0) -> None:
        """``saved`` is the processor's file; ``packs``: the side of patches into which images are cut, 0 for none."""
        self.cut, self.saved, self.packs = cut, saved, packs

    def __call__(self, images: list[Image.Image], return_tensors: str) -> dict[str, Any]:
        mean, deviation = (np.array(self.saved[key], np.float32) for key in ("image_mean", "image_std"))
        parts = [self.cut(image) for image in images]
        tiles = [(np.asarray(tile, np.float32) / 255 - mean) / deviation for tiles, _ in parts for tile in tiles]
        found: dict[str, Any] = {"numbers": [numbers for _, numbers in parts]}
        found["num_patches"] = [len(tiles) for tiles, _ in parts]
        if not self.packs:
            return found | {"pixel_values": torch.from_numpy(np.stack(tiles)).permute(0, 3, 1, 2)}
        return found | packed(tiles, self.packs)

    def save_pretrained(self, folder: Path) -> None:
        (folder / "preprocessor_config.json").write_text(json.dumps(self.saved))


def packed(tiles: Sequence[Any], side: int) -> dict[str, Any]:
    """Patches of SigLIP 2, filled up."""
    shapes = torch.tensor([[tile.shape[0] // side, tile.shape[1] // side] for tile in tiles])
    counts = shapes.prod(-1)
    pixels = torch.zeros(len(tiles), int(counts.max()), side * side * 3)
    for i, (tile, (rows, columns)) in enumerate(zip(tiles, shapes.tolist(), strict=True)):
        cells = torch.from_numpy(tile).reshape(rows, side, columns, side, 3).transpose(1, 2)
        pixels[i, : rows * columns] = cells.reshape(rows * columns, -1)
    mask = (torch.arange(int(counts.max())) < counts[:, None]).int()
    return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def _cohere(image: Image.Image) -> Cut:
    theirs = without_torchvision("cohere2_vision", "image_processing")
    columns, rows = theirs.get_optimal_tiled_canvas((image.height, image.width), (TILE, TILE), 1, 3)
    resized = image.resize((columns * TILE, rows * TILE), Image.Resampling.BICUBIC)
    tiles = cut_up(resized, rows, columns, TILE)
    whole = [image.resize((TILE, TILE), Image.Resampling.BICUBIC)] if len(tiles) > 1 else []
    return [*tiles, *whole], ()


def _llama4(image: Image.Image) -> Cut:
    theirs, size = without_torchvision("llama4", "image_processing"), (image.height, image.width)
    sizes = torch.tensor(theirs.find_supported_resolutions(max_num_chunks=4, patch_size=SizeDict(TILE, TILE)))
    target = theirs.get_best_fit(size, sizes).tolist()
    most = tuple(min(max(length, TILE), limit) for length, limit in zip(size, target, strict=True))
    height, width = theirs.get_max_res_without_distortion(size, most)
    filled = Image.new("RGB", (target[1], target[0]))
    filled.paste(image.resize((width, height), Image.Resampling.BILINEAR))
    rows, columns = target[0] // TILE, target[1] // TILE
    tiles = cut_up(filled, rows, columns, TILE)
    whole = [image.resize((TILE, TILE), Image.Resampling.BILINEAR)] if len(tiles) > 1 else []
    return [*tiles, *whole], (rows, columns)


def _lfm2(image: Image.Image) -> Cut:
    theirs = without_torchvision("lfm2_vl", "image_processing").Lfm2VlImageProcessor
    processor = object.__new__(theirs)
    known = {"max_image_tokens": 16, "encoder_patch_size": 16, "downsample_factor": 2}
    size = {"height": image.height, "width": image.width}
    width, height = processor.smart_resize(**size, min_image_tokens=4, **known)
    rows = columns = 1
    tiles: list[Image.Image] = []
    if processor._is_image_too_large(**size, **known, max_pixels_tolerance=0.5):
        columns, rows, *_ = processor._get_grid_layout(**size, min_tiles=2, max_tiles=4, tile_size=64)
        tiles = cut_up(image.resize((columns * 64, rows * 64), Image.Resampling.BILINEAR), rows, columns, 64)
    return [*tiles, image.resize((width, height), Image.Resampling.BILINEAR)], (rows, columns, height, width)


COHERE_TOKENS = {"<|IMG_PATCH|>": IMAGE, "<|IMG_LINE_BREAK|>": 251, "<|START_OF_IMG|>": 252, "<|END_OF_IMG|>": 253}
AYA_TOKENS = {**COHERE_TOKENS, "TILE_GLOBAL": 249} | {f"TILE_{i}": 240 + i for i in range(1, 4)}
LLAMA4_TOKENS = {"<|patch|>": IMAGE, "<|tile_x_separator|>": 251, "<|tile_y_separator|>": 252, "<|image|>": 253}
LLAMA4_TOKENS |= {"<|image_start|>": 254, "<|image_end|>": 255}
MINICPM_TOKENS = {"<|image_pad|>": IMAGE, "<image>": 251, "</image>": 252, "<slice>": 253, "</slice>": 254, "Ċ": 249}
MINICPM_TOKENS |= {"<image_id>": 247, "</image_id>": 248, **{str(digit): 230 + digit for digit in range(10)}}
LFM2_TOKENS = {"<image>": IMAGE, "<|image_start|>": 251, "<|image_end|>": 252, "<|img_thumbnail|>": 253}
LFM2_TOKENS |= {
    f"<|img_row_{row}_col_{column}|>": 225 + 4 * row + column for row in range(1, 5) for column in range(1, 5)
}


def _read(
    kind: type[ProcessorMixin], tokens: dict[str, int], write: Callable[[Any, Any, int], str], **known: Any
) -> Any:
    """The tokens of each image, without those around them, as the library's processor writes them."""

    def found(found: Any) -> list[list[int]]:
        processor = object.__new__(kind)
        vars(processor).update(known)
        texts = [write(processor, found, i) for i in range(len(found["num_patches"]))]
        return [tokenizer(tokens).encode(text).ids[1:-1] for text in texts]

    return found


def _numbered(found: Any) -> list[list[int]]:
    """As the library's processor writes them, which has the number of each image before it."""
    processor = object.__new__(MiniCPMV4_6Processor)
    names = {"image_token": "<|image_pad|>", "image_start_token": "<image>", "image_end_token": "</image>"}
    names |= {"slice_start_token": "<slice>", "slice_end_token": "</slice>"}
    names |= {"image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>"}
    vars(processor).update(names, slice_mode=True)
    count = len(found["grids"])
    texts = [processor.replace_image_token(found, i, image_token_divisor=16) for i in range(count)]
    texts = processor._prepend_local_ids(["<|image_pad|>" * count], texts, "<|image_pad|>")
    return [tokenizer(MINICPM_TOKENS).encode(text).ids for text in texts]


COHERE_MARKS = {"start_of_img_token": "<|START_OF_IMG|>", "end_of_img_token": "<|END_OF_IMG|>"}
SIGLIP = {"model_type": "siglip_vision_model", **SMALL_TOWER}
COHERE2 = {"model_type": "cohere2", **TEXT, "sliding_window": 24}
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
AYA_PROCESSOR = partial(
    GotOcr2ImageProcessorPil, crop_to_patches=True, size={"height": TILE, "width": TILE}, max_patches=3
)
DEEPSEEK_TILE, GREY = 50, (127, 127, 127)
"""A tile of three patches in a row and some pixels, which are left out."""
DEEPSEEK_SIZES = [[50, 50], [50, 100], [100, 50]]
DEEPSEEK_TEXT = {
    **{key: value for key, value in TEXT.items() if key != "head_dim"},
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
}


class DeepseekProcessor:
    """That of DeepSeek-VL2, as its repository has it: only up to two images are cut into tiles."""

    def __call__(self, images: list[Image.Image], return_tensors: str) -> dict[str, Any]:
        pixels, grids, side = list[torch.Tensor](), list[tuple[int, int]](), DEEPSEEK_TILE
        for image in images:
            sizes = DEEPSEEK_SIZES if len(images) <= 2 else DEEPSEEK_SIZES[:1]
            width, height = max(sizes, key=partial(self.kept, image))
            views = [
                ImageOps.pad(image, size, Image.Resampling.BICUBIC, GREY) for size in ((side,) * 2, (width, height))
            ]
            tiles = [views[0], *cut_up(views[1], height // side, width // side, side)]
            pixels += [torch.from_numpy(np.asarray(tile, np.float32) / 255 * 2 - 1).permute(2, 0, 1) for tile in tiles]
            grids.append((height // side, width // side))
        return {"pixel_values": torch.stack(pixels), "image_sizes": grids}

    def kept(self, image: Image.Image, size: list[int]) -> tuple[int, int]:
        """Pixels that an image keeps in a size, and how few of the size's are wasted."""
        scale = min(size[0] / image.width, size[1] / image.height)
        kept = min(int(image.width * scale) * int(image.height * scale), image.width * image.height)
        return kept, kept - size[0] * size[1]

    def save_pretrained(self, folder: Path) -> None:
        """Its own file says nothing that is no default."""


class DeepseekVL2(torch.nn.Module):
    """What DeepSeek-VL2 computes, put together of the library's SigLIP and DeepSeek-V2."""

    def __init__(self) -> None:
        super().__init__()
        tower = {**SMALL_TOWER, "num_hidden_layers": 2, "image_size": 42, "vision_use_head": False}
        self.vision: Any = SiglipVisionModel(SiglipVisionConfig(**tower))
        self.language: Any = DeepseekV2ForCausalLM(DeepseekV2Config(**DEEPSEEK_TEXT))
        self.up, self.down = torch.nn.Linear(128, 64), torch.nn.Linear(64, 64)
        self.image_newline, self.view_seperator = (torch.nn.Parameter(torch.randn(64)) for _ in range(2))

    def embedded(self, pixels: torch.Tensor, grids: Sequence[tuple[int, int]]) -> torch.Tensor:
        """The embeddings of all images."""
        x = self.vision(pixels[:, :, :42, :42]).last_hidden_state.transpose(1, 2).unflatten(2, (3, 3))
        x = functional.unfold(functional.pad(x, (0, 1, 0, 1)), 2, stride=2).transpose(1, 2)
        tiles, found = self.down(functional.gelu(self.up(x))).unflatten(1, (2, 2)), list[torch.Tensor]()
        for rows, columns in grids:
            whole, own, tiles = tiles[0], tiles[1 : 1 + rows * columns], tiles[1 + rows * columns :]
            large = torch.cat([torch.cat(list(own[row * columns :][:columns]), dim=1) for row in range(rows)])
            lines = [[torch.cat([line, self.image_newline[None]]) for line in view] for view in (whole, large)]
            found += [*lines[0], self.view_seperator[None], *lines[1]]
        return torch.cat(found)

    def forward(self, input_ids: torch.Tensor, **found: Any) -> Any:
        x = self.language.get_input_embeddings()(input_ids)
        if found:
            x = x.clone()
            x[input_ids == IMAGE] = self.embedded(found["pixel_values"], found["image_sizes"])
        return self.language(inputs_embeds=x)

    def save_pretrained(self, folder: Path, save_original_format: bool) -> None:
        self.language.save_pretrained(folder, save_original_format=save_original_format)
        stored = {f"language.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
        stored |= {"image_newline": self.image_newline, "view_seperator": self.view_seperator}
        inner = getattr(self.vision, "vision_model", self.vision)
        stored["vision.pos_embed"] = inner.embeddings.position_embedding.weight[None]
        modules = {"vision.patch_embed.proj": inner.embeddings.patch_embedding, "vision.norm": inner.post_layernorm}
        modules |= {"projector.layers.0": self.up, "projector.layers.2": self.down}
        for i, layer in enumerate(inner.encoder.layers):
            name, attention = f"vision.blocks.{i}", layer.self_attn
            modules |= {f"{name}.norm1": layer.layer_norm1, f"{name}.norm2": layer.layer_norm2}
            modules |= {f"{name}.mlp.fc1": layer.mlp.fc1, f"{name}.mlp.fc2": layer.mlp.fc2}
            modules[f"{name}.attn.proj"] = attention.out_proj
            for end in ("weight", "bias"):
                parts = [getattr(getattr(attention, f"{part}_proj"), end) for part in "qkv"]
                stored[f"{name}.attn.qkv.{end}"] = torch.cat(parts)
        stored |= {f"{name}.{end}": getattr(of, end) for name, of in modules.items() for end in ("weight", "bias")}
        kept = {name: tensor.detach().clone().contiguous() for name, tensor in stored.items()}
        save_file(kept, folder / "model.safetensors")
        vision = {"layers": 2, "width": 32, "heads": 2, "mlp_ratio": 1.5, "patch_size": 14, "image_size": 50}
        projector = {"projector_type": "downsample_mlp_gelu", "n_embed": 64, "mlp_ratio": 1, "downsample_ratio": 2}
        text = {"model_type": "deepseek_v2", **DEEPSEEK_TEXT, "use_mla": True}
        config = {"model_type": "deepseek_vl_v2", "language_config": text, "projector_config": projector}
        config |= {"vision_config": vision, "candidate_resolutions": DEEPSEEK_SIZES, "tile_tag": "2D"}
        (folder / "config.json").write_text(json.dumps({**config, "global_view_pos": "head"}))


def _as_lighton(folder: Path) -> None:
    """Under the name that published checkpoints have."""
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["LightOnOCRForConditionalGeneration"]
    (folder / "config.json").write_text(json.dumps(config))


TILED = {
    "deepseek_vl2": Family(
        "deepseek_vl_v2",
        {},
        DeepseekProcessor,
        lambda found: [[IMAGE] * (7 + 2 * rows * (2 * columns + 1)) for rows, columns in found["image_sizes"]],
        {"<image>": IMAGE},
        model=DeepseekVL2,
    ),
    "aya_vision": Family(
        "aya_vision",
        {"text_config": COHERE2, "vision_config": SIGLIP, "image_token_index": IMAGE},
        AYA_PROCESSOR,
        _read(
            AyaVisionProcessor,
            AYA_TOKENS,
            lambda processor, found, i: processor.replace_image_token(found, i),
            **COHERE_MARKS,
            img_patch_token="<|IMG_PATCH|>",
            tile_token="TILE",
            tile_global_token="TILE_GLOBAL",
            img_size=56,
            patch_size=28,
        ),
        AYA_TOKENS,
    ),
    "cohere2_vision": Family(
        "cohere2_vision",
        {
            "text_config": COHERE2,
            "vision_config": SIGLIP,
            "image_token_id": IMAGE,
            "alignment_intermediate_size": 96,
        },
        partial(Tiles, _cohere, {**CLIP, "size": {"height": TILE, "width": TILE}, "max_patches": 3}),
        _read(
            Cohere2VisionProcessor,
            COHERE_TOKENS,
            lambda processor, found, i: processor.replace_image_token(found, i),
            image_token="<|IMG_PATCH|>",
            img_line_break_token="<|IMG_LINE_BREAK|>",
            boi_token="<|START_OF_IMG|>",
            eoi_token="<|END_OF_IMG|>",
            patch_size=2,  # whose square the library takes as the number of embeddings
        ),
        COHERE_TOKENS,
    ),
    "exaone4_5": Family(
        "exaone4_5",
        {
            "text_config": {"model_type": "exaone4", **TEXT, "sliding_window": 24, "sliding_window_pattern": 2},
            "vision_config": {
                "depth": 3,
                "hidden_size": 32,
                "num_heads": 2,
                "num_key_value_heads": 1,
                "intermediate_size": 48,
                "out_hidden_size": 64,
                "fullatt_block_indexes": [1],
                "window_size": 56,
            },
            "image_token_id": IMAGE,
        },
        lambda: Qwen2VLImageProcessorPil(size=QWEN_SIZE),
        of_grid,
    ),
    "lfm2_vl": Family(
        "lfm2_vl",
        {
            "text_config": {
                "model_type": "lfm2",
                **TEXT,
                "layer_types": ["conv", "full_attention"] * 2,
                "block_auto_adjust_ff_dim": False,
            },
            "vision_config": {
                **SMALL_TOWER,
                "model_type": "siglip2_vision_model",
                "patch_size": 16,
                "num_patches": 16,
            },
            "image_token_id": IMAGE,
            "projector_hidden_size": 40,
        },
        partial(
            Tiles,
            _lfm2,
            {**HALF, "max_image_tokens": 16, "min_image_tokens": 4, "tile_size": 64, "max_tiles": 4}
            | {"max_pixels_tolerance": 0.5},
            16,
        ),
        _read(
            Lfm2VlProcessor,
            LFM2_TOKENS,
            lambda processor, found, i: processor._build_image_tokens(
                *found["numbers"][i][:2], 4, found["numbers"][i][2] // 32 * (found["numbers"][i][3] // 32), True, True
            ),
            image_token="<image>",
            image_start_token="<|image_start|>",
            image_end_token="<|image_end|>",
            image_thumbnail_token="<|img_thumbnail|>",
        ),
        LFM2_TOKENS,
    ),
    "lighton_ocr": Family(
        "lighton_ocr",
        {
            "text_config": {"model_type": "qwen3", **TEXT},
            "vision_config": PIXTRAL_VISION,
            "image_token_id": IMAGE,
        },
        lambda: PixtralImageProcessorPil(size={"longest_edge": 112}, patch_size=14),
        lambda found: [[IMAGE] * (int(rows) // 28 * (int(columns) // 28)) for rows, columns in found["image_sizes"]],
        rewrite=_as_lighton,
    ),
    "llama4": Family(
        "llama4",
        {
            "text_config": {
                **TEXT,
                "num_local_experts": 4,
                "intermediate_size_mlp": 40,
                "interleave_moe_layer_step": 2,
                "no_rope_layers": [1, 1, 1, 0],
            },
            "vision_config": {
                **SMALL_TOWER,
                "intermediate_size": 128,
                "projector_input_dim": 40,
                "projector_output_dim": 40,
                "vision_output_dim": 40,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            },
            "image_token_index": IMAGE,
        },
        partial(Tiles, _llama4, {**HALF, "size": {"height": TILE, "width": TILE}, "max_patches": 4}),
        _read(
            Llama4Processor,
            LLAMA4_TOKENS,
            lambda processor, found, i: processor._prompt_split_image(found["numbers"][i], 4),
        ),
        LLAMA4_TOKENS,
    ),
    "minicpmv4_6": Family(
        "minicpmv4_6",
        {
            "text_config": {
                **HYBRID_TEXT,
                "model_type": "qwen3_5_text",
            },
            "vision_config": {**SMALL_TOWER, "insert_layer_id": 1},
            "insert_layer_id": 1,
            "image_token_id": IMAGE,
        },
        partial(MiniCPMV4_6ImageProcessorPil, scale_resolution=80, patch_size=14, max_slice_nums=3),
        _numbered,
        MINICPM_TOKENS,
    ),
    "paddleocr_vl": Family(
        "paddleocr_vl",
        {
            "text_config": {**TEXT, "rope_parameters": ROPE},
            "vision_config": SMALL_TOWER,
            "image_token_id": IMAGE,
        },
        lambda: PaddleOCRVLImageProcessorPil(size=QWEN_SIZE),
        of_grid,
    ),
}
