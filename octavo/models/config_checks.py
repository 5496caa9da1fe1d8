"""Checks the sizes in a configuration against the checkpoint before building anything; errors name the setting."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.models.meta_model import outline
from octavo.models.model_config import ModelConfig
from octavo.models.multimodal_text import TextPart
from octavo.quant.checkpoint_tensors import HeadCopy, TensorSource, check_equal
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.weights.checkpoint import Checkpoint
from octavo.weights.generation_config import token_ids
from octavo.weights.safetensors import FLOATS

GIB = 1 << 30
ROWS_AT_ONCE = 4096
_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks)\.(\d+)\.")
_EMBEDDINGS = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings)\.weight$")
_GPT2 = {"num_layers": "n_layer", "hidden_size": "n_embd"}


def check_sizes(config: ModelConfig, source: TensorSource) -> None:
    """Compare sizes with the names and shapes in the checkpoint's headers. Raises ``CheckpointError``.

    Checks only sizes that would cost memory or time before the first tensor is loaded; the loader checks every shape.
    """
    if not (names := source.names()):
        return
    layers = {int(found[1]) for name in names if (found := _LAYER.search(name))}
    num_layers = max(layers, default=-1) + 1
    if config.num_stored_layers > num_layers:
        raise _differs(config, "num_layers", f"the checkpoint has weights of {num_layers} layers")
    embedding = next((name for name in sorted(names) if _EMBEDDINGS.search(name)), None)
    if embedding is not None:
        shape = source.describe(embedding)[1]
        wanted = {"vocab_size": config.vocab_size, "hidden_size": config.embedding_width}
        for (field, expected), size in zip(wanted.items(), shape, strict=False):
            if expected != size:
                raise _differs(config, field, f"tensor {embedding} has shape {list(shape)}")
    _check_heads(config, TextPart(source))


def _check_heads(config: ModelConfig, source: TensorSource) -> None:
    names = source.names()
    first = config.cache[0]
    heads = (
        ("q_proj", "num_attention_heads", config.num_heads, config.query_rows),
        ("k_proj", "num_key_value_heads", first.num_kv_heads, first.num_kv_heads * first.head_dim),
    )
    for part, key, count, num_rows in heads:
        found = f"model.layers.0.self_attn.{part}.weight"
        if found not in names or first.kind != "attention":
            continue
        kind, shape = source.describe(found)
        if kind == "U8":  # packed: the reader of the format knows its size
            continue
        if shape[0] != num_rows:
            sizes = f"head_dim is {config.head_dim} and {key} is {count}"
            raise CheckpointError(f"config: {sizes}, but tensor {found} has shape {list(shape)}")


def check_copy(copy: HeadCopy | None, source: TensorSource, dtype: torch.dtype) -> None:
    """Compare a stored head with the embedding that it is tied to, as loading does; one that is packed is passed over.

    Raises ``CheckpointError``.
    """
    stored = [] if copy is None else [source.describe(name) for name in copy.names]
    if copy is None or any(kind not in FLOATS for kind, _ in stored):
        return
    own_VD, table_VD = (source.load(name, shape) for name, (_, shape) in zip(copy.names, stored, strict=True))
    assert isinstance(own_VD, Tensor)
    assert isinstance(table_VD, Tensor)
    for start in range(0, len(own_VD), ROWS_AT_ONCE):  # whole tables would be copied: gigabytes
        rows = slice(start, start + ROWS_AT_ONCE)
        check_equal(copy.module, own_VD[rows].to(dtype), table_VD[rows].to(dtype))


def _differs(config: ModelConfig, field: str, found: str) -> CheckpointError:
    key = {"num_layers": "num_hidden_layers"}.get(field, field)
    if config.architecture.startswith("GPT2"):
        key = _GPT2.get(field, field)
    return CheckpointError(f"config: {key} is {getattr(config, field)}, but {found}")


def eos_token_ids(config: ModelConfig, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids in ``generation_config.json``, or else the configuration's, without those beyond the vocabulary. Raises
    ``CheckpointError`` for what is no id."""
    ids = token_ids(generation, "eos_token_id", "generation config") or config.eos_token_ids
    return tuple(token for token in ids if token < config.vocab_size)


def check_dummy(
    config: ModelConfig, checkpoint: Checkpoint, form: WeightFormat, ranks: int, stages: int, free: int
) -> None:
    """Refuse random weights of which the share of a rank of ``ranks``, of one of ``stages``, takes more than ``free``
    bytes. Raises ``CheckpointError``."""
    small, larger = (
        outline(dataclasses.replace(config, num_layers=min(count, config.num_layers)), checkpoint, form).num_bytes
        for count in (1, 2)
    )
    needed = (small + (larger - small) * (-(-config.num_layers // stages) - 1)) // ranks
    if needed > free:
        sizes = {
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.ffn_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "head_dim": config.head_dim,
        }
        shown = ", ".join(f"{key} {size}" for key, size in sizes.items())
        raise CheckpointError(f"config: weights of {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are free: {shown}")
