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

QWEN25_VL = "Qwen2_5_VLForConditionalGeneration"
GEMMA3 = {
    "vision_tower.embeddings.patch_embedding": "v.patch_embd",
    "vision_tower.embeddings.position_embedding": "v.position_embd",
    "vision_tower.post_layernorm": "v.post_ln",
    "vision_tower.encoder.layers.*.layer_norm1": "v.blk.*.ln1",
    "vision_tower.encoder.layers.*.layer_norm2": "v.blk.*.ln2",
    "vision_tower.encoder.layers.*.self_attn.q_proj": "v.blk.*.attn_q",
    "vision_tower.encoder.layers.*.self_attn.k_proj": "v.blk.*.attn_k",
    "vision_tower.encoder.layers.*.self_attn.v_proj": "v.blk.*.attn_v",
    "vision_tower.encoder.layers.*.self_attn.out_proj": "v.blk.*.attn_out",
    "vision_tower.encoder.layers.*.mlp.fc1": "v.blk.*.ffn_up",
    "vision_tower.encoder.layers.*.mlp.fc2": "v.blk.*.ffn_down",
    "multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
    "multi_modal_projector.mm_input_projection": "mm.input_projection",
}
QWEN25 = {
    "visual.patch_embed.proj": "v.patch_embd",
    "visual.blocks.*.norm1": "v.blk.*.ln1",
    "visual.blocks.*.norm2": "v.blk.*.ln2",
    "visual.blocks.*.attn.proj": "v.blk.*.attn_out",
    "visual.blocks.*.mlp.gate_proj": "v.blk.*.ffn_gate",
    "visual.blocks.*.mlp.up_proj": "v.blk.*.ffn_up",
    "visual.blocks.*.mlp.down_proj": "v.blk.*.ffn_down",
    "visual.merger.ln_q": "v.post_ln",
    "visual.merger.mlp.0": "mm.0",
    "visual.merger.mlp.2": "mm.2",
}
QWEN3 = {
    "visual.patch_embed.proj": "v.patch_embd",
    "visual.pos_embed": "v.position_embd",
    "visual.blocks.*.norm1": "v.blk.*.ln1",
    "visual.blocks.*.norm2": "v.blk.*.ln2",
    "visual.blocks.*.attn.qkv": "v.blk.*.attn_qkv",
    "visual.blocks.*.attn.proj": "v.blk.*.attn_out",
    "visual.blocks.*.mlp.linear_fc1": "v.blk.*.ffn_up",
    "visual.blocks.*.mlp.linear_fc2": "v.blk.*.ffn_down",
    "visual.merger.norm": "v.post_ln",
    "visual.merger.linear_fc1": "mm.0",
    "visual.merger.linear_fc2": "mm.2",
}
DEEP = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}
"""Parts of the mergers of layers whose outputs the decoder gets; the file has them by the number of the layer."""
MINUS_ONE = "mm.soft_emb_norm.weight"
"""The converter adds 1 to this norm."""
FRAME = "v.patch_embd.weight.1"
"""The second frame's part of a patch."""


class ProjectorKind(NamedTuple):
    """How to read one kind of tower."""

    architecture: str
    texts: tuple[str, ...]
    """The architectures of text parts to which it belongs."""
    names: Mapping[str, str]
    read: Callable[[Metadata], dict[str, Any]]
    """The keys of ``vision_config`` that others do not have, and of the configuration around it under ``outer``."""
    image_token: str


