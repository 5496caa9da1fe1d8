"""InternLM 2 and 3, EXAONE 3, ChatGLM 2 and 3, GLM-4 as first published, MiMo and Nemotron-NAS: Llama by other names.

These are published with code of their own (arXiv 2403.17297, 2412.04862, 2406.12793 and 2505.07608). In Nemotron-NAS
(arXiv 2411.19146) layers differ in KV heads and widths, and some have no attention, or no feed-forward layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from octavo.layers.attention_inputs import StepAngles
from octavo.layers.norm import Norm
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.decoder_layer import DecoderLayer, FeedForward, no_feed_forward
from octavo.models.layer_cache import state_layer
from octavo.models.loader import WeightLoader
from octavo.models.older import FusedLayer
from octavo.models.parts import DecoderConfig, MLPPart, Names
from octavo.models.qwen2 import Qwen2ForCausalLM
from octavo.ops.attention.attention import LayerCache, PagedRows

INTERNLM2 = Names(
    embedding="model.tok_embeddings",
    head="output",
    queries=("attention.wqkv",),
    output="attention.wo",
    before_attention="attention_norm",
    before_mlp="ffn_norm",
    ups=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
)


class InternLM2ForCausalLM(Decoder):
    layer_class = FusedLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        return read_decoder(keys, max_len, eps=1e-5, has_bias=keys.flag("bias"), mlp_bias=False, names=INTERNLM2)


class InternLM3ForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        has_bias = keys.flag("bias")
        config = read_decoder(keys, max_len, eps=1e-5, has_bias=keys.flag("qkv_bias"), mlp_bias=has_bias)
        return config.with_attention(has_output_bias=has_bias)


EXAONE = Names(
    embedding="transformer.wte",
    layers="transformer.h",
    norm="transformer.ln_f",
    queries=tuple(f"attn.attention.{name}_proj" for name in "qkv"),
    output="attn.attention.out_proj",
    before_attention="ln_1",
    before_mlp="ln_2",
    ups=("mlp.c_fc_0", "mlp.c_fc_1"),
    down="mlp.c_proj",
)


class ExaoneForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        keys.pass_over("embed_dropout", "resid_dropout")
        count = keys.size("num_layers", keys.get("num_hidden_layers", 32))
        return read_decoder(
            keys.over({**keys.values, "num_hidden_layers": count}),
            max_len,
            eps=1e-5,
            eps_key="layer_norm_epsilon",
            activation_key="activation_function",
            has_bias=False,
            mlp_bias=False,
            names=EXAONE,
        )


CHATGLM = Names(
    embedding="transformer.embedding.word_embeddings",
    layers="transformer.encoder.layers",
    norm="transformer.encoder.final_layernorm",
    head="transformer.output_layer",
    queries=("self_attention.query_key_value",),
    output="self_attention.dense",
    ups=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)


class ChatGLMForCausalLM(Decoder):
    """ChatGLM 2 and 3, and GLM-4 9B as it was published at first."""

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        keys.must_be({"rmsnorm": (True,), "post_layer_norm": (True,), "pre_seq_len": ()})
        keys.must_be({"apply_residual_connection_post_layernorm": (False,)})
        keys.pass_over("attention_softmax_in_fp32", "apply_query_key_layer_scaling", "fp32_residual_connection")
        keys.pass_over("bias_dropout_fusion", "interleaved_qkv", "prefix_projection", "quantization_bit")
        keys.pass_over("classifier_dropout", "hidden_dropout")
        heads, has_bias = keys.size("num_attention_heads"), keys.flag("add_bias_linear")
        kv_heads = keys.size("multi_query_group_num", 1) if keys.flag("multi_query_attention") else heads
        values = {
            **keys.values,
            "vocab_size": keys.size("padded_vocab_size"),
            "num_hidden_layers": keys.size("num_layers"),
            "intermediate_size": keys.size("ffn_hidden_size"),
            "num_key_value_heads": kv_heads,
            "head_dim": keys.size("kv_channels", 128),
            "max_position_embeddings": keys.size("seq_length", 2048),
        }
        config = read_decoder(
            keys.over(values),
            max_len,
            eps=1e-5,
            eps_key="layernorm_epsilon",
            rotary=0.5,
            theta=10_000.0 * keys.number("rope_ratio", 1.0),
            has_bias=has_bias or keys.flag("add_qkv_bias"),
            mlp_bias=has_bias,
            names=CHATGLM,
        )
        return config.with_attention(is_adjacent=keys.flag("original_rope", True), has_output_bias=has_bias)


class MiMoForCausalLM(Qwen2ForCausalLM):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        keys.pass_over("num_nextn_predict_layers")
        return super().read_config(keys, max_len)

    def __init__(self, config: DecoderConfig, weights: WeightLoader) -> None:
        weights.tensors.leave_out("model.mtp_layers.")  # nothing drafts with these
        super().__init__(config, weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NasConfig(DecoderConfig):
    has_mlp: tuple[bool, ...]
    """Whether each layer has a feed-forward layer."""

    @property
    def num_stored_layers(self) -> int:
        return 1 + max(i for i, part in enumerate(self.layers) if self.has_mlp[i] or not part.is_recurrent)


class NasLayer(DecoderLayer):
    """A layer that may have no attention, or no feed-forward layer."""

    def stream_norm(self, config: DecoderConfig, weights: WeightLoader, prefix: str, name: str | None) -> Norm | None:
        assert isinstance(config, NasConfig)
        index = int(prefix.rpartition(".")[2])
        is_absent = config.layers[index].is_recurrent if name == config.names.before_attention else False
        return None if is_absent else super().stream_norm(config, weights, prefix, name)

    def load_mixer(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        self.attends = not config.layers[index].is_recurrent
        if self.attends:
            super().load_mixer(config, weights, prefix, index)

    def feed_forward(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> FeedForward:
        assert isinstance(config, NasConfig)
        return super().feed_forward(config, weights, prefix, index) if config.has_mlp[index] else no_feed_forward

    def __call__(self, x_TD: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        if self.attends:
            return super().__call__(x_TD, step, cache, rows)
        return self.mlp(rows.pick(x_TD, x_TD)[1])


class DeciLMForCausalLM(Decoder):
    """Nemotron-NAS: Llama-3.3-Nemotron-Super 49B and Ultra 253B."""

    layer_class = NasLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        count, heads, width = (keys.size(key) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
        blocks = keys.get("block_configs")
        if not isinstance(blocks, list) or len(blocks) != count or not all(isinstance(b, Mapping) for b in blocks):
            raise wrong("block_configs", blocks, f"a list of {count} objects")
        kv_heads, sizes = zip(*(_block(ConfigKeys(block), heads, width) for block in blocks), strict=True)
        if not max(kv_heads) or not max(sizes):
            raise wrong("block_configs", blocks, "such that a layer has attention, and one a feed-forward layer")
        first = next(filter(None, kv_heads))
        values = {**keys.values, "num_key_value_heads": first, "intermediate_size": max(sizes)}
        config = read_decoder(keys.over(values), max_len)
        config = config.with_attention(num_kv_heads=[own or first for own in kv_heads])
        config = config.with_caches([None if own else state_layer() for own in kv_heads])
        plain = config.layers[0].mlp
        assert isinstance(plain, MLPPart)
        config = config.with_mlps(lambda i: dataclasses.replace(plain, size=sizes[i] or max(sizes)))
        return config.extended(NasConfig, has_mlp=tuple(size > 0 for size in sizes))


def _block(block: ConfigKeys, heads: int, width: int) -> tuple[int, int]:
    """A layer's KV heads and the width of its feed-forward layer, 0 where it has none."""
    attention, mlp = (block.child(key) or ConfigKeys({}) for key in ("attention", "ffn"))
    for part in (attention, mlp):
        part.must_be({"replace_with_linear": (False,), "sparsify": (), "window_length": (), "num_sink_tokens": ()})
    together = attention.size("n_heads_in_group", 1)
    if heads % together:
        raise wrong("n_heads_in_group", together, f"a divisor of num_attention_heads, {heads}")
    kv_heads = 0 if attention.flag("no_op") else heads // together
    if mlp.flag("no_op"):
        return kv_heads, 0
    if mlp.get("intermediate_size") is not None:
        return kv_heads, mlp.size("intermediate_size")
    size = int(2 * mlp.number("ffn_mult") * width / 3)
    return kv_heads, -(-size // 256) * 256
