"""NomicBERT (arXiv 2402.01613) and GTE (arXiv 2407.19669): BERT with gates, and with rotary positions.

Names are those of the makers' own code, with fused projections, which transformers writes too.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from octavo.layers.mlp import MLP
from octavo.models.bert import BertModel, with_bert_embeddings
from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder_layer import FeedForward
from octavo.models.encoder import EncoderConfig, EncoderLayer, read_encoder, under_names
from octavo.models.linear_parts import MatrixRows
from octavo.models.loader import WeightLoader
from octavo.models.model_config import ACTIVATIONS
from octavo.models.parts import DecoderConfig, MLPPart, Names
from octavo.models.rope_keys import rope_values
from octavo.quant.stored.shard import Section

NOMIC = Names(
    embedding="embeddings.word_embeddings",
    layers="encoder.layers",
    norm="",
    queries=("attn.Wqkv",),
    output="attn.out_proj",
    before_attention=None,
    after_attention="norm1",
    before_mlp=None,
    after_mlp="norm2",
    ups=("mlp.fc12", "mlp.fc11"),
    down="mlp.fc2",
)
NOMIC_SIZES = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
    "hidden_act": "activation_function",
}
NOMIC_MUST_BE = {
    "causal": (False,),
    "mlp_fc1_bias": (False,),
    "mlp_fc2_bias": (False,),
    "parallel_block": (False,),
    "prenorm": (False,),
    "qkv_proj_bias": (False,),
    "rotary_emb_fraction": (1,),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (),
    "rotary_scaling_factor": (),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "use_rms_norm": (False,),
}
NOMIC_UNUSED = (
    *("dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "last_layer_subset", "max_trained_positions"),
    *("pad_vocab_size_multiple", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout"),
    *("summary_proj_to_labels", "summary_type", "summary_use_proj", "use_flash_attn", "use_xentropy"),
)
GTE = Names(
    embedding="embeddings.word_embeddings",
    layers="encoder.layer",
    norm="",
    queries=("attention.qkv_proj",),
    output="attention.o_proj",
    before_attention=None,
    after_attention="attn_ln",
    before_mlp=None,
    after_mlp="mlp_ln",
    ups=("mlp.up_gate_proj",),
    down="mlp.down_proj",
)


def _with_rope(config: EncoderConfig, keys: ConfigKeys, max_len: int | None, theta: float) -> EncoderConfig:
    rope = config.rope({"rope_theta": theta, **rope_values(keys)}, max_len)
    return dataclasses.replace(config, ropes=(rope,)).with_attention(rope=0)


class NomicBertModel(BertModel):
    """An encoder: NomicBERT (arXiv 2402.01613)."""

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> EncoderConfig:
        keys.pass_over(*NOMIC_UNUSED)
        keys.must_be(NOMIC_MUST_BE)
        keys = under_names(keys, NOMIC_SIZES)
        gates = {**ACTIVATIONS, "swiglu": ACTIVATIONS["silu"]}
        config = read_encoder(keys, names=NOMIC, activations=gates, activation="silu", has_bias=False, mlp_bias=False)
        config = with_bert_embeddings(_with_rope(config, keys, max_len, 1000.0), keys)
        return cls.with_head(dataclasses.replace(config, root="nomic_bert.", embedding_norm="emb_ln"), keys)


class GteLayer(EncoderLayer):
    """A layer whose fused projection has the ups before the gates."""

    def feed_forward(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> FeedForward:
        part, names, D = config.layers[index].mlp, config.names, config.hidden_size
        assert isinstance(part, MLPPart)
        F = part.size
        rows = MatrixRows(f"{prefix}.{names.ups[0]}", [Section(F, F)] * 2, np.roll(np.arange(2 * F), F))
        down = weights.row(f"{prefix}.{names.down}", D, F, True)
        after = self.stream_norm(config, weights, prefix, names.after_mlp)
        return MLP(None, weights.fused([rows], D), down, part.activation, after)


class GteModel(BertModel):
    """An encoder: GTE (arXiv 2407.19669)."""

    layer_class = GteLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> EncoderConfig:
        config = read_encoder(keys, names=GTE, activations=ACTIVATIONS, positions=8192)
        config = with_bert_embeddings(_with_rope(config, keys, max_len, 160_000.0), keys, num_types=1)
        return cls.with_head(dataclasses.replace(config, root="gte."), keys)
