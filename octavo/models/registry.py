"""Decoder architectures by their name in a checkpoint, and their loading."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from octavo.errors import CheckpointError
from octavo.layers.expert_parallel import ParallelMixture
from octavo.layers.linear import Linear
from octavo.layers.lora import AdapterRows
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder_layer import DecoderLayer
from octavo.models.encoder import EncoderConfig
from octavo.models.encoders import ENCODERS, encoder_family
from octavo.models.in_place import Kept
from octavo.models.labels import LabelHead, LabelPart, read_activation, read_label_names
from octavo.models.linear_parts import MapPart
from octavo.models.loader import WeightLoader
from octavo.models.model_config import ModelConfig, architecture
from octavo.models.mtp_names import mtp_prefixes
from octavo.models.multimodal_text import TEXT_PARTS, TextPart, text_config
from octavo.models.parts import DecoderConfig
from octavo.ops.attention.attention import KVScales, LayerCache, PagedRows
from octavo.ops.collective import SINGLE_RANK, Collective
from octavo.quant.checkpoint_tensors import HeadCopy, Renamed, TensorSource
from octavo.quant.methods import read_method
from octavo.quant.stored.shard import Shard
from octavo.quant.stored.stored_weight import WeightFormat


class CausalLM(Protocol):
    """The model interface of the runtime. ``Decoder`` documents the methods."""

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        caches: Sequence[LayerCache],
        rows: PagedRows,
        given_TD: Tensor | None = None,
    ) -> Tensor: ...

    def logits(self, x_RD: Tensor) -> Tensor: ...

    def norm(self, x_TD: Tensor, /) -> Tensor: ...


class ModelFamily(Protocol):
    """A model's class: it reads its configuration, and is constructed from that and the weights."""

    def read_config(self, keys: ConfigKeys, max_len: int | None) -> Any:
        """A subclass of ``ModelConfig``."""

    def __call__(self, config: Any, weights: WeightLoader) -> CausalLM: ...


FAMILIES = (
    "afmoe apertus arcee bitnet cohere deepseek deepseek_sparse deepseek_v4 dots3 ernie exaone falcon_h1 gemma2 "
    "gemma3 gemma3n gemma4 glm4 glm5_next glm_moe gpt_oss granite granite_hybrid hunyuan hy_v4 inkling inkling2 jamba "
    "kimi_linear kolibri lfm2 ling llama llama4 longcat mamba mimo minicpm minimax minimax_m3 ministral3 mistral "
    "mistral4 mixtral nemotron_h older olmo olmo2 olmo_hybrid own_code phi3 phimoe qwen2 qwen3 qwen3_5 qwen3_next "
    "qwen4 qwen_moe seed_oss smollm3 step3 zamba2 zaya"
)
"""Files of this folder: their classes have the names of architectures."""
OTHER_NAMES = {
    "BailingMoeForCausalLM": "BailingMoeV2ForCausalLM",
    "ChatGLMForConditionalGeneration": "ChatGLMForCausalLM",
    "ChatGLMModel": "ChatGLMForCausalLM",
    "IQuestCoderForCausalLM": "LlamaForCausalLM",
    "MiniMaxM1ForCausalLM": "MiniMaxForCausalLM",
    "MiniMaxText01ForCausalLM": "MiniMaxForCausalLM",
    "MinistralForCausalLM": "MistralForCausalLM",
    "MPTForCausalLM": "MptForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    "XverseForCausalLM": "LlamaForCausalLM",
}
"""Further architectures, and the classes that they have."""


def _architectures() -> Iterator[tuple[str, ModelFamily]]:
    for module in (import_module(f"octavo.models.{name}") for name in FAMILIES.split()):
        for name, value in vars(module).items():
            if name.endswith(("ForCausalLM", "LMHeadModel")) and value.__module__ == module.__name__:
                yield name, value


ARCHITECTURES = dict(_architectures())
ARCHITECTURES |= {name: ARCHITECTURES[own] for name, own in OTHER_NAMES.items()}


CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
HEADLESS = ("Model",)
"""Ends of the names of classes without logits of tokens; before them is the family's name."""
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
    copy: HeadCopy | None = None
    """See ``WeightLoader``."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(self.bytes_by_format.values())


KV_HEADS = {
    2: "Ernie4_5 Gemma3n Glm Glm4 Qwen3Next Qwen3_5Moe Qwen4Exp Starcoder2 Zaya",
    4: "Ernie4_5_Moe Flint Gemma2 Gemma3 Gemma4 Gemma4Unified GraniteSWA Kolibri1 Lfm3 Mellum MiMoV2Flash MiniMaxM3VL "
    "Qwen3Moe Qwen3_5 SmolLM3 VaultGemma",
    5: "BitNet",
    8: "Bamba Cwm FalconH1 GptOss HYV3 Inkling Inkling2 Jamba Laguna Lfm2 Llama4 MiniMax MiniMaxM2 Ministral "
    "Ministral3 Mistral Mixtral NemotronH Phimoe SeedOss SolarOpen Step3p5",
}
"""``num_key_value_heads``, and the families, of which the other ones have as many as query heads."""
ABSENT: dict[str, dict[str, Any]] = {
    "FalconH1": {"mamba_d_ssm": 1024},
    "GPTJ": {"n_positions": 2048},
    "Gemma4Unified": {"sliding_window": 1024},
    "Glm4MoeLite": {"rms_norm_eps": 1e-5},
    "GraniteMoeHybrid": {"intermediate_size": 11_008},
    "GraniteMoeSWA": {"rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    "Inkling": {"swa_num_attention_heads": 64, "swa_num_key_value_heads": 16, "swa_head_dim": 128},
    "Inkling2": {"swa_num_attention_heads": 48, "swa_num_key_value_heads": 8, "swa_head_dim": 128},
    "Lfm2": {"rope_theta": 1e6},
    "Lfm2Moe": {"rope_theta": 1e6},
    "Llama4": {"intermediate_size_mlp": 16_384},
    "LongcatFlash": {"rms_norm_eps": 1e-5, "rope_theta": 1e7, "routed_scaling_factor": 6.0, "zero_expert_num": 256},
    "MiMoV2Flash": {"moe_intermediate_size": 2048},
    "MiniMax": {"rope_theta": 1e6},
    "Qwen3": {"head_dim": 128},
    "SolarOpen": {"moe_intermediate_size": 1280},
}
"""By family, the values of other keys that a ``config.json`` leaves out: those of the family's class in transformers. A
key that is null is not left out."""


def absent_keys(architecture: str) -> dict[str, Any]:
    """The keys that may be absent for this architecture, with their values."""
    family = architecture.partition("For")[0].removesuffix("Model")
    found = dict(ABSENT.get(family, {}))
    for count, names in KV_HEADS.items():
        if family in names.split():
            found["num_key_value_heads"] = count
    return found


def read_config(values: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """The configuration described by the keys of a ``config.json``.

    ``max_len`` is the longest context that will be used, if known. Every key that would change what is computed is
    either supported or refused with a ``CheckpointError`` naming it.
    """
    given = text_config(values)
    name = architecture(ConfigKeys(given))
    keys = ConfigKeys({**absent_keys(name), **given})
    family = encoder_family(name, keys.values) or _family(name)
    method = read_method(keys.get("quantization_config"))
    config: ModelConfig = family.read_config(keys, max_len)
    if isinstance(config, DecoderConfig) and any(width % 2 for _, width in config.ropes):
        raise wrong("head_dim", config.head_dim, "an even number, as rotary embeddings turn pairs")
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
    family = _family(config.architecture)
    if (own_name := getattr(family, "own_name", None)) is not None:
        source = Renamed(source, {own_name(name): name for name in source.names()})
    part = TextPart(source, None if config.has_head else _root(config))
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
    model = family(config, weights)
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
        copy=weights.copy,
    )


def has_attention_of_rows(config: ModelConfig) -> bool:
    """Whether each layer computes its attention apart from what follows, and caches nothing but keys and values: so
    that it can be computed of some rows of a step."""
    layer: Any = getattr(_family(config.architecture), "layer_class", None)
    has_states = any(spec.kind == "state" or spec.state for spec in config.cache)
    return layer is not None and layer.__call__ is DecoderLayer.__call__ and not has_states


def _root(config: ModelConfig) -> str:
    """What precedes all names in a checkpoint with a head, and in none without."""
    layers = config.names.layers if isinstance(config, DecoderConfig) else "model.layers"
    return f"{layers.partition('.')[0]}."


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
        close = difflib.get_close_matches(name, [*ARCHITECTURES, *TEXT_PARTS, *ENCODERS], n=3)
        nearest = f"; closest are {', '.join(close)}" if close else ""
        raise CheckpointError(
            f"config: architecture {name} is not supported{nearest}; `octavo models` lists all that are; others, more "
            "slowly, with backend transformers"
        )
    return ARCHITECTURES[name]
