"""Llama (arXiv 2302.13971 and 2407.21783), and models of the same arithmetic.

Shapes: T tokens of the step, R rows whose logits are wanted, D model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from octavo.layers.mlp import GatedMLP
from octavo.layers.rotary import Rotary
from octavo.models.config import ModelConfig
from octavo.models.loader import WeightLoader
from octavo.ops import attention
from octavo.ops.attention import HeadLayout, LayerCache, PagedRows


class LlamaLayer:
    """Attention, then the feed-forward layer; each normalises its input and adds to the residual stream."""

    def __init__(self, config: ModelConfig, weights: WeightLoader, prefix: str) -> None:
        D, F = config.hidden_size, config.ffn_size
        self.input_norm = weights.norm(f"{prefix}.input_layernorm", D, config.norm_eps)
        self.heads = self.head_layout(config, weights, f"{prefix}.self_attn")
        names = dict(zip([f"{prefix}.self_attn.{part}_proj" for part in "qkv"], self.heads.sizes, strict=True))
        self.qkv_proj = weights.linear(names, D, config.attention_bias)
        self.o_proj = weights.linear({f"{prefix}.self_attn.o_proj": D}, self.heads.sizes[0], config.attention_bias)
        self.mlp = GatedMLP(
            weights.norm(f"{prefix}.post_attention_layernorm", D, config.norm_eps),
            weights.linear({f"{prefix}.mlp.gate_proj": F, f"{prefix}.mlp.up_proj": F}, D, config.mlp_bias),
            weights.linear({f"{prefix}.mlp.down_proj": D}, F, config.mlp_bias),
        )

    def head_layout(self, config: ModelConfig, weights: WeightLoader, prefix: str) -> HeadLayout:
        """How this layer's heads attend; ``prefix`` is that of the attention's weights."""
        return HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5)

    def __call__(self, x_TD: Tensor, angles: tuple[Tensor, Tensor], cache: LayerCache, rows: PagedRows) -> Tensor:
        """The next residual stream; ``x`` may be overwritten."""
        qkv_TW = self.qkv_proj(x_TD, norm=self.input_norm)
        x_TD = self.o_proj(attention(qkv_TW, self.heads, *angles, cache, rows), residual=x_TD)
        return self.mlp(x_TD)


class LlamaForCausalLM:
    """The whole model: embedding, layers, final norm and head."""

    layer_class: type[LlamaLayer] = LlamaLayer

    def __init__(self, config: ModelConfig, weights: WeightLoader) -> None:
        self.config = config
        self.embedding = weights.embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config.rope, config.head_dim, weights.form.device)
        self.layers = [self.layer_class(config, weights, f"model.layers.{i}") for i in range(config.num_layers)]
        self.norm = weights.norm("model.norm", config.hidden_size, config.norm_eps)
        if config.tie_word_embeddings:
            self.head = weights.tied_head(self.embedding, "lm_head")
        else:
            self.head = weights.linear({"lm_head": config.vocab_size}, config.hidden_size, has_bias=False)

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, caches: Sequence[LayerCache], rows: PagedRows
    ) -> Tensor:
        """Compute these tokens (int64, as their positions), extending the caches; the last layer's output [T, D]."""
        x_TD = self.embedding(token_ids_T)
        angles = self.rotary(positions_T)
        for layer, cache in zip(self.layers, caches, strict=True):
            x_TD = layer(x_TD, angles, cache, rows)
        return x_TD

    def logits(self, x_RD: Tensor) -> Tensor:
        """Scores of the next token [R, V], for rows of what ``forward`` returned."""
        return self.head(x_RD, norm=self.norm)
