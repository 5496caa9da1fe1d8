"""Encoder architectures by their name in a checkpoint, and their loading."""

from __future__ import annotations

from typing import NamedTuple

from octavo.models.bert import BertModel, EncoderConfig
from octavo.models.loader import WeightLoader
from octavo.models.roberta import RobertaModel
from octavo.quant.stored import WeightFormat
from octavo.quant.tensors import Source

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


class LoadedEncoder(NamedTuple):
    """An encoder with its loaded weights."""

    model: BertModel
    num_parameters: int
    num_bytes: int
    """Bytes of the weights."""


def load_encoder(config: EncoderConfig, source: Source, form: WeightFormat) -> LoadedEncoder:
    """Build the model and load its weights; raises ``CheckpointError`` if they do not match the configuration."""
    weights = WeightLoader(source, form, method=config.quantization)
    model = ENCODERS[config.architecture](config, weights)
    weights.tensors.finish()
    return LoadedEncoder(model, weights.num_parameters, weights.num_bytes)
