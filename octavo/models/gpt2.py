"""GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners"), in all its sizes.

Learned positions, LayerNorm with biases, an ungated GELU feed-forward layer, and a head tied to the embedding.
Checkpoints store linear weights as [inputs, outputs].
"""

from __future__ import annotations

import dataclasses

from octavo.layers.mlp import gelu_tanh
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.loader import WeightLoader
from octavo.models.parts import DecoderConfig, Names, NormPart

PREFIX = "transformer."
NAMES = Names(
    embedding=f"{PREFIX}wte",
    layers=f"{PREFIX}h",
    norm=f"{PREFIX}ln_f",
    queries=("attn.c_attn",),
    output="attn.c_proj",
    before_attention="ln_1",
    before_mlp="ln_2",
    ups=("mlp.c_fc",),
    down="mlp.c_proj",
)
UNUSED = (
    *("n_ctx", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type"),
    *("summary_use_proj", "reorder_and_upcast_attn"),
)
"""Keys of other heads, the older name of n_positions, and the order of scaling and upcasting: scores are always
float32 here."""


class GPT2LMHeadModel(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        hidden_size, num_heads = keys.size("n_embd"), keys.size("n_head")
        if hidden_size % num_heads:
            raise wrong("n_embd", hidden_size, f"a multiple of n_head, {num_heads}")
        keys.pass_over(*UNUSED)
        values = {
            **keys.values,
            "hidden_size": hidden_size,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads,
            "num_hidden_layers": keys.size("n_layer"),
            "intermediate_size": keys.size("n_inner", 4 * hidden_size),
            "max_position_embeddings": keys.size("n_positions", 1024),
        }
        config = read_decoder(
            keys.over(values),
            max_len,
            tied=True,
            eps=1e-5,
            eps_key="layer_norm_epsilon",
            activation_key="activation_function",
            activation="gelu_new",
            activations={"gelu_new": gelu_tanh, "gelu_pytorch_tanh": gelu_tanh},
            has_bias=True,
            mlp_bias=True,
            names=NAMES,
            norm=NormPart(is_layer_norm=True),
        )
        scale = config.head_dim**-0.5 if keys.flag("scale_attn_weights", True) else 1.0
        by_layer = keys.flag("scale_attn_by_inverse_layer_idx")
        scales = [scale / (i + 1 if by_layer else 1) for i in range(config.num_layers)]
        return dataclasses.replace(
            config.with_attention(rope=None, scale=scales),
            ropes=(),
            num_positions=config.max_position_embeddings,
            positions=f"{PREFIX}wpe",
            is_transposed=keys.flag("has_transposed_weights", True),
        )

    def __init__(self, config: DecoderConfig, weights: WeightLoader) -> None:
        if not weights.tensors.has(f"{NAMES.embedding}.weight"):  # OpenAI's files have no prefix
            outer = {name: getattr(NAMES, name).removeprefix(PREFIX) for name in ("embedding", "layers", "norm")}
            config = dataclasses.replace(config, names=NAMES._replace(**outer), positions="wpe")
        super().__init__(config, weights)
