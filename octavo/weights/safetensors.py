"""Safetensors checkpoints: a folder with ``config.json`` and one file, or shards with an index.

The ``safetensors`` library reads the files through memory maps. This module refuses what the library accepts but a
valid checkpoint does not contain, such as duplicate names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from octavo.errors import CheckpointError
from octavo.weights.folder import MAX_JSON_BYTES, find_file, parse_json, read_json, with_architecture

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
FLOATS = ("F32", "F16", "BF16")
DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BOOL": torch.bool,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""Types behind the floating-point ones hold quantised weights, which their quantisation methods decode, or none at all.
F8_E5M2 needs no scales."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
METHOD_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq"}
"""Files that hold the quantisation settings where ``config.json`` does not, and the method that writes each."""


@dataclass(frozen=True, eq=False)
class _TensorFile:
    """One safetensors file: the header as JSON, and the library's handle."""

    path: Path
    header: dict[str, Any]
    handle: Any


class TensorFiles:
    """The tensors of safetensors files by name. Raises ``CheckpointError`` for a file that is malformed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.path = paths[0]
        opened = [_open_file(path, path) for path in paths]
        self._files = {name: file for file in opened for name in file.header}

    def names(self) -> set[str]:
        """Names of all parameters in the checkpoint."""
        return set(self._files)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The type and shape of an existing parameter."""
        found = self._files[name].header[name]
        return str(found["dtype"]), tuple(found["shape"])

    def load(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The parameter ``name`` as stored, memory-mapped from the file; it must have this shape."""
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"{self.path}: there is no tensor {name!r}; expected one of shape {shape}")
        what = f"{file.path}: tensor {name!r}"
        found = file.header[name]
        if found["dtype"] not in DTYPES:
            raise CheckpointError(f"{what}: has dtype {found['dtype']}, supported are {', '.join(DTYPES)}")
        if tuple(found["shape"]) != shape:
            raise CheckpointError(f"{what}: has shape {tuple(found['shape'])}, expected {shape}")
        tensor: torch.Tensor = file.handle.get_tensor(name)
        return tensor


class SafetensorsCheckpoint(TensorFiles):
    """A folder of safetensors files in the layout of the Hugging Face hub.

    Opening it checks every name: raises ``CheckpointError`` if a file is missing or malformed, or if the index and
    the files do not agree.
    """

    is_dummy = False
    has_blocks = False

    def __init__(self, folder: Path, config_folder: Path | None = None) -> None:
        """``config_folder`` has the configuration, if that is another folder."""
        self.path = folder
        self.config, self.generation_config = read_configs(config_folder or folder)
        self._files = _open_files(folder)


def open_tensors(folder: Path, name: str) -> tuple[list[str], Callable[[str], torch.Tensor]]:
    """The tensor names in one file of ``folder``, and a function that reads a tensor. Raises ``CheckpointError``."""
    path = find_file(folder, name)
    if path is None:
        raise CheckpointError(f"{folder}: there is no {name}; weights must be safetensors files")
    file = _open_file(path, folder / name)

    def get(tensor: str) -> torch.Tensor:
        dtype = file.header[tensor]["dtype"]
        if dtype not in FLOATS:
            raise CheckpointError(f"{folder / name}: tensor {tensor!r} has dtype {dtype}; allowed: {', '.join(FLOATS)}")
        found: torch.Tensor = file.handle.get_tensor(tensor)
        return found

    return sorted(file.header), get


def read_configs(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """``config.json`` and ``generation_config.json`` of a folder; the second may be absent and is then {}.

    Raises ``CheckpointError`` without the first, or if several files have quantisation settings for it.
    """
    config = read_json(folder, "config.json")
    if config is None:
        raise CheckpointError(f"{folder}: there is no config.json")
    config = with_architecture(config)
    if config.get("quantization_config") is None:
        found = {name: settings for name in METHOD_FILES if (settings := read_json(folder, name)) is not None}
        if len(found) > 1:
            raise CheckpointError(f"{folder}: has both {' and '.join(found)}; keep the one that its weights are of")
        for name, settings in found.items():
            config["quantization_config"] = {"quant_method": METHOD_FILES[name], **settings}
    return config, read_json(folder, "generation_config.json") or {}


def _open_files(folder: Path) -> dict[str, _TensorFile]:
    """Parameter name to the file that contains it."""
    single = find_file(folder, SINGLE_NAME)
    if single is not None:
        file = _open_file(single, folder / SINGLE_NAME)
        return dict.fromkeys(file.header, file)
    weight_map = _read_weight_map(folder)
    files = {}
    for file_name in sorted(set(weight_map.values())):
        path = find_file(folder, file_name)
        if path is None:
            raise CheckpointError(f"{folder / INDEX_NAME}: names the file {file_name!r}, which does not exist")
        files[file_name] = _open_file(path, folder / file_name)
    _check_against_index(folder, weight_map, files)
    return {name: files[file_name] for name, file_name in weight_map.items()}


def _read_weight_map(folder: Path) -> dict[str, str]:
    index = read_json(folder, INDEX_NAME)
    if index is None:
        others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
        hint = f"; found {', '.join(others[:3])}" if others else ""
        raise CheckpointError(
            f"{folder}: neither {SINGLE_NAME} nor {INDEX_NAME} is there{hint}. Weights must be safetensors files, "
            "or a GGUF file given by its own path; .bin and .pt files are read with --load-format pt"
        )
    return parse_weight_map(index, folder / INDEX_NAME)


def parse_weight_map(index: dict[str, Any], shown: Path) -> dict[str, str]:
    """Tensor names to file names, from an index. Raises ``CheckpointError`` starting with ``shown``."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(value, str) for value in weight_map.values()):
        raise CheckpointError(f"{shown}: weight_map must map tensor names to file names")
    return weight_map


def _check_against_index(folder: Path, weight_map: dict[str, str], files: dict[str, _TensorFile]) -> None:
    for name, file_name in weight_map.items():
        if name not in files[file_name].header:
            raise CheckpointError(f"{folder / INDEX_NAME}: tensor {name!r} is not in {file_name!r}, as it says")
    owner: dict[str, str] = {}
    for file_name, file in files.items():
        for name in file.header:
            if name in owner:
                raise CheckpointError(f"{folder}: tensor {name!r} is both in {owner[name]!r} and in {file_name!r}")
            owner[name] = file_name


def _open_file(path: Path, shown: Path) -> _TensorFile:
    """Open the file at ``path``, with links resolved; ``shown`` is its name in the folder, for messages."""
    try:
        header = _read_header(path, shown)
        handle = safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{shown}: not a sound safetensors file: {error}") from error
    return _TensorFile(shown, header, handle)


def _read_header(path: Path, shown: Path) -> dict[str, Any]:
    """Tensor names to ``{"dtype", "shape", ...}``; the library checks offsets and sizes after this."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{shown}: header of {size} bytes, at most {MAX_JSON_BYTES} are allowed")
        header = parse_json(file.read(size), f"{shown}: header")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("shape"), list) or "dtype" not in entry:
            raise CheckpointError(f"{shown}: tensor {name[:100]!r}: has no dtype and shape")
    return header
