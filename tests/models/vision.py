"""Tiny random vision-language checkpoints, and what transformers computes with them."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma3ImageProcessorPil,
    Gemma4ImageProcessorPil,
    GotOcr2ImageProcessorPil,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlavaImageProcessorPil,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    LlavaOnevisionImageProcessorPil,
    LlavaOnevisionProcessor,
    PixtralImageProcessorPil,
    PreTrainedModel,
    ProcessorMixin,
    SiglipImageProcessorPil,
    SmolVLMImageProcessorPil,
)
from transformers.models.gemma4 import image_processing_pil_gemma4

from tests.models.vision_base import (
    IMAGE,
    PIXTRAL_VISION,
    SMALL_TOWER,
    TEXT,
    Family,
    of_grid,
    tokenizer,
    without_torchvision,
    written_config,
)
from tests.models.vision_ocr import OCR
from tests.models.vision_qwen import QWEN
from tests.models.vision_tiled import TILED


def _in_rows(found: Any, side: int = 28) -> Sequence[list[int]]:
    """With Pixtral's tokens behind each row, and behind the last one."""
    sizes = [(int(rows) // side, int(columns) // side) for rows, columns in found["image_sizes"]]
    return [[*([*[IMAGE] * columns, 12] * rows)[:-1], 13] for rows, columns in sizes]


def _of_squares(found: Any) -> Sequence[list[int]]:
    return [[IMAGE] * int(count) for count in found["num_soft_tokens_per_image"]]


def _by_tile(found: Any) -> Sequence[list[int]]:
    return [[IMAGE] * (4 * int(count)) for count in found["num_patches"]]


def _in_lines(kind: type[ProcessorMixin], maker: Callable[[], Any], **known: Any) -> Callable[[Any], list[list[int]]]:
    """As the library's processor says, which would need a tokenizer."""

    def found(found: Any) -> list[list[int]]:
        processor = object.__new__(kind)
        vars(processor).update(image_processor=maker(), image_token="x", num_image_tokens=16, patch_size=14, **known)
        return [[IMAGE] * len(processor.replace_image_token(found, i)) for i in range(len(found["image_sizes"]))]

    return found


SPLIT_TOKENS = {"<fake_token_around_image>": 251, "<global-img>": 252, "<image>": IMAGE, "Ċ": 253, "ĊĊ": 254}
SPLIT_TOKENS |= {f"<row_{row}_col_{column}>": 240 + 2 * row + column for row in (1, 2) for column in (1, 2)}


def _in_split(found: Any) -> list[list[int]]:
    """As the library's processor and tokenizer have it."""
    processor = object.__new__(Idefics3Processor)
    vars(processor).update(fake_image_token="<fake_token_around_image>", global_image_tag="<global-img>")
    vars(processor).update(image_token="<image>", image_seq_len=4)
    texts = [processor.replace_image_token(found, i) for i in range(len(found["rows"][0]))]
    return [tokenizer(SPLIT_TOKENS).encode(text).ids for text in texts]


POINTS = [[56, 56], [56, 112], [112, 56], [112, 112], [168, 56]]
ONEVISION_PROCESSOR = partial(
    LlavaOnevisionImageProcessorPil, size={"height": 56, "width": 56}, image_grid_pinpoints=POINTS
)
CLIP_SIZE = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
NEXT_PROCESSOR = partial(LlavaNextImageProcessorPil, image_grid_pinpoints=POINTS, **CLIP_SIZE)
INTERNVL = {
    "text_config": {"model_type": "qwen3", **TEXT},
    "vision_config": {**SMALL_TOWER, "attention_bias": True},
    "image_token_id": IMAGE,
    "image_seq_length": 4,
}
INTERNVL_PROCESSOR = partial(
    GotOcr2ImageProcessorPil, crop_to_patches=True, size={"height": 56, "width": 56}, max_patches=3
)


class KimiProcessor:
    """The library's processor of Kimi K2.5, which needs torchvision, with Pillow in its place."""

    image_mean = image_std = (0.5, 0.5, 0.5)

    def __call__(self, images: list[Image.Image], return_tensors: str) -> dict[str, Any]:
        theirs = without_torchvision("kimi_k25", "image_processing")
        found, grids = list[torch.Tensor](), list[list[int]]()
        for image in images:
            size, (rows, columns) = theirs.navit_resize(image.height, image.width, 14, 2, 48, 12)
            filled = np.zeros((rows, columns, 3), np.float32)
            filled[: size[0], : size[1]] = image.resize(size[::-1], Image.Resampling.BICUBIC)
            pixels = torch.from_numpy(filled / 255 * 2 - 1).permute(2, 0, 1)[None]
            patches, *grid = theirs.Kimi_K25ImageProcessor.patchify(None, pixels, 14)
            found.append(patches[0])
            grids.append([1, *grid])
        return {"pixel_values": torch.cat(found), "image_grid_thw": torch.tensor(grids)}

    def save_pretrained(self, folder: Path) -> None:
        own = {"max_patches": 48, "size": {"max_height": 12, "max_width": 12}}
        (folder / "preprocessor_config.json").write_text(json.dumps(own))


def _as_moonshot(folder: Path) -> None:
    """Kimi K2.5 as Moonshot has it: the pairs of queries and keys that rotate are next to each other."""
    stored, tensors = load_file(folder / "model.safetensors"), dict[str, torch.Tensor]()
    for name, tensor in stored.items():
        if ".attn.q_proj." in name:
            parts = [stored[name.replace(".q_proj.", f".{end}_proj.")] for end in "qkv"]
            turned = [part.unflatten(0, (2, 2, -1)).transpose(1, 2).flatten(0, 2) for part in parts[:2]]
            name, tensor = name.replace(".attn.q_proj.", ".wqkv."), torch.cat([*turned, parts[2]])
        elif ".attn.k_proj." in name or ".attn.v_proj." in name:
            continue
        for pattern, published in MOONSHOT:
            name = re.sub(pattern, published, name)
        tensors[name] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors")


def _as_kimi_vl(folder: Path) -> None:
    """Kimi-VL, whose tower has the same weights under other names."""
    _as_moonshot(folder)
    config, stored = written_config(folder), load_file(folder / "model.safetensors")
    inner = config["vision_config"]
    inner |= {"model_type": "moonvit", "init_pos_emb_height": 6, "init_pos_emb_width": 6}
    own = {"architectures": ["KimiVLForConditionalGeneration"], "media_placeholder_token_id": IMAGE}
    del config["image_token_id"], inner["pos_emb_height"], inner["pos_emb_width"]
    (folder / "config.json").write_text(json.dumps({**config, **own, "model_type": "kimi_vl"}))
    (folder / "preprocessor_config.json").write_text(json.dumps({"in_token_limit": 48, "patch_limit_on_one_side": 12}))
    names = {"mm_projector.proj.0": "linear_1", "mm_projector.proj.2": "linear_2", "mm_projector.pre_norm": "pre_norm"}
    for name, own_name in names.items():
        for end in ("weight", "bias"):
            stored[f"multi_modal_projector.{own_name}.{end}"] = stored.pop(f"{name}.{end}")
    save_file(stored, folder / "model.safetensors")


MOONSHOT = [
    (r"^lm_head", "language_model.lm_head"),
    (r"^model\.language_model", "language_model.model"),
    (r"^model\.(vision_tower|mm_projector)", r"\1"),
    (r"mm_projector\.in_proj", "mm_projector.proj.0"),
    (r"mm_projector\.out_proj", "mm_projector.proj.2"),
    (r"pos_emb\.position_embeddings", "pos_emb.weight"),
    (r"vision_tower\.(layers|final)", r"vision_tower.encoder.\1"),
    (r"(vision_tower\.encoder\.)layers", r"\1blocks"),
    (r"(blocks\.\d+)\.attn\.proj", r"\1.wo"),
    (r"(blocks\.\d+)\.norm1", r"\1.norm0"),
    (r"(blocks\.\d+)\.norm2", r"\1.norm1"),
    (r"(blocks\.\d+\.mlp)\.fc1", r"\1.fc0"),
    (r"(blocks\.\d+\.mlp)\.fc2", r"\1.fc1"),
]


def _as_published(folder: Path) -> None:
    """InternVL as its own repositories have it (transformers' ``convert_internvl_weights_to_hf.py`` has the names)."""
    config, stored = written_config(folder), load_file(folder / "model.safetensors")
    inner, text = config["vision_config"], {**config["text_config"], "tie_word_embeddings": True}
    own = {"qkv_bias": True, "qk_normalization": False, "norm_type": "layer_norm", "patch_size": 14, "image_size": 56}
    kept = {key: inner[key] for key in SMALL_TOWER if key not in own}
    whole = {"architectures": ["InternVLChatModel"], "llm_config": text, "vision_config": {**kept, **own}}
    whole |= {"ps_version": "v2", "downsample_ratio": 0.5, "select_layer": -1, "force_image_size": 56}
    (folder / "config.json").write_text(json.dumps({**whole, "max_dynamic_patch": 3, "use_thumbnail": True}))
    tensors = dict[str, torch.Tensor]()
    for name, tensor in stored.items():
        if ".attention.q_proj." in name:
            parts = [stored[name.replace(".q_proj.", f".{end}_proj.")] for end in "qkv"]
            name, tensor = name.replace(".q_proj.", ".qkv."), torch.cat(parts)
        elif ".attention.k_proj." in name or ".attention.v_proj." in name:
            continue
        for pattern, published in PUBLISHED:
            name = re.sub(pattern, published, name)
        tensors[name] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors")


def _as_qianfan(folder: Path) -> None:
    """As published: the library gives the decoder's layers the tower's name when it saves them."""
    stored = load_file(folder / "model.safetensors")
    names = {
        name: name.replace("language_model.model.encoder.layers.", "language_model.model.layers.") for name in stored
    }
    save_file({names[name]: tensor for name, tensor in stored.items()}, folder / "model.safetensors")


PUBLISHED = [
    (r"^vision_tower\.", "vision_model."),
    (r"^multi_modal_projector\.layer_norm", "mlp1.0"),
    (r"^multi_modal_projector\.linear_1", "mlp1.1"),
    (r"^multi_modal_projector\.linear_2", "mlp1.3"),
    (r"cls_token", "class_embedding"),
    (r"patch_embeddings\.projection", "patch_embedding"),
    (r"position_embeddings", "position_embedding"),
    (r"encoder\.layer\.", "encoder.layers."),
    (r"attention\.projection_layer", "attn.proj"),
    (r"\.attention\.", ".attn."),
    (r"layernorm_before", "norm1"),
    (r"layernorm_after", "norm2"),
    (r"lambda_", "ls"),
]
LLAVA = {
    "text_config": {"model_type": "llama", **TEXT},
    "vision_config": {"model_type": "clip_vision_model", **SMALL_TOWER},
    "image_token_index": IMAGE,
}
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
SPLIT_SIZE = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}, "return_row_col_info": True}
KIMI = {
    "text_config": {
        **{key: value for key, value in TEXT.items() if key != "head_dim"},
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 4,
    },
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "pos_emb_height": 6,
        "pos_emb_width": 6,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 10_000.0},
    },
    "projection_hidden_size": 32,
    "image_token_id": IMAGE,
    "video_token_id": 249,
    "tie_word_embeddings": False,
}
PREFIX = "paligemma"
"""Its prompts have one image, and attend to all of themselves."""
INPUTS = ("pixel_values", "pixel_attention_mask", "image_grid_thw", "image_position_ids", "image_sizes")
INPUTS += ("spatial_shapes", "pixel_values_local", "num_local_patches", "patches_grid", "target_sizes")
"""What models take of what processors give."""


