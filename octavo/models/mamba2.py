"""Mamba-2 (arXiv 2405.21060): layers with recurrent state alone."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from octavo.layers.mamba import Mamba
from octavo.layers.mamba2 import Mamba2
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import DefaultRope
from octavo.models.config import architecture
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.hybrid import (
    LINEAR,
    HybridConfig,
    HybridForCausalLM,
    MambaSizes,
    ScanSizes,
    load_mamba2,
    read_limits,
)
from octavo.models.llama import LlamaLayer
from octavo.models.loader import WeightLoader
from octavo.ops.attention import LayerCache, PagedRows
from octavo.weights.generation_config import token_ids

LONGEST = 1 << 20
"""Tokens of a context, where the configuration states no limit: none is built in."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentConfig(HybridConfig):
    """Of a model whose layers are all those of Mamba-2, or of Mamba."""

    mamba: MambaSizes | ScanSizes


class Mamba2Layer(LlamaLayer):
    def __init__(self, config: RecurrentConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        D, name = config.hidden_size, f"{prefix}.mixer"
        norm = weights.norm(f"{prefix}.norm", D, config.norm_eps)
        self.mamba = self.mixer(config, weights, name, norm)
        self.o_proj = weights.row(f"{name}.out_proj", D, config.mamba.inner, config.mamba.has_bias)

    def mixer(self, config: RecurrentConfig, weights: WeightLoader, name: str, norm: RMSNorm) -> Mamba2 | Mamba:
        """The layer without its output projection."""
        assert isinstance(config.mamba, MambaSizes)
        return load_mamba2(weights, name, config.mamba, config.hidden_size, norm, config.norm_eps)

    def __call__(self, x_TD: Tensor, angles: Any, cache: LayerCache, rows: PagedRows) -> Tensor:
        mixed, x_TD = rows.pick(self.mamba(x_TD, cache, rows), x_TD)
        return self.o_proj(mixed, residual=x_TD)


class Mamba2ForCausalLM(HybridForCausalLM):
    layer_class = Mamba2Layer
    names = ("backbone.embeddings", "backbone.layers", "backbone.norm_f", "lm_head")

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> RecurrentConfig:
        mamba = MambaSizes(
            num_heads=keys.size("num_heads", 128),
            head_dim=keys.size("head_dim", 64),
            num_groups=keys.size("n_groups", 8),
            state_size=keys.size("state_size", 128),
            width=keys.size("conv_kernel", 4, low=2),
            has_conv_bias=keys.flag("use_conv_bias", True),
            has_bias=keys.flag("use_bias"),
            limits=read_limits(keys),
        )
        D = keys.size("hidden_size")
        if mamba.inner != keys.size("expand", 2) * D:
            raise wrong("expand", mamba.inner / D, "the ratio of num_heads * head_dim to hidden_size")
        keys.get("time_step_rank")
        return read_recurrent(keys, mamba, mamba.num_heads)


def read_recurrent(
    keys: ConfigKeys, mamba: MambaSizes | ScanSizes, num_heads: int | None = None, *, tied: bool = False
) -> RecurrentConfig:
    """The configuration of a model of such layers alone; ``num_heads``: by which ranks divide them, if not by channels;
    ``tied``: whether the head is the embedding, by default."""
    keys.choice("hidden_act", {"silu": None}, "silu")
    for key in UNUSED:
        keys.get(key)
    num_layers, heads = keys.size("num_hidden_layers"), num_heads or mamba.inner
    return RecurrentConfig(
        architecture=architecture(keys),
        vocab_size=keys.size("vocab_size"),
        hidden_size=keys.size("hidden_size"),
        ffn_size=mamba.inner,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=2,
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        max_position_embeddings=keys.size("max_position_embeddings", LONGEST),
        tie_word_embeddings=keys.flag("tie_word_embeddings", tied),
        eos_token_ids=token_ids({"eos_token_id": keys.get("eos_token_id")}, "eos_token_id"),
        rope=DefaultRope(10_000.0),
        rotary_width=2,
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
        activation="silu",
        kinds=(LINEAR,) * num_layers,
        caches=(mamba.cache,) * num_layers,
        has_rope=False,
        mamba=mamba,
    )


UNUSED = (
    "residual_in_fp32",
    "rescale_prenorm_residual",
    "time_step_min",
    "time_step_max",
    "time_step_floor",
    "chunk_size",
    "layer_types",
    "rms_norm",
    "norm_before_gate",
)
"""Keys of training, of other implementations, and what all checkpoints have alike."""