def _gemma3(data: Metadata) -> dict[str, Any]:
    side = data.count("vision.image_size") // data.count("vision.patch_size")
    scale = data.count("vision.projector.scale_factor", 4)
    return {"outer": {"mm_tokens_per_image": (side // scale) ** 2}}


def _qwen25(data: Metadata) -> dict[str, Any]:
    every, layers = data.count("vision.n_wa_pattern", 8), data.count("vision.block_count")
    given = data.get("vision.wa_layer_indexes")
    full = list(range(every - 1, layers, every)) if given is None else [int(index) for index in given]
    return {
        "depth": layers,
        "num_heads": data.count("vision.attention.head_count"),
        "out_hidden_size": data.count("vision.projection_dim"),
        "fullatt_block_indexes": full,
        "window_size": data.count("vision.window_size", 112),
    }


def _qwen3(data: Metadata) -> dict[str, Any]:
    deep = data.get("vision.is_deepstack_layers", ())
    return {
        "depth": data.count("vision.block_count"),
        "num_heads": data.count("vision.attention.head_count"),
        "out_hidden_size": data.count("vision.projection_dim"),
        "num_position_embeddings": (data.count("vision.image_size") // data.count("vision.patch_size")) ** 2,
        "deepstack_visual_indexes": [layer for layer, is_deep in enumerate(deep) if is_deep],
    }


QWEN3_TEXTS = (
    "Qwen3VLForConditionalGeneration",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
)
KINDS = {
    "gemma3": ProjectorKind(
        "Gemma3ForConditionalGeneration", ("Gemma3ForCausalLM",), GEMMA3, _gemma3, "<image_soft_token>"
    ),
    "qwen2.5vl_merger": ProjectorKind(QWEN25_VL, (QWEN25_VL,), QWEN25, _qwen25, "<|image_pad|>"),
    "qwen3vl_merger": ProjectorKind(QWEN3_TEXTS[0], QWEN3_TEXTS, QWEN3, _qwen3, "<|image_pad|>"),
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
    name = file.metadata.get("clip.projector_type", file.metadata.get("clip.vision.projector_type"))
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
            "intermediate_size": data.count("vision.feed_forward_length"),
            "num_hidden_layers": data.count("vision.block_count"),
            "num_attention_heads": data.count("vision.attention.head_count"),
            "layer_norm_eps": data.real("vision.attention.layer_norm_epsilon", 1e-6),
        }
        self._vision |= self._kind.read(data)
        self._outer: dict[str, Any] = self._vision.pop("outer", {})
        numbers = {"image_mean": "vision.image_mean", "image_std": "vision.image_std"}
        self.processing = {own: [float(number) for number in data.get(key)] for own, key in numbers.items()}
        """What ``preprocessor_config.json`` would have."""
        for own, key in (("min_pixels", "vision.image_min_pixels"), ("max_pixels", "vision.image_max_pixels")):
            if data.has(key):
                self.processing[own] = data.get(key)
        self.places = self._named()
        """The tensors that are joined in each tensor of transformers."""

    def config(self, text: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
        """The configuration of the whole checkpoint, from that of the text part and its vocabulary.

        Raises ``CheckpointError`` if the text part is of another model.
        """
        found = (text.get("architectures") or self._kind.texts)[0]
        if found not in self._kind.texts:
            raise CheckpointError(f"{self.path}: this tower is of {' or '.join(self._kind.texts)}, not of {found}")
        known = {"image_token_id": tokens.index(self._kind.image_token)} if self._kind.image_token in tokens else {}
        whole = {"architectures": [self._kind.architecture], "vision_config": self._vision, "text_config": text}
        return {**whole, **self._outer, **known}

    def _named(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        tensors = self.file.tensors
        up = tensors.get("v.blk.0.ffn_up.weight")
        is_swapped = up is not None and up.shape[0] != self._vision["intermediate_size"]  # as older converters did
        for own, stored in self._kind.names.items():
            if is_swapped:
                stored = {"v.blk.*.ffn_up": "v.blk.*.ffn_down", "v.blk.*.ffn_down": "v.blk.*.ffn_up"}.get(
                    stored, stored
                )
            layers = range(self._vision["num_hidden_layers"]) if "*" in own else (0,)
            for layer in layers:
                place = stored.replace("*", str(layer))
                for end in ("weight", "bias"):
                    if f"{place}.{end}" in tensors:
                        join = "_" if own.endswith("mm_input_projection") else "."
                        found[f"{own.replace('*', str(layer))}{join}{end}"] = [f"{place}.{end}"]
        for number, layer in enumerate(self._vision.get("deepstack_visual_indexes", ())):
            for own, stored in DEEP.items():
                for end in ("weight", "bias"):
                    name = f"visual.deepstack_merger_list.{number}.{own}.{end}"
                    found[name] = [f"v.deepstack.{layer}.{stored}.{end}"]
        if FRAME in tensors:
            found["visual.patch_embed.proj.weight"].append(FRAME)
        for layer in range(self._vision["num_hidden_layers"]) if self._kind.names is QWEN25 else ():
            for end in ("weight", "bias"):
                found[f"visual.blocks.{layer}.attn.qkv.{end}"] = [f"v.blk.{layer}.attn_{part}.{end}" for part in "qkv"]
        return found
