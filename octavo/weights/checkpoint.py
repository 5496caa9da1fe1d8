"""The checkpoint interface of the engine, and the function that opens one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from octavo.errors import CheckpointError
from octavo.weights.dummy import DummyCheckpoint
from octavo.weights.gguf.block_formats import BlockTensor
from octavo.weights.gguf.gguf_checkpoint import GGUFCheckpoint
from octavo.weights.gguf.split_files import parts_of
from octavo.weights.pytorch import PytorchCheckpoint
from octavo.weights.safetensors import SafetensorsCheckpoint, read_configs


class Checkpoint(Protocol):
    """Named weights with their model's configuration, independent of the file format."""

    @property
    def config(self) -> dict[str, Any]:
        """The keys of Hugging Face's ``config.json``; for GGUF, translated from the metadata."""

    @property
    def generation_config(self) -> dict[str, Any]:
        """The keys of ``generation_config.json``, such as ``eos_token_id``; {} if there is none."""

    @property
    def is_dummy(self) -> bool:
        """Whether weights are random, available under any name and shape; ``names()`` is then empty."""

    @property
    def has_blocks(self) -> bool:
        """Whether some weights are block-quantised, so that ``load`` may return a ``BlockTensor``."""

    def names(self) -> set[str]:
        """Parameter names as in Hugging Face checkpoints, such as ``model.layers.0.self_attn.q_proj.weight``.

        A head tied to the embedding has no ``lm_head.weight``.
        """

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The stored type of a parameter, such as ``BF16`` or ``Q4_K``, and its shape, from headers alone."""

    def load(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | BlockTensor:
        """One parameter of this shape, (outputs, inputs) for a matrix, as stored: in blocks if quantised.

        Raises ``CheckpointError`` with the file, the tensor, the expected and the found shape.
        """


def open_checkpoint(
    path: Path, load_format: str = "auto", seed: int = 0, device: str = "cpu", config_folder: str | None = None
) -> Checkpoint:
    """Open a folder with ``config.json`` and safetensors files, or a GGUF file, of which ``path`` may be a part.

    ``config_folder`` is the folder of the ``config.json`` if that is another one.

    ``load_format`` is ``auto``, ``safetensors``, ``gguf``, ``pt`` or ``dummy``. PyTorch files are read with ``pt``
    alone, and a dummy reads only the configuration from ``path``, and generates random weights on ``device``. Raises
    ``CheckpointError``.
    """
    if not any(part.exists() for part in parts_of(path)):
        raise CheckpointError(f"{path}: does not exist")
    if not path.is_dir() and path.suffix.lower() in (".safetensors", ".bin", ".pt", ".pth"):
        raise CheckpointError(f"{path}: give a GGUF file, or the folder of another checkpoint")
    configs = None if config_folder is None else Path(config_folder).expanduser()
    if load_format == "pt" and path.is_dir():
        return PytorchCheckpoint(path, configs)
    found = "safetensors" if path.is_dir() else "gguf"
    if load_format not in ("auto", "dummy", found):
        raise CheckpointError(f"{path}: is of load format {found}, but {load_format} was asked for")
    if load_format == "dummy" and found == "safetensors":
        return DummyCheckpoint(*read_configs(configs or path), seed, device)
    if found == "safetensors":
        return SafetensorsCheckpoint(path, configs)
    if configs is not None:
        raise CheckpointError(f"{path}: is a GGUF file, for which hf_config_path has no effect; leave it out")
    checkpoint = GGUFCheckpoint(path)
    if load_format == "dummy":
        return DummyCheckpoint(checkpoint.config, checkpoint.generation_config, seed, device)
    return checkpoint
