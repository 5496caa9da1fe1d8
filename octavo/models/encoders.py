"""Encoder architectures by their name in a checkpoint, and their loading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from octavo.layers.linear import Linear
from octavo.layers.lora import AdapterRows
from octavo.models.bert import BertModel, DistilBertModel, ElectraModel, MPNetModel, RobertaModel
from octavo.models.deberta import DebertaV2Model
from octavo.models.embedding_gemma import EmbeddingGemma
from octavo.models.encoder import Encoder, EncoderConfig
from octavo.models.linear_parts import MapPart
from octavo.models.loader import WeightLoader
from octavo.models.modernbert import EuroBertModel, ModernBertModel
from octavo.models.nomic_bert import GteModel, NomicBertModel
from octavo.models.t5 import T5EncoderModel
from octavo.ops.dispatch import REFERENCE
from octavo.ops.linear.sliced_linear import SlicedValues, sliced_linear
from octavo.quant.checkpoint_tensors import HeadCopy, Renamed, TensorSource
from octavo.quant.stored.stored_weight import DenseWeight, LinearWeight, PackedWeight, WeightFormat

FAMILIES: dict[str, type[Encoder]] = {
    "Bert": BertModel,
    "Camembert": RobertaModel,
    "DebertaV2": DebertaV2Model,
    "DistilBert": DistilBertModel,
    "Electra": ElectraModel,
    "EuroBert": EuroBertModel,
    "Gte": GteModel,
    "MPNet": MPNetModel,
    "ModernBert": ModernBertModel,
    "NomicBert": NomicBertModel,
    "Roberta": RobertaModel,
    "XLMRoberta": RobertaModel,
}
"""Families that have all classes of ``CLASSES``, by the beginning of their names."""
CLASSES = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
ENCODERS: dict[str, type[Encoder]] = {
    **{f"{family}{name}": model for family, model in FAMILIES.items() for name in CLASSES},
    "BgeM3EmbeddingModel": RobertaModel,
    "ElectraForPreTraining": ElectraModel,
    "T5EncoderModel": T5EncoderModel,
}
BIDIRECTIONAL: dict[str, type[Encoder]] = {"Gemma3TextModel": EmbeddingGemma}
"""Decoders that ``use_bidirectional_attention`` makes encoders."""

OLDER = {
    "LayerNorm.gamma": "LayerNorm.weight",
    "LayerNorm.beta": "LayerNorm.bias",
    "cls.predictions.bias": "cls.predictions.decoder.bias",
    "lm_head.bias": "lm_head.decoder.bias",
}
"""Ends of names in checkpoints that were converted from TensorFlow, or have a tensor under two names, and the ends that
others have."""


def encoder_family(name: str, values: Mapping[str, Any]) -> type[Encoder] | None:
    """The family of an architecture with this configuration; ``None`` if it is no encoder."""
    if values.get("use_bidirectional_attention") is True and name in BIDIRECTIONAL:
        return BIDIRECTIONAL[name]
    return ENCODERS.get(name)


class LoadedEncoder(NamedTuple):
    """An encoder with its loaded weights."""

    model: Encoder
    num_parameters: int
    bytes_by_format: Mapping[str, int]
    """Bytes of the weights, by the format of their numbers."""
    maps: Mapping[str, MapPart]
    """The linear maps, by their names with and without what precedes those of a checkpoint with a head."""
    copy: HeadCopy | None
    """See ``WeightLoader``."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(self.bytes_by_format.values())


def load_encoder(
    config: EncoderConfig, source: TensorSource, form: WeightFormat, rows: AdapterRows | None = None
) -> LoadedEncoder:
    """Build the model and load its weights, with room for adapters of these rows; raises ``CheckpointError`` if they do
    not match the configuration."""
    make_linear = Linear if rows is None else rows.make_linear
    renamed = Renamed(source, _stored(source.names()))
    weights = WeightLoader(renamed, form, make_linear, method=config.quantization)
    model = {**ENCODERS, **BIDIRECTIONAL}[config.architecture](config, weights)
    weights.tensors.finish()
    heads = [] if model.vocabulary is None else [model.vocabulary.out]
    sizes = Counter(weights.bytes_by_format)
    for linear in {*heads, *(part.linear for part in weights.maps.values())}:
        for i, weight in enumerate(linear.weights):
            linear.weights[i] = _of_encoder(weight)
            if linear.weights[i] is not weight:
                sizes[linear.weights[i].format] += linear.weights[i].num_bytes
                sizes[weight.format] -= 0 if weight is model.embedding.weight else weight.num_bytes
    root = config.root
    maps = {root + name.removeprefix(root): part for name, part in weights.maps.items()} | weights.maps
    maps |= {name.removeprefix(root): part for name, part in weights.maps.items()}
    return LoadedEncoder(model, weights.num_parameters, sizes, maps, weights.copy)


MOST_SLICED = (2**31 - 1) // (3 * 127 * 127)
"""Inputs of which sums of three products of bytes fit 32 bits: all but those of the largest T5."""


def _of_encoder(weight: LinearWeight) -> LinearWeight:
    """The weight as slices where a kernel multiplies these."""
    if type(weight) is not DenseWeight:
        return weight
    dtype = weight.dtype or weight.weight_NK.dtype
    has_kernel = sliced_linear.chosen(weight.weight_NK.device.type, dtype) != REFERENCE
    if not has_kernel or weight.weight_NK.shape[1] > MOST_SLICED:
        return weight
    return SlicedWeight(SlicedValues.pack(weight.weight_NK), dtype)


class SlicedWeight(PackedWeight[SlicedValues]):
    """A weight for ``ops.sliced_linear``."""

    product = sliced_linear


def _stored(names: Collection[str]) -> dict[str, str]:
    """The name in the checkpoint of each name."""
    stored = {name: name for name in names}
    for older, own in OLDER.items():
        for name in names:
            if name.endswith(older) and (renamed := name.removesuffix(older) + own) not in names:
                stored[renamed] = stored.pop(name)
    return stored
