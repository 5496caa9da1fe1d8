"""Checkpoints in GGUF files, under the names and in the row order of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo.errors import CheckpointError
from octavo.weights.blocks import BlockTensor
from octavo.weights.gguf import GGUFFile
from octavo.weights.gguf_llama import translate_config, translate_names

ARCHITECTURES = ("llama",)
DENSE_KINDS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
"""Ids that end a text, a turn, and a message to a tool."""


class GGUFCheckpoint:
    """A GGUF file of a supported architecture. Raises ``CheckpointError``."""

    is_dummy = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFFile.open(path)
        architecture = self._file.metadata.get("general.architecture")
        if architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{path}: architecture {str(architecture)[:100]!r} is not supported in GGUF files, "
                f"supported are {', '.join(ARCHITECTURES)}"
            )
        self.config = translate_config(self._file)
        self.generation_config = _special_tokens(self._file)
        self.config.update(self.generation_config)
        self._names = translate_names(self._file)
        self.has_blocks = any(tensor.kind not in DENSE_KINDS for tensor in self._file.tensors.values())

    def names(self) -> set[str]:
        """Hugging Face names of all parameters in the file."""
        return set(self._names)

    def load(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | BlockTensor:
        """The parameter: a copy if it is dense, a ``BlockTensor`` over the mapped file if quantised."""
        if name not in self._names:
            raise CheckpointError(f"{self.path}: there is no tensor for {name!r}; expected one of shape {shape}")
        stored_name = self._names[name]
        tensor = self._file.tensors[stored_name]
        what = f"{self.path}: tensor {stored_name!r}"
        if tensor.shape != shape:
            raise CheckpointError(f"{what}: has shape {tensor.shape}, expected {shape} for {name!r}")
        if tensor.kind not in DENSE_KINDS and len(shape) != 2:
            raise CheckpointError(f"{what}: has type {tensor.kind} and shape {shape}, only matrices can be quantised")
        rows = self._hugging_face_rows(name, self._file.data(stored_name).reshape(shape[0], -1))
        if tensor.kind in DENSE_KINDS:
            return torch.from_numpy(rows.copy()).view(DENSE_KINDS[tensor.kind]).reshape(shape)
        return BlockTensor(tensor.kind, (shape[0], shape[1]), rows)

    def _hugging_face_rows(self, name: str, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Undo the order that GGUF files have the rows of queries and keys in.

        There, the two numbers that the rotary embedding turns together are neighbours; in Hugging Face's
        order they are half a head apart.
        """
        if ".q_proj." in name:
            num_heads = self.config["num_attention_heads"]
        elif ".k_proj." in name:
            num_heads = self.config["num_key_value_heads"]
        else:
            return rows
        if len(rows) % (2 * num_heads):
            raise CheckpointError(f"{self.path}: {name!r} has {len(rows)} rows, which is not {num_heads} even heads")
        order = np.arange(len(rows)).reshape(num_heads, -1, 2).swapaxes(1, 2).ravel()
        return rows[order]


def _special_tokens(file: GGUFFile) -> dict[str, Any]:
    """``bos_token_id``, ``eos_token_id`` (a list when there are several) and ``pad_token_id`` that the file has."""
    result: dict[str, Any] = {}
    ends = [_token_id(file, key) for key in END_KEYS if key in file.metadata]
    if ends:
        unique = list(dict.fromkeys(ends))
        result["eos_token_id"] = unique[0] if len(unique) == 1 else unique
    for name, key in (("bos", "tokenizer.ggml.bos_token_id"), ("pad", "tokenizer.ggml.padding_token_id")):
        if key in file.metadata:
            result[f"{name}_token_id"] = _token_id(file, key)
    return result


def _token_id(file: GGUFFile, key: str) -> int:
    value = file.metadata[key]
    vocab_size = file.tensors["token_embd.weight"].shape[0]
    if type(value) is not int or not 0 <= value < vocab_size:
        raise CheckpointError(f"{file.path}: metadata {key!r}: is {str(value)[:100]}, expected 0 to {vocab_size - 1}")
    return value
