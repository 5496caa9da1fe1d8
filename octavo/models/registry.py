"""Decoder architectures by their name in a checkpoint, and their loading."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from octavo.errors import CheckpointError
from octavo.layers.expert_parallel import ParallelMixture
from octavo.layers.linear import Linear
from octavo.layers.lora import AdapterRows
from octavo.models.apertus import ApertusForCausalLM
from octavo.models.arcee import ArceeForCausalLM, NemotronForCausalLM
from octavo.models.cohere import Cohere2ForCausalLM, Cohere2MoeForCausalLM, CohereForCausalLM
from octavo.models.config import ModelConfig, architecture
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.deepseek import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM
from octavo.models.encoder import EncoderConfig
from octavo.models.encoders import ENCODERS, encoder_family
from octavo.models.ernie import Ernie4_5_MoeForCausalLM, Ernie4_5ForCausalLM
from octavo.models.exaone import Exaone4ForCausalLM, ExaoneMoeForCausalLM
from octavo.models.falcon_h1 import FalconH1ForCausalLM
from octavo.models.gemma2 import Gemma2ForCausalLM, GemmaForCausalLM
from octavo.models.gemma3 import Gemma3ForCausalLM
from octavo.models.gemma3n import Gemma3nForCausalLM
from octavo.models.gemma4 import Gemma4ForCausalLM, Gemma4UnifiedForCausalLM
from octavo.models.glm4 import Glm4ForCausalLM, GlmForCausalLM
from octavo.models.glm_moe import (
    Dots1ForCausalLM,
    Glm4MoeForCausalLM,
    Glm4MoeLiteForCausalLM,
    MiniMaxM2ForCausalLM,
)
from octavo.models.gpt2 import GPT2LMHeadModel
from octavo.models.gpt_oss import GptOssForCausalLM
from octavo.models.granite import (
    GraniteForCausalLM,
    GraniteMoeForCausalLM,
    GraniteMoeSharedForCausalLM,
    GraniteSWAForCausalLM,
)
from octavo.models.granite_hybrid import BambaForCausalLM, GraniteMoeHybridForCausalLM
from octavo.models.hunyuan import HunYuanDenseV1ForCausalLM, HunYuanMoEV1ForCausalLM, HYV3ForCausalLM
from octavo.models.in_place import Kept
from octavo.models.kimi_linear import KimiLinearForCausalLM
from octavo.models.labels import LabelHead, LabelPart, read_activation, read_label_names
from octavo.models.lfm2 import Lfm2ForCausalLM, Lfm2MoeForCausalLM
from octavo.models.linear_parts import MapPart
from octavo.models.llama import LlamaForCausalLM
from octavo.models.llama4 import Llama4ForCausalLM
from octavo.models.loader import WeightLoader
from octavo.models.mamba import FalconMambaForCausalLM, MambaForCausalLM
from octavo.models.mamba2 import Mamba2ForCausalLM
from octavo.models.mimo import MiMoV2FlashForCausalLM
from octavo.models.minimax import MiniMaxForCausalLM
from octavo.models.ministral3 import Ministral3ForCausalLM
from octavo.models.mistral import MistralForCausalLM
from octavo.models.mixtral import MixtralForCausalLM
from octavo.models.mtp_names import mtp_prefixes
from octavo.models.multimodal_text import TEXT_PARTS, TextPart, text_config
from octavo.models.nemotron_h import NemotronHForCausalLM
from octavo.models.older import (
    BloomForCausalLM,
    FalconForCausalLM,
    GPTNeoXForCausalLM,
    MptForCausalLM,
    OPTForCausalLM,
    PhiForCausalLM,
    StableLmForCausalLM,
    Starcoder2ForCausalLM,
)
from octavo.models.olmo import Olmo3ForCausalLM, OlmoeForCausalLM, OlmoForCausalLM
from octavo.models.olmo2 import Olmo2ForCausalLM
from octavo.models.olmo_hybrid import OlmoHybridForCausalLM
from octavo.models.parts import DecoderConfig
from octavo.models.phi3 import Phi3ForCausalLM
from octavo.models.phimoe import PhimoeForCausalLM
from octavo.models.qwen2 import Qwen2ForCausalLM
from octavo.models.qwen3 import Qwen3ForCausalLM
from octavo.models.qwen3_5 import Qwen3p5ForCausalLM, Qwen3p5MoeForCausalLM
from octavo.models.qwen3_next import Qwen3NextForCausalLM
from octavo.models.qwen_moe import Qwen2MoeForCausalLM, Qwen3MoeForCausalLM
from octavo.models.seed_oss import SeedOssForCausalLM
from octavo.models.smollm3 import SmolLM3ForCausalLM
from octavo.ops.attention import KVScales, LayerCache, PagedRows
from octavo.ops.collective import SINGLE_RANK, Collective
from octavo.quant.methods import read_method
from octavo.quant.stored.shard import Shard
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.quant.tensors import TensorSource


class CausalLM(Protocol):
    """The model interface of the runtime. ``LlamaForCausalLM`` documents the methods."""

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, caches: Sequence[LayerCache], rows: PagedRows
    ) -> Tensor: ...

    def logits(self, x_RD: Tensor) -> Tensor: ...

    def norm(self, x_TD: Tensor, /) -> Tensor: ...


class ModelFamily(Protocol):
    """A model's class: it reads its configuration, and is constructed from that and the weights."""

    def read_config(self, keys: ConfigKeys, max_len: int | None) -> Any:
        """A subclass of ``ModelConfig``."""

    def __call__(self, config: Any, weights: WeightLoader) -> CausalLM: ...


