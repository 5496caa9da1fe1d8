"""PyTorch checkpoints: a folder with ``config.json`` and ``pytorch_model.bin``, its shards, or one ``.pt`` file.

They are pickles. ``torch.load(weights_only=True)`` builds tensors and plain containers and refuses everything else, so
that no code of the file runs. Its unpickler has had holes, which is why these files are read only when
``load_format`` is ``pt``.
"""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from octavo.errors import CheckpointError, failures_as, first_line_of
from octavo.weights.folder import find_file, read_json
from octavo.weights.safetensors import DTYPE_NAMES, DTYPES, parse_weight_map, read_configs

logger = logging.getLogger(__name__)

SINGLE_NAME = "pytorch_model.bin"
INDEX_NAME = "pytorch_model.bin.index.json"
SUFFIXES = (".bin", ".pt", ".pth")
NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.bin", "scheduler.pt", "rng_state.pth")
"""Files that trainers write next to the weights."""
CONTAINERS = ("state_dict", "model_state_dict", "model")
"""Keys of training checkpoints under which the weights are."""
WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that data-parallel training and torch.compile give to every name."""


class PytorchFile:
    """One PyTorch file. The tensors are mapped into memory where the file allows it.

    Opening it reads it: raises ``CheckpointError`` if it is missing or is no dictionary of tensors.
    """

    is_dummy = False
    has_blocks = False

    def __init__(self, path: Path) -> None:
        self.path, self._tensors = path, _read(path.parent, path.name)

    def names(self) -> set[str]:
        """Names of all parameters in the checkpoint."""
        return set(self._tensors)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The type and shape of an existing parameter."""
        tensor = self._tensors[name]
        return _type(tensor), tuple(tensor.shape)

    def load(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The parameter ``name`` as stored; it must have this shape."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.path}: there is no tensor {name!r}; expected one of shape {shape}")
        what = f"{self.path}: tensor {name!r}"
        if _type(tensor) not in DTYPES:
            raise CheckpointError(f"{what}: has dtype {_type(tensor)}, supported are {', '.join(DTYPES)}")
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{what}: has shape {tuple(tensor.shape)}, expected {shape}")
        return tensor.contiguous()


class PytorchCheckpoint(PytorchFile):
    """A folder of PyTorch files, all of which opening it reads."""

    def __init__(self, folder: Path, config_folder: Path | None = None) -> None:
        """``config_folder`` has the configuration, if that is another folder."""
        self.path = folder
        self.config, self.generation_config = read_configs(config_folder or folder)
        self._tensors = {}
        for name in _file_names(folder):
            self._tensors.update(_read(folder, name))


def _type(tensor: torch.Tensor) -> str:
    return DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))


def _file_names(folder: Path) -> list[str]:
    """The files of the weights."""
    if find_file(folder, SINGLE_NAME) is not None:
        return [SINGLE_NAME]
    index = read_json(folder, INDEX_NAME)
    if index is not None:
        return sorted(set(parse_weight_map(index, folder / INDEX_NAME).values()))
    found = sorted(path.name for path in folder.iterdir() if path.suffix in SUFFIXES and path.name not in NOT_WEIGHTS)
    if len(found) != 1:
        said = f"found {', '.join(found[:5])}" if found else "found none"
        raise CheckpointError(
            f"{folder}: load format pt needs {SINGLE_NAME}, {INDEX_NAME}, or one file that ends with "
            f"{' or '.join(SUFFIXES)}; {said}"
        )
    return found


def _read(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """The tensors of one file by name, without wrappers of training; what was left out or renamed is logged,
    and each tensor at level debug."""
    shown = folder / name
    path = find_file(folder, name)
    if path is None:
        raise CheckpointError(f"{shown}: does not exist")
    what = f"{shown}: not a PyTorch file of tensors alone"
    with failures_as(lambda error: CheckpointError(f"{what}: {first_line_of(error)[:200]}")):
        content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    container = next(
        (key for key in CONTAINERS if isinstance(content, dict) and isinstance(content.get(key), dict)), ""
    )
    values = content[container] if container else content
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise CheckpointError(f"{shown}: holds no dictionary of tensors by name, but a {type(values).__name__}")
    tensors = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
    for key, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise CheckpointError(f"{shown}: tensor {key[:100]!r} is not a plain dense tensor")
    wrapper = "".join(_wrappers(list(tensors)))
    left_out = [*(set(content) - {container} if container else ()), *(set(values) - set(tensors))]
    logger.info(
        "%s: %d tensors%s%s%s",
        name,
        len(tensors),
        f" in {container!r}" if container else "",
        f"; prefix {wrapper!r} removed" if wrapper else "",
        f"; left out: {', '.join(sorted(map(str, left_out))[:8])}" if left_out else "",
    )
    for key, tensor in tensors.items():
        logger.debug("%s: %s, %s %s, as %s", name, key, _type(tensor), list(tensor.shape), key.removeprefix(wrapper))
    return {key.removeprefix(wrapper): tensor.detach() for key, tensor in tensors.items()}


def _wrappers(names: list[str]) -> Iterator[str]:
    """The prefixes of ``WRAPPERS`` that all names have, in order."""
    while names and (found := next((one for one in WRAPPERS if all(name.startswith(one) for name in names)), "")):
        names = [name.removeprefix(found) for name in names]
        yield found
