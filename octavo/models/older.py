"""Decoders from before Llama, with LayerNorms: GPT-2, NeoX, J and Neo, Falcon, OPT, BLOOM, MPT, StarCoder, Phi.

GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners") has learned positions, a feed-forward
layer with GELU and without gates, and a head tied to the embedding; its checkpoints store matrices transposed.
GPT-NeoX (arXiv 2204.06745) and Falcon (arXiv 2311.16867) fuse queries, keys and values head by head, OPT (arXiv
2205.01068) has learned positions, StarCoder 2 (arXiv 2402.19173) and StableLM 2 (arXiv 2402.17834) are close to Llama.
BLOOM (arXiv 2211.05100), MPT (MosaicML) and the first Falcons have biases by distance instead of positions (ALiBi).
The first StarCoder (arXiv 2305.06161) and GPT-Neo (EleutherAI) have GPT-2's positions, and the latter windows in every
other layer.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from octavo.layers.linear import Linear
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import PLAIN_ACTIVATIONS, Decoder, read_decoder
from octavo.models.decoder_layer import DecoderLayer
from octavo.models.loader import WeightLoader
from octavo.models.model_config import ACTIVATIONS, FULL, SLIDING
from octavo.models.parts import DecoderConfig, HeadNorm, Names, NormPart
from octavo.models.rope_keys import rope_values
from octavo.quant.stored.stored_weight import Order

LAYER_NORM = NormPart(is_layer_norm=True)
SUMMARIES = tuple(f"summary_{name}" for name in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj"))
"""Keys of heads that none of these has."""
RUNNER = (
    *("inference_runner", "max_batch_size", "max_sequence_length", "pad_key_length", "pre_allocate_kv_cache"),
    "validate_runner_input",
)
"""Keys of StarCoder's own inference code."""
read_older = partial(read_decoder, eps=1e-5, activations=PLAIN_ACTIVATIONS, norm=LAYER_NORM)
"""``read_decoder`` with the defaults of these families: LayerNorms, and feed-forward layers without gates."""


def alibi_slopes(num_heads: int, most: float = 8.0) -> tuple[float, ...]:
    """What each head's scores lose with each position: a geometric sequence that ends with ``2 ** -most``; for a number
    of heads that is no power of two, that of half the next power, then every second of the next power's."""
    power = 1 << (num_heads - 1).bit_length()
    slopes = [2.0 ** (-most * (i + 1) / power) for i in range(power)]
    return tuple(slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])


def fused_rows(num_heads: int, num_kv_heads: int, head_dim: int) -> Order:
    """The stored row of each row of queries, then keys, then values, where each KV head's queries, key and value lie
    together."""
    each = num_heads // num_kv_heads
    rows = np.arange((num_heads + 2 * num_kv_heads) * head_dim).reshape(num_kv_heads, each + 2, head_dim)
    return np.concatenate([rows[:, :each].ravel(), rows[:, each].ravel(), rows[:, each + 1].ravel()])


class FusedLayer(DecoderLayer):
    """A layer whose queries, keys and values are fused KV head by KV head."""

    def qkv(self, config: DecoderConfig, weights: WeightLoader, prefix: str) -> Linear:
        part = self.part
        order = fused_rows(part.num_heads, part.num_kv_heads, part.head_dim)
        names = [f"{prefix}.{name}" for name in config.names.queries]
        return weights.qkv(names, self.heads, config.hidden_size, part.has_bias, orders=(order,))


NEOX = Names(
    embedding="gpt_neox.embed_in",
    layers="gpt_neox.layers",
    norm="gpt_neox.final_layer_norm",
    head="embed_out",
    queries=("attention.query_key_value",),
    output="attention.dense",
    ups=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)


class GPTNeoXForCausalLM(Decoder):
    layer_class = FusedLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        keys.get("classifier_dropout")
        given = rope_values(keys)
        base, share = keys.get("rotary_emb_base"), keys.get("rotary_pct")  # the older names
        older = {"rope_theta": base, "partial_rotary_factor": 0.25 if share is None else share}
        given = {**{key: value for key, value in older.items() if value is not None}, **given}
        config = read_older(
            keys,
            max_len,
            eps_key="layer_norm_eps",
            activation="gelu",
            rotary=1.0,
            rope=given,
            has_bias=keys.flag("attention_bias", True),
            mlp_bias=True,
            names=NEOX,
        )
        return dataclasses.replace(config, is_parallel=keys.flag("use_parallel_residual", True))


FALCON = Names(
    embedding="transformer.word_embeddings",
    layers="transformer.h",
    norm="transformer.ln_f",
    queries=("self_attention.query_key_value",),
    output="self_attention.dense",
    ups=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)