FAMILIES = {
    **TILED,
    **OCR,
    **QWEN,
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
    "internvl": Family(
        "internvl",
        INTERNVL,
        INTERNVL_PROCESSOR,
        _by_tile,
    ),
    "qianfan_ocr": Family("qianfan_ocr", INTERNVL, INTERNVL_PROCESSOR, _by_tile, rewrite=_as_qianfan),
    "internvl_rms": Family(
        "internvl",
        {
            **INTERNVL,
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": {**SMALL_TOWER, "use_qk_norm": True, "norm_type": "rms_norm", "use_mean_pooling": False},
        },
        INTERNVL_PROCESSOR,
        _by_tile,
    ),
    "internvl_chat": Family(
        "internvl",
        INTERNVL,
        INTERNVL_PROCESSOR,
        _by_tile,
        {"<IMG_CONTEXT>": IMAGE},
        _as_published,
    ),
    "llava_onevision": Family(
        "llava_onevision",
        {
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": {"model_type": "siglip_vision_model", **SMALL_TOWER},
            "image_token_index": IMAGE,
            "vision_aspect_ratio": "anyres_max_2",
            "image_grid_pinpoints": POINTS,
        },
        ONEVISION_PROCESSOR,
        _in_lines(
            LlavaOnevisionProcessor,
            ONEVISION_PROCESSOR,
            vision_aspect_ratio="anyres_max_2",
            vision_feature_select_strategy="full",
        ),
    ),
    "smolvlm": Family(
        "smolvlm",
        {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": SMALL_TOWER,
            "image_token_id": IMAGE,
            "scale_factor": 2,
        },
        partial(SmolVLMImageProcessorPil, **SPLIT_SIZE),
        _in_split,
        SPLIT_TOKENS,
    ),
    "idefics3": Family(
        "idefics3",
        {"text_config": {"model_type": "llama", **TEXT}, "vision_config": SMALL_TOWER, "image_token_id": IMAGE},
        partial(Idefics3ImageProcessorPil, **SPLIT_SIZE),
        _in_split,
        SPLIT_TOKENS,
    ),
    "kimi_k25": Family("kimi_k25", KIMI, KimiProcessor, of_grid, rewrite=_as_moonshot, is_original=False),
    "kimi_vl": Family("kimi_k25", KIMI, KimiProcessor, of_grid, rewrite=_as_kimi_vl, is_original=False),
    "llava": Family(
        "llava",
        LLAVA,
        partial(LlavaImageProcessorPil, **CLIP_SIZE),
        lambda found: [[IMAGE] * 16] * len(found["pixel_values"]),
    ),
    "llava_next": Family(
        "llava_next",
        {**LLAVA, "image_grid_pinpoints": POINTS},
        NEXT_PROCESSOR,
        _in_lines(
            LlavaNextProcessor, NEXT_PROCESSOR, num_additional_image_tokens=1, vision_feature_select_strategy="default"
        ),
    ),
    "granite_vision": Family(
        "llava_next",
        {
            "text_config": {"model_type": "granite", **TEXT, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
            "vision_config": {"model_type": "siglip_vision_model", **SMALL_TOWER},
            "image_token_index": IMAGE,
            "image_grid_pinpoints": POINTS,
            "vision_feature_layer": [0, -3, -1],
            "vision_feature_select_strategy": "full",
        },
        NEXT_PROCESSOR,
        _in_lines(
            LlavaNextProcessor, NEXT_PROCESSOR, num_additional_image_tokens=0, vision_feature_select_strategy="full"
        ),
    ),
    "pixtral": Family(
        "llava",
        {
            "text_config": {"model_type": "mistral", **TEXT},
            "vision_config": PIXTRAL_VISION,
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        partial(PixtralImageProcessorPil, size={"longest_edge": 56}, patch_size=14),
        partial(_in_rows, side=14),
    ),
    "mistral3": Family(
        "mistral3",
        {
            "text_config": {"model_type": "mistral", **TEXT},
            "vision_config": PIXTRAL_VISION,
            "spatial_merge_size": 2,
            "image_token_id": IMAGE,
            "image_token_index": IMAGE,
        },
        lambda: PixtralImageProcessorPil(size={"longest_edge": 112}, patch_size=28),
        _in_rows,
    ),
    PREFIX: Family(
        "paligemma",
        {
            "text_config": {"model_type": "gemma2", **TEXT, "sliding_window": 4096, "query_pre_attn_scalar": 16},
            "vision_config": {"model_type": "siglip_vision_model", **SMALL_TOWER, "vision_use_head": False},
            "image_token_index": IMAGE,
            "projection_dim": 64,
        },
        partial(SiglipImageProcessorPil, size={"height": 56, "width": 56}),
        lambda found: [[IMAGE] * 16] * len(found["pixel_values"]),
    ),
    "gemma3": Family(
        "gemma3",
        {
            "text_config": {**TEXT, "sliding_window": 24, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
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
    model: PreTrainedModel
    if family.model is not None:
        model = family.model()
    else:
        config = AutoConfig.for_model(family.model_type, **family.config)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    if name == "paddleocr_vl":  # transformers 5.17 interpolates its positions otherwise than later ones
        for module in model.modules():
            if hasattr(module, "interpolation_align_corners"):
                module.interpolation_align_corners = False
    with torch.no_grad():
        for name, buffer in model.named_buffers():  # of Gemma 4, whose limits are infinite and others empty
            if name.endswith(("_min", "_max")):
                buffer.fill_(-2.0 if name.endswith("_min") else 1.5)
            elif ".std_" in name:
                buffer.normal_()
        for weight_name, weight in model.named_parameters():
            if weight_name.endswith(("cls_token", "class_embedding", "position_embeddings")):
                weight.normal_(std=0.3)
            elif "norm" in weight_name and weight_name.endswith("weight"):
                weight.add_(torch.randn_like(weight) * 0.2)
            elif not weight.any():  # a projection of Gemma begins with zeros
                weight.normal_(std=0.3)
            elif weight.dim() > 1:
                weight.mul_(4)  # so that attention looks at some positions more than at others
    model.eval().save_pretrained(folder, save_original_format=family.is_original)
    family.processor().save_pretrained(folder)
    family.rewrite(folder)
    if family.tokens:
        tokenizer(family.tokens).save(str(folder / "tokenizer.json"))
    return model


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A random image with coarse structure, so that resizing keeps some of it."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def as_png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def expected_logprobs(
    name: str, model: PreTrainedModel, prompt: list[int], images: list[Image.Image], answer: Sequence[int] = ()
) -> torch.Tensor:
    """Log-probabilities of the next token at each position of the expanded prompt and the answer."""
    family = FAMILIES[name]
    found = dict(family.processor()(images, return_tensors="pt")) if images else {}
    placeholders = iter(family.placeholders(found) if images else [])
    tokens = list[int]()
    for token in prompt:
        tokens += next(placeholders) if token == IMAGE else [token]
    ids = torch.tensor([[*tokens, *answer]])
    kinds: dict[str, Any] = {}
    if name.startswith(("cohere_compass", "qwen", "glm", "gemma", "paddle")):
        kinds = {"token_type_ids" if name == "gemma3" else "mm_token_type_ids": (ids == IMAGE).int()}
    if name.startswith("omni"):  # they look for tokens around images, which these prompts do not have
        kinds = {"position_ids": _axial_positions(ids[0].tolist(), found.get("image_grid_thw", ()))}
    if name == PREFIX:
        kinds = {"token_type_ids": (torch.arange(ids.shape[1]) >= len(tokens)).int()[None]}
    if name == "gemma4_unified":  # whose forward alone has other masks than its generation
        masks = model.create_masks_for_generate
        kinds["attention_mask"] = masks(model.config, model.get_input_embeddings()(ids), None, None, None, **kinds)
    found = {key: value for key, value in found.items() if key in INPUTS}
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids, **kinds, **found).logits[0]
    return logits.float().log_softmax(dim=-1)


def _axial_positions(ids: list[int], grids: Sequence[Any]) -> torch.Tensor:
    """Time, row and column of each token, as in Qwen2-VL: [3, 1, T]."""
    sizes, found, first = iter(grids), list[tuple[int, int, int]](), 0
    while len(found) < len(ids):
        rows, columns = (int(side) // 2 for side in next(sizes)[1:]) if ids[len(found)] == IMAGE else (1, 1)
        found += [(first, first + row, first + column) for row in range(rows) for column in range(columns)]
        first += max(rows, columns)
    return torch.tensor(found).t()[:, None]
