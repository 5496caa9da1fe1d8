"""Architectures by the name that a checkpoint gives, and how one is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from octavo.errors import CheckpointError
from octavo.models.config import ModelConfig
from octavo.models.llama import LlamaForCausalLM
from octavo.models.loader import Source, WeightLoader
from octavo.models.qwen3 import Qwen3ForCausalLM
from octavo.ops.attention import LayerCache, PagedRows
from octavo.quant.scheme import WeightFormat


class CausalLM(Protocol):
    """What a runner needs of a model. ``LlamaForCausalLM`` documents the methods."""

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, caches: Sequence[LayerCache], rows: PagedRows
    ) -> Tensor: ...

    def logits(self, x_RD: Tensor) -> Tensor: ...


ARCHITECTURES: dict[str, type[LlamaForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}


class LoadedModel(NamedTuple):
    """A model with its weights."""

    model: CausalLM
    num_parameters: int
    num_bytes: int
    """Memory that the weights take."""


def load_model(config: ModelConfig, source: Source, form: WeightFormat) -> LoadedModel:
    """Build the model and load it; raise ``CheckpointError`` for an unknown architecture or unfit weights."""
    if config.architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"config: architecture {config.architecture} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    weights = WeightLoader(source, form)
    model = ARCHITECTURES[config.architecture](config, weights)
    weights.finish()
    return LoadedModel(model, weights.num_parameters, weights.num_bytes)
