"""Vision towers in GGUF: the file ``mmproj-*.gguf`` next to that of the text part, as llama.cpp's converter writes it.

https://github.com/ggml-org/llama.cpp/blob/master/docs/multimodal.md. Tensors have the names of transformers here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from octavo.errors import CheckpointError
from octavo.weights.gguf.gguf_metadata import Metadata
from octavo.weights.gguf.gguf_reader import GGUFFile

logger = logging.getLogger(__name__)

GLM4V_MODEL, GLM4V_MOE = "Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration"
QWEN25_VL = "Qwen2_5_VLForConditionalGeneration"
QWEN3VL_MOE = "Qwen3VLMoeForConditionalGeneration"
SIGLIP = {
    "embeddings.patch_embedding": "v.patch_embd",
    "embeddings.position_embedding": "v.position_embd",
    "post_layernorm": "v.post_ln",
    "encoder.layers.*.layer_norm1": "v.blk.*.ln1",
    "encoder.layers.*.layer_norm2": "v.blk.*.ln2",
    **{f"encoder.layers.*.self_attn.{part}_proj": f"v.blk.*.attn_{part}" for part in "qkv"},
    "encoder.layers.*.self_attn.out_proj": "v.blk.*.attn_out",
    "encoder.layers.*.mlp.fc1": "v.blk.*.ffn_up",
    "encoder.layers.*.mlp.fc2": "v.blk.*.ffn_down",
}
GEMMA3 = {f"vision_tower.{own}": stored for own, stored in SIGLIP.items()} | {
    "multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
    "multi_modal_projector.mm_input_projection": "mm.input_projection",
}
GEMMA4_NORMS = {
    "input_layernorm": "ln1",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm",
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
}
ATTENTION = {f"self_attn.{own}_proj": f"attn_{own}" for own in "qkv"} | {"self_attn.o_proj": "attn_out"}
GATES = {f"{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
GEMMA4_MAPS = ATTENTION | {f"mlp.{own}": stored for own, stored in GATES.items()}
BOUNDS = ("input_min", "input_max", "output_min", "output_max")
GEMMA4_LAYER = GEMMA4_NORMS | {f"{own}.linear": stored for own, stored in GEMMA4_MAPS.items()}
GEMMA4_LAYER |= {f"{own}.{end}": f"{stored}.{end}" for own, stored in GEMMA4_MAPS.items() for end in BOUNDS}
GEMMA4_UNIFIED = {
    "vision_embedder.patch_ln1": "v.patch_norm.1",
    "vision_embedder.patch_dense": "v.patch_embd",
    "vision_embedder.patch_ln2": "v.patch_norm.2",
    "vision_embedder.pos_embedding": "v.position_embd.weight",
    "vision_embedder.pos_norm": "v.patch_norm.3",
    "embed_vision.embedding_projection": "mm.input_projection",
}
PLACES = "vision_embedder.pos_embedding"
"""Of Gemma 4 12B: the converter puts the axis of a position first."""
OF_PIXELS = ("v.patch_embd.weight", "v.patch_norm.1.weight", "v.patch_norm.1.bias")
GEMMA4 = {f"vision_tower.encoder.layers.*.{own}": f"v.blk.*.{stored}" for own, stored in GEMMA4_LAYER.items()} | {
    "vision_tower.patch_embedder.input_proj": "v.patch_embd",
    "vision_tower.patch_embedder.position_embedding_table": "v.position_embd.weight",
    "vision_tower.std_bias": "v.std_bias",
    "vision_tower.std_scale": "v.std_scale",
    "embed_vision.embedding_projection": "mm.input_projection",
}
LLAVA = {f"vision_tower.{own}": stored for own, stored in SIGLIP.items()} | {
    "vision_tower.embeddings.class_embedding": "v.class_embd",
    "vision_tower.pre_layrnorm": "v.pre_ln",
    "multi_modal_projector.linear_1": "mm.0",
    "multi_modal_projector.linear_2": "mm.2",
    "image_newline": "model.image_newline",
}
IDEFICS3 = {f"vision_model.{own}": stored for own, stored in SIGLIP.items()} | {
    "connector.modality_projection.proj": "mm.model.fc"
}
INTERN_LAYER = {
    "layernorm_before": "ln1",
    "layernorm_after": "ln2",
    **{f"attention.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"attention.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    "attention.projection_layer": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "lambda_1": "ls1.weight",
    "lambda_2": "ls2.weight",
}
INTERNVL = {f"vision_tower.encoder.layer.*.{own}": f"v.blk.*.{stored}" for own, stored in INTERN_LAYER.items()} | {
    "vision_tower.embeddings.cls_token": "v.class_embd",
    "vision_tower.embeddings.patch_embeddings.projection": "v.patch_embd",
    "vision_tower.embeddings.position_embeddings": "v.position_embd.weight",
    "multi_modal_projector.layer_norm": "mm.model.mlp.0",
    "multi_modal_projector.linear_1": "mm.model.mlp.1",
    "multi_modal_projector.linear_2": "mm.model.mlp.3",
}
PIXTRAL_LAYER = {
    "attention_norm": "ln1",
    "ffn_norm": "ln2",
    **{own.replace("self_attn", "attention"): stored for own, stored in ATTENTION.items()},
    **{f"feed_forward.{own}": stored for own, stored in GATES.items()},
}
MAPS = {"multi_modal_projector.linear_1": "mm.1", "multi_modal_projector.linear_2": "mm.2"}
PIXTRAL = {f"vision_tower.transformer.layers.*.{own}": f"v.blk.*.{stored}" for own, stored in PIXTRAL_LAYER.items()} | {
    "vision_tower.patch_conv": "v.patch_embd",
    "vision_tower.ln_pre": "v.pre_ln",
    "multi_modal_projector.norm": "mm.input_norm",
    "multi_modal_projector.patch_merger.merging_layer": "mm.patch_merger",
    **MAPS,
}
QWEN = {
    "visual.patch_embed.proj": "v.patch_embd",
    "visual.blocks.*.norm1": "v.blk.*.ln1",
    "visual.blocks.*.norm2": "v.blk.*.ln2",
    "visual.blocks.*.attn.proj": "v.blk.*.attn_out",
}
GATED = {f"visual.blocks.*.mlp.{own}": f"v.blk.*.{stored}" for own, stored in GATES.items()}
QWEN25 = {
    **QWEN,
    **GATED,
    "visual.merger.ln_q": "v.post_ln",
    "visual.merger.mlp.0": "mm.0",
    "visual.merger.mlp.2": "mm.2",
}
GLM4V = {
    **QWEN,
    **GATED,
    "visual.blocks.*.attn.qkv": "v.blk.*.attn_qkv",
    **{f"visual.blocks.*.attn.{part}_norm": f"v.blk.*.attn_{part}_norm" for part in "qk"},
    "visual.post_conv_layernorm": "v.norm_embd",
    "visual.embeddings.position_embedding": "v.position_embd",
    "visual.post_layernorm": "v.post_ln",
    "visual.downsample": "mm.patch_merger",
    "visual.merger.proj": "mm.model.fc",
    "visual.merger.post_projection_norm": "mm.post_norm",
    **{f"visual.merger.{part}_proj": f"mm.{part}" for part in ("gate", "up", "down")},
}
QWEN3 = {
    **QWEN,
    "visual.pos_embed": "v.position_embd",
    "visual.blocks.*.attn.qkv": "v.blk.*.attn_qkv",
    "visual.blocks.*.mlp.linear_fc1": "v.blk.*.ffn_up",
    "visual.blocks.*.mlp.linear_fc2": "v.blk.*.ffn_down",
    "visual.merger.norm": "v.post_ln",
    "visual.merger.linear_fc1": "mm.0",
    "visual.merger.linear_fc2": "mm.2",
}
MOON_LAYER = {"norm0": "ln1", "norm1": "ln2", "wo": "attn_out", "mlp.fc0": "ffn_up", "mlp.fc1": "ffn_down"}
MOON = {f"vision_tower.encoder.blocks.*.{own}": f"v.blk.*.{stored}" for own, stored in MOON_LAYER.items()} | {
    "vision_tower.patch_embed.proj": "v.patch_embd",
    "vision_tower.patch_embed.pos_emb": "v.position_embd",
    "vision_tower.encoder.final_layernorm": "v.post_ln",
    "multi_modal_projector.pre_norm": "mm.input_norm",
    **MAPS,
}
LFM2 = {f"vision_tower.{own}": stored for own, stored in SIGLIP.items()} | MAPS
LFM2 |= {"multi_modal_projector.layer_norm": "mm.input_norm"}
LLAMA4_LAYER = {
    "input_layernorm": "ln1",
    "post_attention_layernorm": "ln2",
    **ATTENTION,
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
LLAMA4 = {f"vision_model.model.layers.*.{own}": f"v.blk.*.{stored}" for own, stored in LLAMA4_LAYER.items()} | {
    "vision_model.patch_embedding.linear": "v.patch_embd",
    "vision_model.class_embedding": "v.class_embd",
    "vision_model.positional_embedding_vlm": "v.position_embd.weight",
    "vision_model.layernorm_pre": "v.pre_ln",
    "vision_model.layernorm_post": "v.post_ln",
    "vision_model.vision_adapter.mlp.fc1": "mm.model.mlp.1",
    "vision_model.vision_adapter.mlp.fc2": "mm.model.mlp.2",
    "multi_modal_projector.linear_1": "mm.model.fc",
}
DEEP = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}
"""Parts of the mergers of layers whose outputs the decoder gets; the file has them by the number of the layer."""
MINUS_ONE = "mm.soft_emb_norm.weight"
"""The converter adds 1 to this norm."""
FRAME = "v.patch_embd.weight.1"
"""The second frame's part of a patch."""
NEWLINES = ("model.image_newline", "v.image_newline")
"""The embedding that ends a line, in older and in newer files."""