ARCHITECTURES: dict[str, ModelFamily] = {
    "ApertusForCausalLM": ApertusForCausalLM,
    "ArceeForCausalLM": ArceeForCausalLM,
    "BambaForCausalLM": BambaForCausalLM,
    "BloomForCausalLM": BloomForCausalLM,
    "Cohere2ForCausalLM": Cohere2ForCausalLM,
    "Cohere2MoeForCausalLM": Cohere2MoeForCausalLM,
    "CohereForCausalLM": CohereForCausalLM,
    "DeepseekV2ForCausalLM": DeepseekV2ForCausalLM,
    "DeepseekV3ForCausalLM": DeepseekV3ForCausalLM,
    "Dots1ForCausalLM": Dots1ForCausalLM,
    "Ernie4_5_MoeForCausalLM": Ernie4_5_MoeForCausalLM,
    "Ernie4_5ForCausalLM": Ernie4_5ForCausalLM,
    "Exaone4ForCausalLM": Exaone4ForCausalLM,
    "ExaoneMoeForCausalLM": ExaoneMoeForCausalLM,
    "FalconForCausalLM": FalconForCausalLM,
    "FalconH1ForCausalLM": FalconH1ForCausalLM,
    "FalconMambaForCausalLM": FalconMambaForCausalLM,
    "Gemma2ForCausalLM": Gemma2ForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "Gemma3nForCausalLM": Gemma3nForCausalLM,
    "Gemma4ForCausalLM": Gemma4ForCausalLM,
    "Gemma4UnifiedForCausalLM": Gemma4UnifiedForCausalLM,
    "GemmaForCausalLM": GemmaForCausalLM,
    "Glm4ForCausalLM": Glm4ForCausalLM,
    "Glm4MoeForCausalLM": Glm4MoeForCausalLM,
    "Glm4MoeLiteForCausalLM": Glm4MoeLiteForCausalLM,
    "GlmForCausalLM": GlmForCausalLM,
    "GPT2LMHeadModel": GPT2LMHeadModel,
    "GPTNeoXForCausalLM": GPTNeoXForCausalLM,
    "GptOssForCausalLM": GptOssForCausalLM,
    "GraniteForCausalLM": GraniteForCausalLM,
    "GraniteMoeForCausalLM": GraniteMoeForCausalLM,
    "GraniteMoeHybridForCausalLM": GraniteMoeHybridForCausalLM,
    "GraniteMoeSharedForCausalLM": GraniteMoeSharedForCausalLM,
    "GraniteSWAForCausalLM": GraniteSWAForCausalLM,
    "HunYuanDenseV1ForCausalLM": HunYuanDenseV1ForCausalLM,
    "HunYuanMoEV1ForCausalLM": HunYuanMoEV1ForCausalLM,
    "HYV3ForCausalLM": HYV3ForCausalLM,
    "KimiLinearForCausalLM": KimiLinearForCausalLM,
    "Lfm2ForCausalLM": Lfm2ForCausalLM,
    "Lfm2MoeForCausalLM": Lfm2MoeForCausalLM,
    "Llama4ForCausalLM": Llama4ForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "Mamba2ForCausalLM": Mamba2ForCausalLM,
    "MambaForCausalLM": MambaForCausalLM,
    "MiMoV2FlashForCausalLM": MiMoV2FlashForCausalLM,
    "MiniMaxForCausalLM": MiniMaxForCausalLM,
    "MiniMaxM1ForCausalLM": MiniMaxForCausalLM,
    "MiniMaxM2ForCausalLM": MiniMaxM2ForCausalLM,
    "MiniMaxText01ForCausalLM": MiniMaxForCausalLM,
    "Ministral3ForCausalLM": Ministral3ForCausalLM,
    "MinistralForCausalLM": MistralForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "MixtralForCausalLM": MixtralForCausalLM,
    "MPTForCausalLM": MptForCausalLM,
    "MptForCausalLM": MptForCausalLM,
    "NemotronForCausalLM": NemotronForCausalLM,
    "NemotronHForCausalLM": NemotronHForCausalLM,
    "Olmo2ForCausalLM": Olmo2ForCausalLM,
    "Olmo3ForCausalLM": Olmo3ForCausalLM,
    "OlmoHybridForCausalLM": OlmoHybridForCausalLM,
    "OlmoeForCausalLM": OlmoeForCausalLM,
    "OlmoForCausalLM": OlmoForCausalLM,
    "OPTForCausalLM": OPTForCausalLM,
    "Phi3ForCausalLM": Phi3ForCausalLM,
    "PhiForCausalLM": PhiForCausalLM,
    "PhimoeForCausalLM": PhimoeForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen2MoeForCausalLM": Qwen2MoeForCausalLM,
    "Qwen3_5ForCausalLM": Qwen3p5ForCausalLM,
    "Qwen3_5MoeForCausalLM": Qwen3p5MoeForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
    "Qwen3NextForCausalLM": Qwen3NextForCausalLM,
    "SeedOssForCausalLM": SeedOssForCausalLM,
    "SmolLM3ForCausalLM": SmolLM3ForCausalLM,
    "StableLmForCausalLM": StableLmForCausalLM,
    "Starcoder2ForCausalLM": Starcoder2ForCausalLM,
}


CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
HEADLESS = ("Model",)
"""Ends of the names of classes without logits of tokens; before them is the family's name."""
ROOTS = {
    "Bloom": "transformer.",
    "Falcon": "transformer.",
    "GPT2": "",
    "GPTNeoX": "gpt_neox.",
    "FalconMamba": "backbone.",
    "Mamba": "backbone.",
    "Mamba2": "backbone.",
    "Mpt": "transformer.",
    "NemotronH": "backbone.",
}
"""What precedes all names in a checkpoint with a head, and in none without, of families where that is not "model."."""
OLDER_CLASSIFIERS = ("Bloom", "Falcon", "GPT2", "GPTNeoX", "Mpt")
"""Families whose classifiers of tokens have another name for their map than the others."""

ENTRY_POINTS = "octavo.models"
"""Entry points of other packages: the name of an architecture, and its ``ModelFamily``."""


class LoadedModel(NamedTuple):
    """A model with its loaded weights."""

    model: CausalLM
    num_parameters: int
    bytes_by_format: Mapping[str, int]
    """Bytes of the weights, by the format of their numbers."""
    maps: Mapping[str, MapPart]
    """Its linear maps, by their names in the checkpoint."""
    kv_scales: Mapping[int, KVScales] = MappingProxyType({})
    """Scales of layers whose keys and values have any, for an FP8 cache."""
    kept: Kept | None = None
    """What was loaded, to write other weights over it."""
    labels: LabelHead | None = None
    """The classification head, if the checkpoint has one."""
    mixtures: Sequence[ParallelMixture] = ()
    """The mixtures of which this device holds whole experts."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(self.bytes_by_format.values())


def read_config(values: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """The configuration described by the keys of a ``config.json``.

    ``max_len`` is the longest context that will be used, if known. Every key that would change what is computed is
    either supported or refused with a ``CheckpointError`` naming it.
    """
    keys = ConfigKeys(text_config(values))
    name = architecture(keys)
    family = encoder_family(name, keys.values) or _family(name)
    method = read_method(keys.get("quantization_config"))
    config: ModelConfig = family.read_config(keys, max_len)
    if (purpose := _purpose(name)) is not None and not isinstance(config, EncoderConfig):
        labels = _labels(keys, *purpose) if purpose[1] in CLASSIFIERS else None
        config = dataclasses.replace(config, has_head=False, labels=labels)
        if labels is None or labels.tokens is None:
            config = dataclasses.replace(config, tie_word_embeddings=True)
            if isinstance(config, DecoderConfig):
                config = dataclasses.replace(config, has_head_bias=False)
    keys.finish()
    return dataclasses.replace(config, quantization=method)


def _purpose(name: str) -> tuple[str, str] | None:
    """The family of a class without logits of tokens, and what its name says of its purpose; ``None`` for others."""
    for kind in (*CLASSIFIERS, *HEADLESS):
        if name.endswith(kind) and name not in ARCHITECTURES and name not in ENCODERS:
            return name.removesuffix(kind).removesuffix("Text"), kind
    return None


def _labels(keys: ConfigKeys, family: str, kind: str) -> LabelPart:
    """The head of a decoder that classifies texts or tokens: a linear map of the last vectors, or the logits of two
    tokens such as "no" and "yes", of which ``classifier_from_token`` has the ids (as Qwen3-Reranker is meant)."""
    keys.must_be({"is_original_qwen3_reranker": (True, False)})
    if (tokens := keys.get("classifier_from_token")) is not None:
        vocab_size = keys.size("vocab_size")
        is_pair = isinstance(tokens, list | tuple) and len(tokens) == 2
        if not is_pair or not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
            raise wrong("classifier_from_token", tokens, f"two tokens, or their ids from 0 to {vocab_size - 1}")
        return LabelPart(names=("LABEL_0",), activation="sigmoid", of="last", tokens=(tokens[0], tokens[1]))
    names = read_label_names(keys)
    activation = read_activation(keys, len(names))
    if kind == "ForSequenceClassification":
        return LabelPart(names=names, activation=activation, of="last", out="score", out_has_bias=False)
    out = "classifier" if family in OLDER_CLASSIFIERS else "score"
    return LabelPart(names=names, activation=activation, of="each", out=out)


def load_model(
    config: ModelConfig,
    source: TensorSource,
    form: WeightFormat,
    adapter_rows: AdapterRows | None = None,
    collective: Collective = SINGLE_RANK,
    kept: Kept | None = None,
) -> LoadedModel:
    """Build the model and load its weights; raises ``CheckpointError`` if they do not match the configuration.

    With ``adapter_rows``, adapters can be loaded later. Of a model on several devices, the part of the collective's
    rank is loaded. ``kept``: see ``WeightLoader``.
    """
    make_linear = Linear if adapter_rows is None else adapter_rows.make_linear
    shard = Shard(collective.rank, collective.size)
    purpose = None if config.has_head else _purpose(config.architecture)
    part = TextPart(source, None if purpose is None else ROOTS.get(purpose[0], "model."))
    weights = WeightLoader(
        part,
        form,
        make_linear,
        method=config.quantization,
        shard=shard,
        collective=collective,
        aliases=part.aliases,
        kept=kept,
    )
    model = _family(config.architecture)(config, weights)
    for prefix in mtp_prefixes(weights.tensors.names, config.num_layers):
        weights.tensors.leave_out(prefix)  # drafters load them
    labels = (
        None
        if config.labels is None
        else weights.labels(config.labels, config.hidden_size, vocab_size=config.vocab_size)
    )
    if not config.has_head:
        weights.tensors.leave_out("lm_head.")
    kv_scales = weights.cache_scales(config.cache)
    weights.tensors.finish()
    return LoadedModel(
        model,
        num_parameters=weights.num_parameters,
        bytes_by_format=weights.bytes_by_format,
        maps=weights.maps,
        kv_scales=kv_scales,
        kept=weights.kept,
        labels=labels,
        mixtures=weights.mixtures,
    )


def _family(name: str) -> ModelFamily:
    """The family of an architecture: one of these, or one that an installed package names by an entry point."""
    purpose = None if name in ARCHITECTURES else _purpose(name)
    for end in ("ForCausalLM", "LMHeadModel"):
        if purpose is not None and (own := ARCHITECTURES.get(purpose[0] + end)) is not None:
            return own
    if name not in ARCHITECTURES:
        for entry in entry_points(group=ENTRY_POINTS, name=name):
            found: ModelFamily = entry.load()
            return found
        known = ", ".join([*ARCHITECTURES, *TEXT_PARTS, *ENCODERS])
        raise CheckpointError(
            f"config: architecture {name} is not supported; supported are {known}; others, more slowly, with backend "
            "transformers"
        )
    return ARCHITECTURES[name]
