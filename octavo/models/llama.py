"""Llama (arXiv 2302.13971 and 2407.21783), and models of the same arithmetic.

Shapes: T tokens of the step, R rows whose logits are wanted, D model, N heads, K kv heads, H head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from octavo.layers.attention import LayerCache, PagedRows, attend
from octavo.layers.mlp import SwiGLU
from octavo.layers.rotary import Rotary
from octavo.models.config import ModelConfig
from octavo.models.loader import WeightLoader
from octavo.ops import apply_rope


class LlamaAttention:
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig, weights: WeightLoader, prefix: str) -> None:
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.sizes = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        names = dict(zip([f"{prefix}.{part}_proj" for part in "qkv"], self.sizes, strict=True))
        self.qkv_proj = weights.linear(names, config.hidden_size, config.attention_bias)
        self.o_proj = weights.linear({f"{prefix}.o_proj": config.hidden_size}, self.sizes[0], config.attention_bias)

    def __call__(self, x_TD: Tensor, angles: tuple[Tensor, Tensor], cache: LayerCache, rows: PagedRows) -> Tensor:
        T = x_TD.shape[0]
        parts = self.qkv_proj(x_TD).split_with_sizes(self.sizes, dim=-1)
        q_TNH, k_TKH, v_TKH = (part.view(T, -1, self.head_dim) for part in parts)
        q_TNH, k_TKH = apply_rope(q_TNH, k_TKH, *angles)
        out_TNH = attend(q_TNH, k_TKH, v_TKH, cache, rows, self.scale)
        return self.o_proj(out_TNH.view(T, -1))


class LlamaLayer:
    """Attention, then the feed-forward layer; each normalises its input and adds to the residual stream."""

    def __init__(self, config: ModelConfig, weights: WeightLoader, prefix: str) -> None:
        D, F = config.hidden_size, config.ffn_size
        self.input_norm = weights.norm(f"{prefix}.input_layernorm", D, config.norm_eps)
        self.attention = LlamaAttention(config, weights, f"{prefix}.self_attn")
        self.mlp_norm = weights.norm(f"{prefix}.post_attention_layernorm", D, config.norm_eps)
        self.mlp = SwiGLU(
            weights.linear({f"{prefix}.mlp.gate_proj": F, f"{prefix}.mlp.up_proj": F}, D, config.mlp_bias),
            weights.linear({f"{prefix}.mlp.down_proj": D}, F, config.mlp_bias),
        )

    def __call__(self, x_TD: Tensor, angles: tuple[Tensor, Tensor], cache: LayerCache, rows: PagedRows) -> Tensor:
        x_TD = x_TD + self.attention(self.input_norm(x_TD), angles, cache, rows)
        return x_TD + self.mlp(self.mlp_norm(x_TD))


class LlamaForCausalLM:
    """The whole model: embedding, layers, final norm and head."""

    def __init__(self, config: ModelConfig, weights: WeightLoader) -> None:
        self.config = config
        self.embedding = weights.embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config.rope, config.head_dim, weights.form.device)
        self.layers = [LlamaLayer(config, weights, f"model.layers.{i}") for i in range(config.num_layers)]
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
        """Scores of the next token, float32 [R, V], for rows of what ``forward`` returned."""
        return self.head(self.norm(x_RD)).float()