class ProjectorKind(NamedTuple):
    """How to read one kind of tower."""

    architecture: str
    texts: tuple[str, ...]
    """The architectures of text parts to which it belongs."""
    names: Mapping[str, str]
    read: Callable[[Metadata], dict[str, Any]]
    """The keys of ``vision_config`` that others do not have, and of the configuration around it under ``outer``."""
    image_tokens: tuple[str, ...]
    """Texts of the token at an image's places: the first one that the vocabulary has."""
    permuted: tuple[str, ...] = ()
    """Parts of layers in whose rows the two numbers of a rotary pair are adjacent."""
    joined: str = ""
    """A map of each layer to queries, keys and values, of which files have three."""
    has_colours_last: bool = False
    """Whether checkpoints have the colours of patches last, which converters put first."""


def _gemma3(data: Metadata) -> dict[str, Any]:
    side = data.count("vision.image_size") // data.count("vision.patch_size")
    scale = data.count("vision.projector.scale_factor", 4)
    return {"outer": {"mm_tokens_per_image": (side // scale) ** 2}}


def _gemma4(data: Metadata) -> dict[str, Any]:
    axes = {"v.position_embd.weight": 3, "v.blk.0.attn_q_norm.weight": 1, "v.blk.0.attn_k.weight": 2}
    found = {name: data.file.tensors.get(name) for name in axes}
    for name, tensor in found.items():
        if tensor is None or len(tensor.shape) != axes[name] or not all(tensor.shape):
            raise CheckpointError(f"{data.file.path}: tensor {name!r} is missing, or has not {axes[name]} axes")
    (_, num_places, _), (head_dim,), (num_keys, _) = (tensor.shape for tensor in found.values() if tensor)
    pool = data.count("vision.projector.scale_factor", 3)
    return {
        "head_dim": head_dim,
        "num_key_value_heads": num_keys // head_dim,
        "position_embedding_size": num_places,
        "pooling_kernel_size": pool,
        "rms_norm_eps": data.real("vision.attention.layer_norm_epsilon", 1e-6),
        "use_clipped_linears": "v.blk.0.attn_q.input_min" in data.file.tensors,
        "standardize": "v.std_bias" in data.file.tensors,
        "processing": _pooled(data, pool),
    }


def _gemma4_unified(data: Metadata) -> dict[str, Any]:
    """It has no layers; the side of a square is that of its map's inputs."""
    names = "v.patch_embd.weight", "v.position_embd.weight"
    pixels, places = (data.file.tensors.get(name) for name in names)
    if pixels is None or places is None or len(pixels.shape) != 2 or len(places.shape) != 3:
        raise CheckpointError(f"{data.file.path}: tensor {names[0]!r} or {names[1]!r} is missing, or has other axes")
    pool = round((pixels.shape[1] / 3) ** 0.5) // data.count("vision.patch_size")
    return {
        "mm_embed_dim": data.count("vision.embedding_length"),
        "mm_posemb_size": places.shape[1],
        "pooling_kernel_size": pool,
        "rms_norm_eps": data.real("vision.attention.layer_norm_epsilon", 1e-6),
        "processing": _pooled(data, pool),
    }


def _pooled(data: Metadata, pool: int) -> dict[str, Any]:
    """How Gemma 4's images are resized, ``pool`` x ``pool`` patches for an embedding."""
    if not data.has("vision.image_max_pixels"):
        return {"pooling_kernel_size": pool}
    area = (data.count("vision.patch_size") * pool) ** 2
    most = data.count("vision.image_max_pixels", low=area) // area
    return {"pooling_kernel_size": pool, "max_soft_tokens": most}


def _llava(data: Metadata) -> dict[str, Any]:
    """The last layer of the original is not used, and files leave it out. (llama.cpp leaves out one more.)"""
    layers = data.count("vision.block_count")
    features = data.array("vision.feature_layer") or [layers]
    if len(features) != 1:
        data.fail("vision.feature_layer", f"is {features}; the output of one layer is supported")
    points = data.array("vision.image_grid_pinpoints")
    outer: dict[str, Any] = {"vision_feature_layer": features[0]}
    if not data.file.tensors.keys().isdisjoint(NEWLINES):
        outer["architectures"] = ["LlavaNextForConditionalGeneration"]
    if points:
        outer["image_grid_pinpoints"] = [points[i : i + 2] for i in range(0, len(points), 2)]
    act = "gelu" if data.flag("use_gelu", False) else "quick_gelu"
    return {"model_type": "clip_vision_model", "hidden_act": act, "outer": outer}


def _idefics3(data: Metadata) -> dict[str, Any]:
    side = data.count("vision.image_size")
    sizes = {"size": data.count("vision.preproc_image_size", 4 * side), "max_image_size": side}
    processing = {key: {"longest_edge": size} for key, size in sizes.items()}
    return {"outer": {"scale_factor": data.count("vision.projector.scale_factor", 2)}, "processing": processing}


def _internvl(data: Metadata) -> dict[str, Any]:
    tensors = data.file.tensors
    ends = {"min_dynamic_patch": "vision.preproc_min_tiles", "max_dynamic_patch": "vision.preproc_max_tiles"}
    tiles = {own: data.count(key) for own, key in ends.items() if data.has(key)}
    return {
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in tensors else "rms_norm",
        "attention_bias": "v.blk.0.attn_q.bias" in tensors,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in tensors,
        "outer": {"downsample_ratio": 1 / data.count("vision.projector.scale_factor", 2), **tiles},
    }


def _pixtral(data: Metadata) -> dict[str, Any]:
    found = {"model_type": "pixtral", "hidden_act": "silu" if data.flag("use_silu", False) else "gelu"}
    processing = {"size": {"longest_edge": data.count("vision.image_size")}}
    if data.file.tensors.keys().isdisjoint({"mm.patch_merger.weight"}):
        return {**found, "processing": processing}
    merge = {"spatial_merge_size": data.count("vision.spatial_merge_size", 2)}
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], **merge}
    return {**found, "outer": outer, "processing": processing}


def _lighton(data: Metadata) -> dict[str, Any]:
    found = _pixtral(data)
    found["outer"]["architectures"] = ["LightOnOCRForConditionalGeneration"]
    return {**found, "processing": {**found["processing"], "patch_size": data.count("vision.patch_size")}}


def _kimi(data: Metadata) -> dict[str, Any]:
    side = data.count("vision.image_size") // data.count("vision.patch_size")
    merge = data.count("vision.projector.scale_factor", 2)
    return {"init_pos_emb_height": side, "init_pos_emb_width": side, "merge_kernel_size": [merge, merge]}


def _lfm2(data: Metadata) -> dict[str, Any]:
    merge, patch = data.count("vision.projector.scale_factor", 2), data.count("vision.patch_size")
    outer = {
        "downsample_factor": merge,
        "projector_hidden_size": data.rows("mm.1.weight"),
        "projector_use_layernorm": "mm.input_norm.weight" in data.file.tensors,
        "projector_bias": "mm.1.bias" in data.file.tensors,
    }
    processing = {"downsample_factor": merge, "encoder_patch_size": patch}
    if (method := RESIZING.get(data.get("vision.image_resize_algo"))) is not None:
        processing["resample"] = method
    places = (data.count("vision.image_size") // patch) ** 2
    return {"num_patches": places, "outer": outer, "processing": processing}


def _llama4(data: Metadata) -> dict[str, Any]:
    return {
        "projector_input_dim": data.rows("mm.model.mlp.1.weight"),
        "projector_output_dim": data.rows("mm.model.mlp.2.weight"),
        "pixel_shuffle_ratio": 1 / data.count("vision.projector.scale_factor", 2),
    }


def _qwen_sizes(data: Metadata) -> dict[str, int]:
    own = {"depth": "block_count", "num_heads": "attention.head_count", "out_hidden_size": "projection_dim"}
    return {key: data.count(f"vision.{stored}") for key, stored in own.items()}


def _qwen25(data: Metadata) -> dict[str, Any]:
    every, layers = data.count("vision.n_wa_pattern", 8), data.count("vision.block_count")
    given = data.get("vision.wa_layer_indexes")
    full = list(range(every - 1, layers, every)) if given is None else [int(index) for index in given]
    return {**_qwen_sizes(data), "fullatt_block_indexes": full, "window_size": data.count("vision.window_size", 112)}


def _glm4v(data: Metadata) -> dict[str, Any]:
    """GLM-OCR's tower has no learned positions."""
    is_ocr = "v.position_embd.weight" not in data.file.tensors
    return {
        "outer": {"architectures": ["GlmOcrForConditionalGeneration"]} if is_ocr else {},
        **_qwen_sizes(data),
        "rms_norm_eps": data.real("vision.attention.layer_norm_epsilon", 1e-5),
        "attention_bias": "v.blk.0.attn_qkv.bias" in data.file.tensors,
    }


def _qwen3(data: Metadata) -> dict[str, Any]:
    deep = data.get("vision.is_deepstack_layers", ())
    return {
        **_qwen_sizes(data),
        "num_position_embeddings": (data.count("vision.image_size") // data.count("vision.patch_size")) ** 2,
        "deepstack_visual_indexes": [layer for layer, is_deep in enumerate(deep) if is_deep],
    }


RESIZING = {"lanczos": 1, "bilinear": 2, "bicubic": 3}
MLP = "mlp"
"""LLaVA's, which the oldest files do not name."""
QWEN3_TEXTS = ("Qwen3VLForConditionalGeneration", QWEN3VL_MOE, "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
INTERN_TEXTS = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM")
MISTRAL_TEXTS = ("LlamaForCausalLM", "MistralForCausalLM", "Ministral3ForCausalLM")
KINDS = {
    "gemma3": ProjectorKind(
        "Gemma3ForConditionalGeneration", ("Gemma3ForCausalLM",), GEMMA3, _gemma3, ("<image_soft_token>",)
    ),
    "gemma4v": ProjectorKind(
        "Gemma4ForConditionalGeneration", ("Gemma4ForCausalLM",), GEMMA4, _gemma4, ("<|image|>",), has_colours_last=True
    ),
    "gemma4uv": ProjectorKind(
        "Gemma4UnifiedForConditionalGeneration",
        ("Gemma4ForCausalLM",),
        GEMMA4_UNIFIED,
        _gemma4_unified,
        ("<|image|>",),
        has_colours_last=True,
    ),
    "glm4v": ProjectorKind(GLM4V_MODEL, (GLM4V_MODEL, GLM4V_MOE), GLM4V, _glm4v, ("<|image|>",)),
    "idefics3": ProjectorKind(
        "SmolVLMForConditionalGeneration", ("LlamaForCausalLM",), IDEFICS3, _idefics3, ("<image>",)
    ),
    "internvl": ProjectorKind(
        "InternVLForConditionalGeneration", INTERN_TEXTS, INTERNVL, _internvl, ("<IMG_CONTEXT>",)
    ),
    "kimivl": ProjectorKind(
        "KimiVLForConditionalGeneration",
        ("DeepseekV3ForCausalLM",),
        MOON,
        _kimi,
        ("<|media_pad|>",),
        joined="vision_tower.encoder.blocks.*.wqkv",
    ),
    "lfm2": ProjectorKind(
        "Lfm2VlForConditionalGeneration",
        ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"),
        LFM2,
        _lfm2,
        ("<image>",),
        has_colours_last=True,
    ),
    "lightonocr": ProjectorKind(
        "LightOnOCRForConditionalGeneration",
        ("Qwen3ForCausalLM",),
        PIXTRAL,
        _lighton,
        ("<|image_pad|>",),
        ("attn_q", "attn_k"),
    ),
    "llama4": ProjectorKind("Llama4ForConditionalGeneration", ("Llama4ForCausalLM",), LLAMA4, _llama4, ("<|patch|>",)),
    MLP: ProjectorKind(
        "LlavaForConditionalGeneration",
        ("LlamaForCausalLM", "MistralForCausalLM"),
        LLAVA,
        _llava,
        ("<image>", "<unk>"),  # the original vocabulary has no token for images
    ),
    "pixtral": ProjectorKind(
        "LlavaForConditionalGeneration", MISTRAL_TEXTS, PIXTRAL, _pixtral, ("[IMG]",), ("attn_q", "attn_k")
    ),
    "qwen2.5vl_merger": ProjectorKind(
        QWEN25_VL, (QWEN25_VL,), QWEN25, _qwen25, ("<|image_pad|>",), joined="visual.blocks.*.attn.qkv"
    ),
    "qwen3vl_merger": ProjectorKind(QWEN3_TEXTS[0], QWEN3_TEXTS, QWEN3, _qwen3, ("<|image_pad|>",)),
}
"""By ``clip.projector_type``."""


def projector_of(path: Path) -> Path | None:
    """The file of the tower next to a GGUF file, the most exact one of several; ``None`` if there is none."""
    if path.suffix.lower() != ".gguf":
        return None
    found = [file for file in path.parent.iterdir() if is_projector(file.name)]
    return min(found, key=lambda file: order_of(file.name), default=None)


def open_projector(path: Path) -> Projector | None:
    """The tower next to a GGUF file; ``None``, with a warning, for one of a kind that is not known.

    Raises ``CheckpointError`` for a damaged file.
    """
    place = projector_of(path)
    if place is None:
        return None
    file = GGUFFile.open(place)
    unnamed = MLP if file.metadata.get("clip.has_llava_projector") else None
    name = file.metadata.get("clip.projector_type", file.metadata.get("clip.vision.projector_type", unnamed))
    if name not in KINDS:
        logger.warning("%s: images are refused: projector_type is %.100s, not %s", place, name, " or ".join(KINDS))
        return None
    return Projector(file, KINDS[name])


def is_projector(name: str) -> bool:
    """Whether a file is that of a tower, by its name."""
    return name.startswith("mmproj") and name.lower().endswith(".gguf")


def order_of(name: str) -> tuple[int, str]:
    """By which the files of one tower are preferred: BF16 and F16, F32, then what is quantised."""
    forms = ("bf16", "f16", "f32")
    return next((place for place, form in enumerate(forms) if form in name.lower()), len(forms)), name


class Projector:
    """What the file of a tower says of it; ``ProjectorTensors`` reads it. Raises ``CheckpointError``."""

    def __init__(self, file: GGUFFile, kind: ProjectorKind) -> None:
        self.path, self.file, self._kind = file.path, file, kind
        data = Metadata(file, "clip.")
        self._vision: dict[str, Any] = {
            "image_size": data.count("vision.image_size"),
            "patch_size": data.count("vision.patch_size"),
            "hidden_size": data.count("vision.embedding_length"),
            "intermediate_size": data.count("vision.feed_forward_length", low=0),
            "num_hidden_layers": data.count("vision.block_count", low=0),
            "num_attention_heads": data.count("vision.attention.head_count", low=0),
            "layer_norm_eps": data.real("vision.attention.layer_norm_epsilon", 1e-6),
        }
        self._vision |= self._kind.read(data)
        self._outer: dict[str, Any] = self._vision.pop("outer", {})
        processing = self._vision.pop("processing", {})
        numbers = {key: [float(number) for number in data.get(f"vision.{key}")] for key in ("image_mean", "image_std")}
        self.processing = numbers | processing
        """What ``preprocessor_config.json`` would have."""
        for own, key in (("min_pixels", "vision.image_min_pixels"), ("max_pixels", "vision.image_max_pixels")):
            if data.has(key):
                self.processing[own] = data.get(key)
        self.places = self._named()
        """The tensors that are joined in each tensor of transformers."""

    def has_colours_last(self, tensor: str) -> bool:
        """Whether a tensor is one whose colours were put first."""
        return tensor in OF_PIXELS and self._kind.has_colours_last

    def is_permuted(self, tensor: str) -> bool:
        """Whether the two numbers of a rotary pair are adjacent among the rows of a tensor."""
        return any(f".{part}." in tensor for part in self._kind.permuted)

    @property
    def num_heads(self) -> int:
        """Attention heads of a layer."""
        heads: int = self._vision["num_attention_heads"]
        return heads

    def config(self, text: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
        """The configuration of the whole checkpoint, from that of the text part and its vocabulary.

        Raises ``CheckpointError`` if the text part is of another model.
        """
        found = (text.get("architectures") or self._kind.texts)[0]
        if found not in self._kind.texts:
            raise CheckpointError(f"{self.path}: this tower is of {' or '.join(self._kind.texts)}, not of {found}")
        token = next((token for token in self._kind.image_tokens if token in tokens), None)
        known = {} if token is None else {"image_token_id": tokens.index(token)}
        whole = {"architectures": [self._kind.architecture], "vision_config": self._vision, "text_config": text}
        return {**whole, **self._outer, **known}

    def _named(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        tensors = self.file.tensors
        up, width = tensors.get("v.blk.0.ffn_up.weight"), self._vision["hidden_size"]
        is_swapped = up is not None and up.shape[0] == width != up.shape[1]  # as older converters did
        swaps = {"v.blk.*.ffn_up": "v.blk.*.ffn_down", "v.blk.*.ffn_down": "v.blk.*.ffn_up"} if is_swapped else {}
        for own, stored in self._kind.names.items():
            stored = swaps.get(stored, stored)
            layers = range(self._vision["num_hidden_layers"]) if "*" in own else (0,)
            for layer in layers:
                place = stored.replace("*", str(layer))
                if place in tensors:
                    found[own.replace("*", str(layer))] = [place]
                for end in ("weight", "bias"):
                    if f"{place}.{end}" in tensors:
                        join = "_" if own.endswith("mm_input_projection") else "."
                        found[f"{own.replace('*', str(layer))}{join}{end}"] = [f"{place}.{end}"]
        for number, layer in enumerate(self._vision.get("deepstack_visual_indexes", ())):
            for own, stored in DEEP.items():
                for end in ("weight", "bias"):
                    name = f"visual.deepstack_merger_list.{number}.{own}.{end}"
                    found[name] = [f"v.deepstack.{layer}.{stored}.{end}"]
        if self._kind.names is LLAVA and NEWLINES[1] in tensors:
            found["image_newline"] = [NEWLINES[1]]
        if FRAME in tensors:
            found["visual.patch_embed.proj.weight"].append(FRAME)
        for layer in range(self._vision["num_hidden_layers"]) if self._kind.joined else ():
            for end in ("weight", "bias"):
                own = self._kind.joined.replace("*", str(layer))
                found[f"{own}.{end}"] = [f"v.blk.{layer}.attn_{part}.{end}" for part in "qkv"]
        return found
