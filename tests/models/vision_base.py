"""What the tiny vision-language checkpoints have in common."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

from PIL import Image
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

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
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
HYBRID_TEXT = {
    **TEXT,
    "head_dim": 32,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_interleaved": True},
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
"""Of Qwen3.5: recurrent state in every other layer."""

SMALL_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
PIXTRAL_VISION = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 14,
}
QWEN_SIZE = {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 30}


class Family(NamedTuple):
    """How a family's checkpoints and their images are made."""

    model_type: str
    config: dict[str, Any]
    processor: Callable[[], Any]
    placeholders: Callable[[Any], Sequence[list[int]]]
    """Tokens of each image, from what the processor gives."""
    tokens: dict[str, int] = {}
    """Ids that have to be in the tokenizer."""
    rewrite: Callable[[Path], None] = lambda folder: None
    """Writes the checkpoint in another form."""
    model: Callable[[], Any] | None = None
    """Of a family that the library does not have."""
    is_original: bool = True
    """Whether the library saves it under the names that published checkpoints have."""


def of_grid(found: Any) -> Sequence[list[int]]:
    return [[IMAGE] * (int(grid.prod()) // 4) for grid in found["image_grid_thw"]]


def tokenizer(tokens: dict[str, int]) -> Tokenizer:
    """A byte-level tokenizer with these tokens."""
    others = (i for i in range(256) if i not in tokens.values())
    made = Tokenizer(
        BPE(vocab={**tokens, **{f"t{i}": i for i in others}}, merges=[("Ċ", "Ċ")] if "ĊĊ" in tokens else [])
    )
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.decoder = ByteLevelDecoder()
    made.add_special_tokens([text for text in tokens if text.startswith(("<", "TILE_"))])
    return made


def without_torchvision(name: str, kind: str) -> Any:
    """A module of the library that imports torchvision for resizing alone."""
    stubs = {f"torchvision{end}": MagicMock() for end in ("", ".transforms", ".transforms.v2")}
    stubs["torchvision.transforms.v2.functional"] = MagicMock()
    with patch.dict(sys.modules, stubs):
        return importlib.import_module(f"transformers.models.{name}.{kind}_{name}")


def cut_up(image: Image.Image, rows: int, columns: int, side: int) -> list[Image.Image]:
    """Tiles row by row."""
    places = [(side * row, side * column) for row in range(rows) for column in range(columns)]
    return [image.crop((left, top, left + side, top + side)) for top, left in places]


HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def written_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config
