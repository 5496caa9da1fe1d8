"""ModernBERT (arXiv 2412.13663): pre-norm layers with gates and rotary positions, two of three with a window.

Also EuroBERT (arXiv 2503.05500), which is Llama's architecture with attention in both directions.
"""

from __future__ import annotations

import dataclasses

from octavo.layers.mlp import gelu, gelu_tanh, relu
from octavo.models.bert import read_labels
from octavo.models.config_keys import ConfigKeys
from octavo.models.encoder import Encoder, EncoderConfig, EncoderLayer, read_encoder
from octavo.models.labels import LabelPart
from octavo.models.loader import WeightLoader
from octavo.models.model_config import ACTIVATIONS, FULL, SLIDING, read_layer_types
from octavo.models.parts import LLAMA, RMS, Names, NormPart
from octavo.models.rope_keys import rope_values, ropes_by_kind

NAMES = Names(
    embedding="embeddings.tok_embeddings",
    layers="layers",
    norm="final_norm",
    queries=("attn.Wqkv",),
    output="attn.Wo",
    before_attention="attn_norm",
    before_mlp="mlp_norm",
    ups=("mlp.Wi",),
    down="mlp.Wo",
)
THETAS = {FULL: 160_000.0, SLIDING: 10_000.0}
OLDER = {FULL: "global_rope_theta", SLIDING: "local_rope_theta"}
UNUSED = (
    *("classifier_dropout", "deterministic_flash_attn", "embedding_dropout", "initializer_cutoff_factor"),
    *("mlp_dropout", "reference_compile", "repad_logits_with_grad", "sparse_pred_ignore_index", "sparse_prediction"),
    *("decoder_bias", "layer_norm_eps", "position_embedding_type"),
)
PLAIN = {"gelu": gelu, "gelu_new": gelu_tanh, "gelu_pytorch_tanh": gelu_tanh, "relu": relu}


class ModernBertLayer(EncoderLayer):
    """The first layer has no norm before its attention: the embeddings have one already."""

    def __init__(self, config: EncoderConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        if index == 0:
            config = dataclasses.replace(config, names=config.names._replace(before_attention=None))
        super().__init__(config, weights, prefix, index)
        self.is_post_norm = False


class ModernBertModel(Encoder):
    """An encoder: ModernBERT (arXiv 2412.13663)."""

    layer_class = ModernBertLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> EncoderConfig:
        keys.pass_over(*UNUSED)
        every = keys.size("global_attn_every_n_layers", 3)
        types = read_layer_types(keys, lambda i: i % every)
        reach = keys.size("local_attention", 128) // 2
        config = read_encoder(
            keys,
            names=NAMES,
            norm=NormPart(is_layer_norm=True, has_bias=keys.flag("norm_bias")),
            eps_key="norm_eps",
            eps=1e-5,
            activation_key="hidden_activation",
            activations=ACTIVATIONS,
            has_bias=keys.flag("attention_bias"),
            mlp_bias=keys.flag("mlp_bias"),
            positions=8192,
            windows=[reach if kind == SLIDING else 0 for kind in types],
            rope_of=[int(kind == SLIDING) for kind in types],
        )
        return dataclasses.replace(
            config,
            ropes=tuple(config.rope(_rope_keys(keys, kind), max_len) for kind in THETAS),
            root="model.",
            embedding_norm="embeddings.norm",
            left_out=() if _has_labels(config) else ("head.", "decoder."),
            labels=_labels(keys, config),
        )


def _has_labels(config: EncoderConfig) -> bool:
    return config.architecture.endswith("Classification")


def _rope_keys(keys: ConfigKeys, kind: str) -> dict[str, object]:
    """Rotary keys of the layers with full attention or with a window."""
    [own] = ropes_by_kind(keys, (kind,)) or [{}]
    return {"rope_theta": keys.number(OLDER[kind], THETAS[kind]), **own}


def _labels(keys: ConfigKeys, config: EncoderConfig) -> LabelPart | None:
    of = keys.choice("classifier_pooling", {"cls": "cls", "mean": "mean"}, "cls")
    between, has_bias = keys.choice("classifier_activation", PLAIN, "gelu"), keys.flag("classifier_bias")
    if not _has_labels(config):
        return None
    part = read_labels(keys, config.architecture, of=of)
    return part and dataclasses.replace(
        part, dense="head.dense", dense_has_bias=has_bias, between=between, norm="head.norm"
    )


class EuroBertModel(Encoder):
    """An encoder: EuroBERT (arXiv 2503.05500)."""

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> EncoderConfig:
        names = LLAMA._replace(embedding="embed_tokens", layers="layers", norm="norm")
        config = read_encoder(
            keys,
            names=names,
            norm=RMS,
            eps_key="rms_norm_eps",
            eps=1e-5,
            activations=ACTIVATIONS,
            activation="silu",
            has_bias=keys.flag("attention_bias"),
            mlp_bias=keys.flag("mlp_bias"),
            rope_of=[0] * keys.size("num_hidden_layers"),
        )
        of = keys.choice("classifier_pooling", {"bos": "cls", "mean": "mean", "late": "mean_logits"}, "late")
        return dataclasses.replace(
            config,
            ropes=(config.rope(rope_values(keys), max_len),),
            root="model.",
            left_out=("lm_head.",),
            labels=read_labels(keys, config.architecture, of=of, dense="dense", between=gelu),
        )
