"""GGUF checkpoints, with the parameter names and row order of Hugging Face."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo.errors import CheckpointError
from octavo.sampling_params import OPTIONS
from octavo.weights.generation_config import in_vocabulary, token_ids
from octavo.weights.gguf.block_formats import BlockTensor, dequantize
from octavo.weights.gguf.gguf_dense import DECODERS
from octavo.weights.gguf.gguf_families import FAMILIES, translate
from octavo.weights.gguf.gguf_hybrids import HYBRIDS
from octavo.weights.gguf.gguf_mixtures import MIXTURES
from octavo.weights.gguf.gguf_reader import GGUFFile
from octavo.weights.gguf.projector import FRAME, MINUS_ONE, PLACES, Projector
from octavo.weights.gguf.tensor_names import TensorPlace

ALL_FAMILIES = FAMILIES | DECODERS | MIXTURES | HYBRIDS
DENSE_KINDS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

SAMPLING_KEYS = {option.model_key: option.gguf_key for option in OPTIONS.values() if option.gguf_key}
RATES = ".A_log"
"""Converters store the rates of decay, negated, not their logarithms."""
END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
"""Metadata keys of the token ids that end a text, a turn, and a message to a tool."""


class GGUFCheckpoint:
    """A GGUF file of a supported architecture. Raises ``CheckpointError``."""

    is_dummy = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFFile.open(path)
        self._family, self.config, self._places = translate(self._file, ALL_FAMILIES)
        special_tokens = _special_tokens(self._file)
        self.config.update(special_tokens)
        self.generation_config = special_tokens | {
            name: self._file.metadata[key] for name, key in SAMPLING_KEYS.items() if key in self._file.metadata
        }
        self.has_blocks = any(tensor.kind not in DENSE_KINDS for tensor in self._file.tensors.values())

    def names(self) -> set[str]:
        """Hugging Face names of all parameters in the file."""
        return set(self._places)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The type and shape of an existing parameter."""
        place = self._places[name]
        if place.number is not None:
            return "F32", (1,)
        tensor = self._file.tensors[place.tensor]
        if place.values is not None:
            (heads, latent, width), values = tensor.shape, self._file.tensors[place.values].shape
            return tensor.kind, (heads * (width + values[1]), latent)
        shape = tensor.shape if place.part is None else tensor.shape[1:]
        if place.rows is not None:
            return tensor.kind, (len(range(*place.rows.indices(shape[0]))), *shape[1:])
        return tensor.kind, shape if place.half is None else (shape[0] // 2, *shape[1:])

    def load(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | BlockTensor:
        """The parameter: a copy if it is dense, a ``BlockTensor`` over the mapped file if quantised."""
        if name not in self._places:
            raise CheckpointError(f"{self.path}: there is no tensor for {name!r}; expected one of shape {shape}")
        place = self._places[name]
        if place.number is not None:
            return torch.full(shape, place.number)
        if place.values is not None:
            return self._joined(place.tensor, place.values, shape)
        tensor = self._file.tensors[place.tensor]
        what = f"{self.path}: tensor {place.tensor!r}"
        found = self.describe(name)[1]
        if not can_be(found, shape):
            raise CheckpointError(f"{what}: has shape {tensor.shape}, expected {shape} for {name!r}")
        if tensor.kind not in DENSE_KINDS and len(shape) != 2:
            raise CheckpointError(f"{what}: has type {tensor.kind} and shape {shape}, only matrices can be quantised")
        rows = self._hugging_face_rows(name, self._rows(place, shape[0]))
        if tensor.kind in DENSE_KINDS:
            numbers = torch.from_numpy(rows.copy()).view(DENSE_KINDS[tensor.kind]).reshape(shape)
            return torch.log(-numbers.float()) if name.endswith(RATES) else numbers
        return BlockTensor(tensor.kind, (shape[0], shape[1]), rows, place.tensor)

    def _rows(self, place: TensorPlace, count: int) -> npt.NDArray[np.uint8]:
        """The bytes of a parameter, uint8 [count, row_bytes]."""
        data = self._file.data(place.tensor)
        if place.rows is not None:
            return data.reshape(self._file.tensors[place.tensor].shape[0], -1)[place.rows]
        if place.part is not None:
            data = data.reshape(self._file.tensors[place.tensor].shape[0], -1)[place.part]
        return data.reshape(count, -1) if place.half is None else data.reshape(2, count, -1)[place.half]

    def _joined(self, keys: str, values: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The map from the latent to keys and values, head by head, joined from two tensors.

        For N heads, keys are [N, latent, P] and values [N, V, latent]; the result is [N (P + V), latent].
        """
        for name in (keys, values):
            if name not in self._file.tensors:
                raise CheckpointError(f"{self.path}: tensor {name!r} is missing")
        keys_NLP, values_NVL = (dense(self._file, name) for name in (keys, values))
        sizes = keys_NLP.shape, values_NVL.shape
        if [len(size) for size in sizes] != [3, 3] or sizes[0][:2] != (sizes[1][0], sizes[1][2]):
            raise CheckpointError(f"{self.path}: tensors {keys!r} and {values!r} of {sizes} do not fit each other")
        joined = torch.cat((keys_NLP.mT, values_NVL), dim=1).flatten(0, 1)
        if joined.shape != shape:
            raise CheckpointError(f"{self.path}: tensor {keys!r}: has shape {sizes[0]}, expected such for {shape}")
        return joined

    def _hugging_face_rows(self, name: str, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Undo the family's order of rows, and the permutation of query and key rows in files of the Llama family.

        In these files, the two numbers of a rotary pair are adjacent; in Hugging Face's order they are half a head
        apart.
        """
        if (own := self._family.order(self.config, name, len(rows))) is not None:
            return rows[own]
        if not self._family.is_permuted:
            return rows
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


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


class ProjectorTensors:
    """The tensors of a tower, dense even if they are stored in blocks, under the names of transformers."""

    is_dummy = False

    def __init__(self, projector: Projector) -> None:
        self._projector, self._file = projector, projector.file

    def names(self) -> set[str]:
        return set(self._projector.places)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The type and shape of the first part of a tensor."""
        tensor = self._file.tensors[self._projector.places[name][0]]
        return tensor.kind, tensor.shape

    def load(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Raises ``CheckpointError``."""
        path, parts = self._file.path, self._projector.places.get(name)
        if parts is None:
            raise CheckpointError(f"{path}: there is no tensor for {name!r}; expected one of shape {shape}")
        if absent := [part for part in parts if part not in self._file.tensors]:
            raise CheckpointError(f"{path}: tensor {absent[0]!r} is missing")
        joined = [dense(self._file, part) - int(part == MINUS_ONE) for part in parts]
        found = torch.stack(joined, dim=2) if FRAME in parts else torch.cat(joined)
        if self._projector.is_permuted(parts[0]):
            heads = self._projector.num_heads
            found = found.view(heads, -1, 2, *found.shape[1:]).transpose(1, 2).reshape(found.shape)
        if self._projector.has_colours_last(parts[0]):
            found = found.view(*found.shape[: found.ndim > 1], 3, -1).transpose(-1, -2).flatten(-2)
        if name == PLACES:
            found = found.transpose(0, 1)
        joins = len(found.shape) == 2 and found.shape == (math.prod(shape[:-1]), shape[-1])
        if joins or _without_ones(found.shape) == _without_ones(shape):
            found = found.reshape(shape)  # converters join axes, or leave out those of one place
        if found.shape != shape:
            raise CheckpointError(f"{path}: {name!r} has shape {tuple(found.shape)}, expected {shape}")
        return found


def can_be(found: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a tensor of a file holds a parameter of this shape: converters drop and add axes of length 1, and
    vectors may be stored in rows."""
    return _without_ones(found) == _without_ones(shape) or (len(shape) == 1 and math.prod(found) == shape[0])


def dense(file: GGUFFile, name: str) -> torch.Tensor:
    """A tensor of any number of axes as float32."""
    tensor = file.tensors[name]
    rows = int(np.prod(tensor.shape[:-1]))
    blocks = BlockTensor(tensor.kind, (rows, tensor.shape[-1]), file.data(name).reshape(rows, -1), name)
    return torch.from_numpy(dequantize(blocks)).reshape(tensor.shape)


def _special_tokens(file: GGUFFile) -> dict[str, Any]:
    """``bos_token_id``, ``eos_token_id`` (a list when there are several) and ``pad_token_id`` that the file has."""
    result: dict[str, Any] = {}
    ends = list(dict.fromkeys(token for key in END_KEYS for token in _token_ids(file, key)))
    if ends:
        result["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    for name, key in (("bos", "tokenizer.ggml.bos_token_id"), ("pad", "tokenizer.ggml.padding_token_id")):
        for token in _token_ids(file, key):
            result[f"{name}_token_id"] = token
    return result


def _token_ids(file: GGUFFile, key: str) -> tuple[int, ...]:
    """The token id under ``key``; none, with a warning, if it is beyond the vocabulary."""
    ids = token_ids(file.metadata, key, f"{file.path}: metadata")
    return in_vocabulary(ids, file.tensors["token_embd.weight"].shape[0], f"{file.path}: metadata {key}")
