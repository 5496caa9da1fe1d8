"""GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners"), in all its sizes.

Learned positions, LayerNorm with biases, an ungated GELU feed-forward layer, and a head tied to the embedding.
Checkpoints store linear weights as [inputs, outputs].

Shapes: T tokens of the step, R rows whose logits are needed, D model, F ffn, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from octavo import ops
from octavo.layers.attention import attention
from octavo.models.config import ModelConfig, architecture
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.loader import WeightLoader
from octavo.ops.attention import HeadLayout, LayerCache, PagedRows
from octavo.weights.generation_config import token_ids


@dataclass(frozen=True, kw_only=True)
class GPT2Config(ModelConfig):
    scale: float
    """Scale of attention scores in the first layer."""
    scales_by_layer: bool
    """Whether the scores of layer i are also divided by i + 1."""
    is_transposed: bool
    """Whether linear weights are stored as [inputs, outputs]."""


def read_gpt2(keys: ConfigKeys) -> GPT2Config:
    """Read GPT-2's configuration, which has its own names for all sizes."""
    hidden_size, num_heads = keys.size("n_embd"), keys.size("n_head")
    if hidden_size % num_heads:
        raise wrong("n_embd", hidden_size, f"a multiple of n_head, {num_heads}")
    keys.choice("activation_function", {"gelu_new": None, "gelu_pytorch_tanh": None}, "gelu_new")
    keys.flag("reorder_and_upcast_attn")  # the order of scaling and upcasting; scores are always float32 here
    for key in ("n_ctx", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type"):
        keys.get(key)  # keys of other heads, and the older name of n_positions
    keys.get("summary_use_proj")
    return GPT2Config(
        architecture=architecture(keys),
        vocab_size=keys.size("vocab_size"),
        hidden_size=hidden_size,
        ffn_size=keys.size("n_inner", 4 * hidden_size),
        num_layers=keys.size("n_layer"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        max_position_embeddings=keys.size("n_positions", 1024),
        tie_word_embeddings=keys.flag("tie_word_embeddings", True),
        eos_token_ids=token_ids({"eos_token_id": keys.get("eos_token_id")}, "eos_token_id"),
        scale=(hidden_size // num_heads) ** -0.5 if keys.flag("scale_attn_weights", True) else 1.0,
        scales_by_layer=keys.flag("scale_attn_by_inverse_layer_idx"),
        is_transposed=keys.flag("has_transposed_weights", True),
    )


class GPT2Layer:
    """Attention, then the feed-forward layer; each normalises its input and adds to the residual stream."""

    def __init__(self, config: GPT2Config, weights: WeightLoader, prefix: str, index: int) -> None:
        D, F, is_transposed = config.hidden_size, config.ffn_size, config.is_transposed
        scale = config.scale / (index + 1) if config.scales_by_layer else config.scale
        self.heads = HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim, scale)
        self.input_norm = weights.layer_norm(f"{prefix}.ln_1", D, config.norm_eps)
        self.qkv_proj = weights.qkv([f"{prefix}.attn.c_attn"], self.heads, D, True, is_transposed=is_transposed)
        self.o_proj = weights.row(f"{prefix}.attn.c_proj", D, D, True, is_transposed=is_transposed)
        self.mlp_norm = weights.layer_norm(f"{prefix}.ln_2", D, config.norm_eps)
        self.up = weights.column(f"{prefix}.mlp.c_fc", F, D, True, is_transposed=is_transposed)
        self.down = weights.row(f"{prefix}.mlp.c_proj", D, F, True, is_transposed=is_transposed)
        self.heads = weights.own_heads(self.heads)

    def __call__(self, x_TD: Tensor, cache: LayerCache, rows: PagedRows) -> Tensor:
        """The next residual stream, [T, D], or [R, D] with logits indices; ``x`` may be overwritten."""
        qkv_TW = self.qkv_proj(self.input_norm(x_TD))
        attended_TD, x_TD = rows.pick(attention(qkv_TW, self.heads, None, None, cache, rows), x_TD)
        x_TD = self.o_proj(attended_TD, residual=x_TD)
        return self.down(ops.gelu(self.up(self.mlp_norm(x_TD)), True), residual=x_TD)


class GPT2LMHeadModel:
    """The complete model. ``LlamaForCausalLM`` documents the methods."""

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> GPT2Config:
        return read_gpt2(keys)

    def __init__(self, config: GPT2Config, weights: WeightLoader) -> None:
        self.config = config
        D = config.hidden_size
        prefix = "transformer." if weights.tensors.has("transformer.wte.weight") else ""  # OpenAI's files have none
        self.embedding = weights.embedding(f"{prefix}wte", config.vocab_size, D, config.tie_word_embeddings)
        self.positions = weights.small_embedding(f"{prefix}wpe", config.max_position_embeddings, D)
        self.layers = [GPT2Layer(config, weights, f"{prefix}h.{i}", i) for i in range(config.num_layers)]
        self.norm = weights.layer_norm(f"{prefix}ln_f", D, config.norm_eps)
        self.head = weights.head("lm_head", self.embedding, (config.vocab_size, D), config.tie_word_embeddings)

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, caches: Sequence[LayerCache], rows: PagedRows
    ) -> Tensor:
        x_TD = self.embedding(token_ids_T) + self.positions(positions_T)
        for layer, cache, own_rows in zip(self.layers, caches, rows.of_layers(len(self.layers)), strict=True):
            x_TD = layer(x_TD, cache, own_rows)
        return x_TD

    def logits(self, x_RD: Tensor) -> Tensor:
        return self.head(self.norm(x_RD))