class FalconForCausalLM(Decoder):
    layer_class = FusedLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        num_heads, hidden_size = keys.size("num_attention_heads"), keys.size("hidden_size")
        is_new, is_parallel = keys.flag("new_decoder_architecture"), keys.flag("parallel_attn", True)
        num_kv_heads, shares_keys = keys.size("num_kv_heads", num_heads), keys.flag("multi_query", True)
        if not is_new:
            num_kv_heads = 1 if shares_keys else num_heads
        if is_new and not is_parallel:
            raise wrong("parallel_attn", False, "true with new_decoder_architecture")
        two = is_parallel and keys.size("num_ln_in_parallel_attn", 2 if is_new else 1) == 2
        names = FALCON._replace(before_attention="ln_attn", before_mlp="ln_mlp") if two else FALCON
        if is_parallel and not two:
            names = FALCON._replace(before_mlp="input_layernorm")
        has_bias = keys.flag("bias")
        values = {
            **keys.values,
            "intermediate_size": keys.size("ffn_hidden_size", 4 * hidden_size),
            "num_key_value_heads": num_kv_heads,
            "max_position_embeddings": keys.size("max_position_embeddings", 2048),
        }
        inner = keys.over(values)
        config = read_older(
            inner,
            max_len,
            tied=True,
            eps_key="layer_norm_epsilon",
            activation_key="activation",
            activation="gelu",
            has_bias=has_bias,
            mlp_bias=has_bias,
            names=names,
        )
        if keys.flag("alibi"):  # which is scaled like the scores
            slopes = tuple(slope * config.head_dim**-0.5 for slope in alibi_slopes(num_heads))
            config = config.without_rope().with_attention(slopes=slopes)
        return dataclasses.replace(config, is_parallel=is_parallel)


class BloomForCausalLM(Decoder):
    layer_class = FusedLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        hidden_size = keys.size("hidden_size", keys.get("n_embed"))
        num_heads = keys.size("num_attention_heads", keys.get("n_head"))
        values = {
            **keys.values,
            "hidden_size": hidden_size,
            "num_attention_heads": num_heads,
            "num_hidden_layers": keys.size("num_hidden_layers", keys.get("n_layer")),
            "intermediate_size": 4 * hidden_size,
            "max_position_embeddings": keys.size("seq_length", 2048),
        }
        keys.must_be({"apply_residual_connection_post_layernorm": (False,)})
        keys.pass_over("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "slow_but_exact")
        config = read_older(
            keys.over(values),
            max_len,
            tied=True,
            eps_key="layer_norm_epsilon",
            activation="gelu_pytorch_tanh",
            has_bias=True,
            mlp_bias=True,
            names=FALCON,
        )
        config = config.without_rope().with_attention(slopes=alibi_slopes(num_heads))
        return dataclasses.replace(config, has_embedding_norm=True)


MPT = Names(
    embedding="transformer.wte",
    layers="transformer.blocks",
    norm="transformer.norm_f",
    queries=("attn.Wqkv",),
    output="attn.out_proj",
    before_attention="norm_1",
    before_mlp="norm_2",
    ups=("ffn.up_proj",),
    down="ffn.down_proj",
)


class MptForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        hidden_size, num_heads = keys.size("d_model"), keys.size("n_heads")
        values = {
            **keys.values,
            "hidden_size": hidden_size,
            "num_attention_heads": num_heads,
            "num_hidden_layers": keys.size("n_layers"),
            "intermediate_size": keys.size("expansion_ratio", 4) * hidden_size,
            "max_position_embeddings": keys.size("max_seq_len", 2048),
        }
        keys.must_be({"no_bias": (True,), "logit_scale": ()})
        keys.pass_over("emb_pdrop", "embedding_fraction", "init_device", "learned_pos_emb", "norm_type")
        attention = keys.child("attn_config") or ConfigKeys({})
        attention.must_be({"alibi": (True,), "prefix_lm": (False,), "qk_ln": (False,)})
        attention.must_be({"attn_type": ("multihead_attention",), "attn_uses_sequence_id": (False,)})
        config = read_older(
            keys.over(values),
            max_len,
            tied=True,
            eps_key="layer_norm_epsilon",
            activation="gelu",
            has_bias=False,
            mlp_bias=False,
            names=MPT,
            norm=NormPart(is_layer_norm=True, has_bias=False),
        )
        config = config.without_rope().with_attention(
            slopes=alibi_slopes(num_heads, attention.number("alibi_bias_max", 8.0)),
            scale=attention.number("softmax_scale", config.head_dim**-0.5),
            clip=0.0 if attention.get("clip_qkv") is None else attention.number("clip_qkv"),
        )
        attention.pass_over("attn_impl", "attn_pdrop")
        attention.finish()
        return config


OPT = Names(
    embedding="model.decoder.embed_tokens",
    layers="model.decoder.layers",
    norm="model.decoder.final_layer_norm",
    output="self_attn.out_proj",
    before_attention="self_attn_layer_norm",
    before_mlp="final_layer_norm",
    ups=("fc1",),
    down="fc2",
)


class OPTForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        hidden_size, has_bias = keys.size("hidden_size"), keys.flag("enable_bias", True)
        if keys.size("word_embed_proj_dim", hidden_size) != hidden_size:
            raise wrong("word_embed_proj_dim", keys.get("word_embed_proj_dim"), "hidden_size")
        for key, allowed in (("do_layer_norm_before", True), ("layer_norm_elementwise_affine", True)):
            if keys.flag(key, allowed) != allowed:
                raise wrong(key, not allowed, "true")
        if keys.flag("_remove_final_layer_norm"):
            raise wrong("_remove_final_layer_norm", True, "false")
        values = {**keys.values, "intermediate_size": keys.size("ffn_dim"), "layer_norm_eps": 1e-5}
        config = read_older(
            keys.over(values),
            max_len,
            tied=True,
            eps_key="layer_norm_eps",
            activation_key="activation_function",
            activation="relu",
            has_bias=has_bias,
            mlp_bias=has_bias,
            names=OPT,
        )
        keys.pass_over("dropout", "layerdrop", "init_std")
        config = with_learned_positions(config, "model.decoder.embed_positions")
        return dataclasses.replace(config, num_positions=config.num_positions + 2, first_position=2)


class Starcoder2ForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        has_bias, window = keys.flag("use_bias", True), keys.get("sliding_window")
        kinds = [FULL if window is None else SLIDING] * keys.size("num_hidden_layers")
        keys.pass_over("embedding_dropout", "residual_dropout")
        return read_older(
            keys,
            max_len,
            tied=True,
            eps_key="norm_epsilon",
            activation="gelu_pytorch_tanh",
            windows=(kinds, None if window is None else keys.size("sliding_window")),
            has_bias=has_bias,
            mlp_bias=has_bias,
            names=Names(ups=("mlp.c_fc",), down="mlp.c_proj"),
        )


class StableLmLayer(DecoderLayer):
    def own_weights(self, config: DecoderConfig, weights: WeightLoader, name: str, count: int) -> Tensor:
        if weights.tensors.has(f"{name}.weight"):  # in GGUF files
            return super().own_weights(config, weights, name, count)
        return weights.vectors([f"{name}.norms.{i}.weight" for i in range(count)], self.part.head_dim)


class StableLmForCausalLM(Decoder):
    layer_class = StableLmLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        is_parallel = keys.flag("use_parallel_residual")
        names = Names(before_mlp="input_layernorm") if is_parallel else Names()
        config = read_older(
            keys,
            max_len,
            eps_key="layer_norm_eps",
            activations=ACTIVATIONS,
            rotary=0.25,
            has_bias=keys.flag("use_qkv_bias"),
            mlp_bias=False,
            names=names._replace(head_norms=("self_attn.q_layernorm", "self_attn.k_layernorm")),
        )
        norm = HeadNorm("each") if keys.flag("qk_layernorm") else None  # of the 12B model
        config = config.with_attention(has_output_bias=False, head_norm=norm)
        return dataclasses.replace(config, is_parallel=is_parallel)


PHI = Names(
    norm="model.final_layernorm",
    output="self_attn.dense",
    before_mlp="input_layernorm",
    ups=("mlp.fc1",),
    down="mlp.fc2",
)


class PhiForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        if keys.flag("qk_layernorm"):
            raise wrong("qk_layernorm", True, "false")
        config = read_older(
            keys,
            max_len,
            eps_key="layer_norm_eps",
            activation="gelu_new",
            rotary=0.5,
            has_bias=True,
            mlp_bias=True,
            names=PHI,
        )
        return dataclasses.replace(config, is_parallel=True, has_head_bias=True)


GPT = Names(
    embedding="transformer.wte",
    layers="transformer.h",
    norm="transformer.ln_f",
    queries=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    output="attn.out_proj",
    before_attention="ln_1",
    before_mlp="ln_2",
    ups=("mlp.c_fc",),
    down="mlp.c_proj",
)


def read_gpt(keys: ConfigKeys, max_len: int | None, names: Names, has_bias: bool, **more: Any) -> DecoderConfig:
    """Read what has GPT-2's keys; ``more`` goes to ``read_decoder``."""
    hidden_size, num_heads = keys.size("n_embd"), keys.size("n_head")
    if hidden_size % num_heads:
        raise wrong("n_embd", hidden_size, f"a multiple of n_head, {num_heads}")
    values = {
        **keys.values,
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "num_hidden_layers": keys.size("n_layer"),
        "intermediate_size": keys.size("n_inner", 4 * hidden_size),
        "max_position_embeddings": keys.size("n_positions", 1024),
    }
    return read_older(
        keys.over({**values, **more.pop("values", {})}),
        max_len,
        eps_key="layer_norm_epsilon",
        activation_key="activation_function",
        has_bias=has_bias,
        mlp_bias=True,
        names=names,
        **more,
    )


def with_learned_positions(config: DecoderConfig, name: str) -> DecoderConfig:
    """With an embedding of each position, and no rotation."""
    config = config.without_rope()
    return dataclasses.replace(config, num_positions=config.max_position_embeddings, positions=name)


FUSED = GPT._replace(queries=("attn.c_attn",), output="attn.c_proj")


class GPT2LMHeadModel(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        keys.pass_over("n_ctx", "reorder_and_upcast_attn", *SUMMARIES)  # scores are float32 always
        config = read_gpt(keys, max_len, FUSED, has_bias=True, tied=True, activation="gelu_new")
        scale = config.head_dim**-0.5 if keys.flag("scale_attn_weights", True) else 1.0
        by_layer = keys.flag("scale_attn_by_inverse_layer_idx")
        scales = [scale / (i + 1 if by_layer else 1) for i in range(config.num_layers)]
        config = with_learned_positions(config.with_attention(scale=scales), "transformer.wpe")
        return dataclasses.replace(config, is_transposed=keys.flag("has_transposed_weights", True))

    def __init__(self, config: DecoderConfig, weights: WeightLoader) -> None:
        if not weights.tensors.has(f"{FUSED.embedding}.weight"):  # OpenAI's files have no prefix
            outer = {name: getattr(FUSED, name).rpartition(".")[2] for name in ("embedding", "layers", "norm")}
            config = dataclasses.replace(config, names=FUSED._replace(**outer), positions="wpe")
        super().__init__(config, weights)


class GPTJForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        names = GPT._replace(before_mlp="ln_1", ups=("mlp.fc_in",), down="mlp.fc_out")
        keys.pass_over("n_ctx", "rotary", "scale_attn_weights", *SUMMARIES)
        config, width = read_gpt(keys, max_len, names, False, activation="gelu_new"), keys.size("rotary_dim", 64)
        if width % 2 or width > config.head_dim:
            raise wrong("rotary_dim", width, f"an even number, at most that of a head, {config.head_dim}")
        config = dataclasses.replace(config, ropes=(config.rope({}, max_len, width),))
        return dataclasses.replace(config.with_attention(is_adjacent=True), is_parallel=True, has_head_bias=True)


class GPTBigCodeForCausalLM(Decoder):
    layer_class = FusedLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        count = 1 if keys.flag("multi_query", True) else keys.size("n_head")
        keys.pass_over("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", *SUMMARIES, *RUNNER)
        values = {"num_key_value_heads": count}
        activation = "gelu_pytorch_tanh"
        config = read_gpt(keys, max_len, FUSED, has_bias=True, tied=True, activation=activation, values=values)
        scale = config.head_dim**-0.5 if keys.flag("scale_attn_weights", True) else 1.0
        return with_learned_positions(config.with_attention(scale=scale), "transformer.wpe")


class GPTNeoForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        count, hidden_size = keys.size("num_layers", 24), keys.size("hidden_size")
        given = keys.get("attention_types", [[["global", "local"], count // 2]])
        try:
            every = (kind for part, times in given for _ in range(min(times, count + 1)) for kind in part)
            kinds = list(islice(every, count + 1))
        except (TypeError, ValueError):
            kinds = []
        if len(kinds) != count or any(kind not in ("global", "local") for kind in kinds):
            raise wrong("attention_types", given, f"lists of global and local with their repetitions, {count} in all")
        keys.pass_over("attention_layers", "classifier_dropout", "embed_dropout", "resid_dropout", *SUMMARIES)
        values = {
            **keys.values,
            "num_attention_heads": keys.size("num_heads", 16),
            "num_key_value_heads": keys.size("num_heads", 16),
            "num_hidden_layers": count,
            "intermediate_size": keys.size("intermediate_size", 4 * hidden_size),
        }
        names = ("q_proj", "k_proj", "v_proj")
        config = read_older(
            keys.over(values),
            max_len,
            tied=True,
            eps_key="layer_norm_epsilon",
            activation_key="activation_function",
            activation="gelu_new",
            windows=([SLIDING if kind == "local" else FULL for kind in kinds], keys.size("window_size", 256)),
            has_bias=False,
            mlp_bias=True,
            names=GPT._replace(
                queries=tuple(f"attn.attention.{name}" for name in names), output="attn.attention.out_proj"
            ),
        )
        return with_learned_positions(config.with_attention(scale=1.0, has_output_bias=True), "transformer.wpe")
