"""Random weights of a shape as a checkpoint, so that two engines can serve the same.

With ``--load-format dummy`` each engine makes its own. A mixture's router then may send tokens to few experts in one
engine and to all of them in the other, which read unlike amounts of memory in a step.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file

from octavo.errors import CheckpointError
from octavo.models.meta_model import Outline
from octavo.models.registry import load_model, read_config
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.quant.tensors import Part
from octavo.weights.dummy import DummyCheckpoint
from octavo.weights.safetensors import read_configs

SHARD_BYTES = 4 << 30
EXPONENT = 127 - 7
"""Of all blocks: random codes of FP4 have a standard deviation of 2.9, times 2 ** -7 that is 0.023."""


class ShapeRecorder(Outline):
    """Notes the shapes of the tensors that a model asks for."""

    def __init__(self, checkpoint: DummyCheckpoint) -> None:
        super().__init__(checkpoint, leave_out=frozenset())
        self.shapes: dict[str, tuple[int, ...]] = {}

    def load(self, name: str, shape: tuple[int, ...]) -> Part:
        self.shapes[name] = shape
        return super().load(name, shape)


def write_weights(folder: Path, seed: int = 0) -> int:
    """Write the weights of the model whose ``config.json`` is in ``folder`` there; returns their bytes.

    They are those that ``--load-format dummy`` makes with this seed; experts in MXFP4 have random bits instead. Raises
    ``CheckpointError`` for a configuration that is not supported.
    """
    config, others = read_configs(folder)
    quantised = config.pop("quantization_config", {"quant_method": None})["quant_method"]
    if quantised not in (None, "mxfp4"):
        raise CheckpointError(f"quantization_config.quant_method: {quantised!r} is not written, only 'mxfp4'")
    checkpoint = DummyCheckpoint(config, others, seed)
    asked = ShapeRecorder(checkpoint)
    load_model(read_config(config), asked, WeightFormat(torch.float32, torch.device("meta")))
    total, where = 0, dict[str, str]()
    for number, shard in enumerate(_shards(checkpoint, asked.shapes, quantised == "mxfp4")):
        name = f"model-{number:05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, name)
        total += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return total


def _shards(
    checkpoint: DummyCheckpoint, shapes: dict[str, tuple[int, ...]], has_mxfp4: bool
) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors in parts of ``SHARD_BYTES``, or a little more."""
    shard, size = dict[str, torch.Tensor](), 0
    for name, shape in track(shapes.items(), "tensors", console=Console(stderr=True), transient=True):
        is_stack = has_mxfp4 and len(shape) == 3
        own = _mxfp4(name, shape, checkpoint.seed) if is_stack else {name: checkpoint.load(name, shape)}
        shard |= own
        size += sum(tensor.nbytes for tensor in own.values())
        if size >= SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def _mxfp4(name: str, shape: tuple[int, ...], seed: int) -> dict[str, torch.Tensor]:
    """A stack of experts' matrices, which gpt-oss has as [X, inputs, outputs], in MXFP4: of each its rows in blocks of
    32 numbers with an exponent. They are about as large as other random weights."""
    X, K, N = shape
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    blocks = torch.randint(256, (X, N, K // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.full((X, N, K // 32), EXPONENT, dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}
