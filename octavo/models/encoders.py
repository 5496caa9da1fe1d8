"""Encoder architectures by their name in a checkpoint, and their loading."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from octavo.models.bert import BertModel, EncoderConfig
from octavo.models.loader import WeightLoader
from octavo.models.roberta import RobertaModel
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.quant.tensors import Renamed, TensorSource

ENCODERS: dict[str, type[BertModel]] = {
    "BertForMaskedLM": BertModel,
    "BertForSequenceClassification": BertModel,
    "BertModel": BertModel,
    "RobertaForMaskedLM": RobertaModel,
    "RobertaForSequenceClassification": RobertaModel,
    "RobertaModel": RobertaModel,
    "XLMRobertaForSequenceClassification": RobertaModel,
    "XLMRobertaModel": RobertaModel,
}

OLDER = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""Ends of names in checkpoints that were converted from TensorFlow, and the ends that others have."""


class LoadedEncoder(NamedTuple):
    """An encoder with its loaded weights."""

    model: BertModel
    num_parameters: int
    bytes_by_format: Mapping[str, int]
    """Bytes of the weights, by the format of their numbers."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(self.bytes_by_format.values())


def load_encoder(config: EncoderConfig, source: TensorSource, form: WeightFormat) -> LoadedEncoder:
    """Build the model and load its weights; raises ``CheckpointError`` if they do not match the configuration."""
    weights = WeightLoader(Renamed(source, _stored(source.names())), form, method=config.quantization)
    model = ENCODERS[config.architecture](config, weights)
    weights.tensors.finish()
    return LoadedEncoder(model, weights.num_parameters, weights.bytes_by_format)


def _stored(names: Collection[str]) -> dict[str, str]:
    """The name in the checkpoint of each name."""
    stored = {name: name for name in names}
    for older, own in OLDER.items():
        for name in names:
            if name.endswith(older) and (renamed := name.removesuffix(older) + own) not in names:
                stored[renamed] = stored.pop(name)
    return stored
