"""Builds a model on the "meta" device: validates a checkpoint and computes its memory from headers alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from octavo.errors import CheckpointError
from octavo.models.encoder import EncoderConfig
from octavo.models.encoders import LoadedEncoder, load_encoder
from octavo.models.layer_cache import PipelineStage
from octavo.models.linear_parts import MapPart
from octavo.models.model_config import ModelConfig
from octavo.models.registry import LoadedModel, load_model
from octavo.ops.collective import SingleRank
from octavo.quant.checkpoint_tensors import Part, TensorSource
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.weights.gguf.block_formats import BLOCK_KINDS
from octavo.weights.gguf.gguf_checkpoint import GGUFCheckpoint, can_be
from octavo.weights.safetensors import DTYPES


class Outline:
    """A checkpoint whose tensors have names, types and shapes but no content."""

    def __init__(self, checkpoint: TensorSource) -> None:
        self._checkpoint = checkpoint

    @property
    def is_dummy(self) -> bool:
        return self._checkpoint.is_dummy

    def names(self) -> set[str]:
        return self._checkpoint.names()

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        return self._checkpoint.describe(name)

    def load(self, name: str, shape: tuple[int, ...]) -> Part:
        """A tensor on the "meta" device. Quantised blocks count as dense; their size is that of the file."""
        if self.is_dummy:
            return torch.empty(shape, device="meta")
        kind, found = self._checkpoint.describe(name)
        if found != shape and not (isinstance(self._checkpoint, GGUFCheckpoint) and can_be(found, shape)):
            raise CheckpointError(f"tensor {name} has shape {list(found)}; expected {list(shape)}")
        if kind not in DTYPES and kind not in BLOCK_KINDS:
            raise CheckpointError(f"tensor {name} has dtype {kind}; supported are {', '.join(DTYPES)}")
        return torch.empty(shape, dtype=DTYPES.get(kind, torch.float32), device="meta")


class FirstOf(SingleRank):
    """The first of several ranks, for loading without computing."""

    def __init__(self, size: int) -> None:
        self.size = size


def outlined(form: WeightFormat) -> WeightFormat:
    """The format of weights without content that stand for those on the format's device."""
    return dataclasses.replace(form, device=torch.device("meta"), outlined_for=form.device.type)


def outline(
    config: ModelConfig, checkpoint: TensorSource, form: WeightFormat, num_ranks: int = 1
) -> LoadedModel | LoadedEncoder:
    """The model with "meta" weights that are packed as those on the format's device are, or what the first rank holds
    of it.

    Raises ``CheckpointError`` as loading would, but for what ``check_copy`` finds.
    """
    form = outlined(form)
    if isinstance(config, EncoderConfig):
        return load_encoder(config, Outline(checkpoint), form)
    return load_model(config, Outline(checkpoint), form, collective=FirstOf(num_ranks))


def largest_stage(
    config: ModelConfig, checkpoint: TensorSource, form: WeightFormat, num_ranks: int, num_stages: int
) -> LoadedModel:
    """The outline of the stage that takes most memory, on the first of its ranks."""
    stages = [dataclasses.replace(config, stage=PipelineStage(number, num_stages)) for number in range(num_stages)]
    found = [outline(own, checkpoint, form, num_ranks) for own in stages]
    return max((own for own in found if isinstance(own, LoadedModel)), key=lambda own: own.num_bytes)


def outlined_maps(
    config: ModelConfig, checkpoint: TensorSource, form: WeightFormat, num_ranks: int = 1
) -> Mapping[str, MapPart]:
    """The linear maps of the outline of a model that generates text."""
    loaded = outline(config, checkpoint, form, num_ranks)
    assert isinstance(loaded, LoadedModel)
    return loaded.maps
