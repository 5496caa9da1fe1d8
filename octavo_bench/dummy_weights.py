"""Random weights of a shape as a checkpoint, so that two engines can serve the same.

With ``--load-format dummy`` each engine makes its own. A mixture's router then may send tokens to few experts in one
engine and to all of them in the other, which read unlike amounts of memory in a step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file

from octavo.models.outline import Outline
from octavo.models.registry import load_model, read_config
from octavo.quant.stored import WeightFormat
from octavo.quant.tensors import Part
from octavo.weights.dummy import DummyCheckpoint
from octavo.weights.safetensors import read_configs

SHARD_BYTES = 4 << 30


class Asked(Outline):
    """Notes the shapes of the tensors that a model asks for."""

    def __init__(self, checkpoint: DummyCheckpoint) -> None:
        super().__init__(checkpoint, leave_out=frozenset())
        self.shapes: dict[str, tuple[int, ...]] = {}

    def load(self, name: str, shape: tuple[int, ...]) -> Part:
        self.shapes[name] = shape
        return super().load(name, shape)


def write_weights(folder: Path, seed: int = 0) -> int:
    """Write the weights of the model whose ``config.json`` is in ``folder`` there; returns their bytes.

    They are those that ``--load-format dummy`` makes with this seed. Raises ``CheckpointError`` for a configuration
    that is not supported.
    """
    checkpoint = DummyCheckpoint(*read_configs(folder), seed)
    asked = Asked(checkpoint)
    load_model(read_config(checkpoint.config), asked, WeightFormat(torch.float32, torch.device("meta")))
    total, where = 0, dict[str, str]()
    for number, shard in enumerate(_shards(checkpoint, asked.shapes)):
        name = f"model-{number:05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, name)
        total += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return total


def _shards(checkpoint: DummyCheckpoint, shapes: dict[str, tuple[int, ...]]) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors in parts of ``SHARD_BYTES``, or a little more."""
    shard, size = dict[str, torch.Tensor](), 0
    for name, shape in track(shapes.items(), "tensors", console=Console(stderr=True), transient=True):
        shard[name] = checkpoint.load(name, shape)
        size += shard[name].nbytes
        if size >= SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard
