"""MiniMax-Text-01 (arXiv 2501.08313) and MiniMax-M1 (arXiv 2506.13585): in most layers lightning attention, in the
others softmax attention, in all of them experts. The residual stream is normalised before each part of a layer.

Shapes: T tokens of the step, D model, N heads, H head dim.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch import Tensor

from octavo import ops
from octavo.layers.attention_inputs import StepAngles
from octavo.layers.moe import MoE
from octavo.layers.norm import Norm
from octavo.models.config_keys import ONE_ACTIVATION, ConfigKeys, wrong
from octavo.models.decoder import NO_WINDOWS, Decoder, read_decoder
from octavo.models.decoder_layer import DecoderLayer, FeedForward
from octavo.models.hybrid import LINEAR
from octavo.models.layer_cache import recurrent_state, state_layer
from octavo.models.linear_parts import MatrixRows
from octavo.models.loader import WeightLoader
from octavo.models.mixtral import EXPERTS
from octavo.models.model_config import FULL
from octavo.models.moe_config import read_experts
from octavo.models.parts import DecoderConfig, ExpertsPart, Names
from octavo.models.qwen3_next import by_part
from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.moe import Routing
from octavo.quant.stored.shard import Section

NAMES = Names(before_mlp=None)
"""What is before the experts normalises the residual stream itself."""
LIGHTNING_NORM_EPS = 1e-6
"""Of the norm over the outputs of all heads, independent of ``rms_norm_eps``."""
DECAYS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
"""Constants that transformers writes into checkpoints."""
Factors = tuple[float, float]
"""Of the normalised residual stream, and of what is added to it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiniMaxConfig(DecoderConfig):
    factors: dict[str, Factors]
    """Those of each kind of layer, and of the experts."""


class MiniMaxLayer(DecoderLayer):
    def load_mixer(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        assert isinstance(config, MiniMaxConfig)
        D, name = config.hidden_size, f"{prefix}.self_attn"
        self.is_lightning = config.layers[index].is_recurrent
        self.factors, self.mlp_factors = config.factors[LINEAR if self.is_lightning else FULL], config.factors["mlp"]
        self.mlp_norm = weights.norm(f"{prefix}.post_attention_layernorm", D, config.norm_eps)
        if not self.is_lightning:
            super().load_mixer(config, weights, prefix, index)
            return
        N, width = config.num_heads, config.num_heads * config.head_dim
        part = Section(width, N)
        fused = MatrixRows(f"{name}.qkv_proj", [part] * 3, by_part(N, [config.head_dim] * 3))
        self.qkvg_proj = weights.fused([fused, MatrixRows(f"{name}.output_gate", [part])], D)
        self.lightning_norm = weights.head_norm(f"{name}.norm", N, config.head_dim, LIGHTNING_NORM_EPS)
        self.o_proj = weights.row(f"{name}.out_proj", D, width)
        self.decay_N = own_decays(config, weights, index)
        for decay in DECAYS:
            weights.tensors.leave_out(f"{name}.{decay}")

    def mixture(
        self, config: DecoderConfig, part: ExpertsPart, weights: WeightLoader, prefix: str, before: Norm | None
    ) -> FeedForward:
        moe = super().mixture(config, part, weights, prefix, before)
        assert isinstance(moe, MoE)
        moe.after = partial(_weighted, self.mlp_factors)
        return moe

    def lightning(self, h_TD: Tensor, cache: LayerCache, rows: PagedRows) -> Tensor:
        """The gated outputs of this device's heads, [T, N H]."""
        width = 3 * len(self.decay_N) * cache.states[0].shape[-1]
        qkv, gate_TN = self.qkvg_proj(h_TD).tensor_split([width], dim=-1)
        out_TN = ops.linear_attention(qkv, self.decay_N, cache.states[0], rows.states, "silu")
        return ops.sigmoid_and_mul(gate_TN, self.lightning_norm(out_TN))

    def __call__(self, x_TD: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        h_TD = self.input_norm(x_TD)
        if self.is_lightning:
            mixed = self.lightning(h_TD, cache, rows)
        else:
            mixed = self.attend(self.qkv_proj(h_TD), step, cache, rows)
        mixed, h_TD = rows.pick(mixed, h_TD)
        return self.mlp(self.mlp_norm(_weighted(self.factors, self.o_proj(mixed), h_TD)))


def _weighted(factors: Factors, added_TD: Tensor, kept_TD: Tensor) -> Tensor:
    kept, added = factors
    return ops.scaled(kept_TD, kept, ops.scaled(added_TD, added))


def own_decays(config: DecoderConfig, weights: WeightLoader, index: int) -> Tensor:
    """The decay of each of this device's heads: e to the power of minus ALiBi's slopes, less from layer to layer."""
    N, own, rank = config.num_heads, weights.num_own(config.num_heads), weights.collective.rank
    share = 1 - index / (config.num_layers - 1 + 1e-5) + 1e-5
    slopes_N = 2.0 ** (-8.0 / N * torch.arange(1, N + 1, dtype=torch.float64)) * share
    return torch.exp(-slopes_N)[rank * own : (rank + 1) * own].to(weights.form.device, torch.float32)


class MiniMaxForCausalLM(Decoder):
    layer_class = MiniMaxLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        """Keys are those of transformers, or those of MiniMax's own code."""
        keys.must_be(ONE_ACTIVATION)
        num_layers = keys.size("num_hidden_layers")
        head_dim = keys.size("head_dim", keys.size("hidden_size") // keys.size("num_attention_heads"))
        rotary = None if keys.get("rotary_dim") is None else keys.size("rotary_dim") / head_dim
        config = read_decoder(keys, max_len, eps=1e-5, windows=NO_WINDOWS, rotary=rotary, names=NAMES)
        if keys.get("shared_intermediate_size"):
            raise wrong("shared_intermediate_size", keys.get("shared_intermediate_size"), "0")
        if not keys.flag("postnorm", True):
            raise wrong("postnorm", False, "true")
        listed = keys.get("attn_type_list")
        kinds = keys.choices("layer_types", (LINEAR, FULL), num_layers)
        if kinds is None and listed is not None:
            if not isinstance(listed, list | tuple) or len(listed) != num_layers or not set(listed) <= {0, 1}:
                raise wrong("attn_type_list", listed, f"a list of {num_layers}, 0 for lightning attention, else 1")
            kinds = tuple(FULL if kind else LINEAR for kind in listed)
        kinds = kinds or tuple(FULL if (i + 1) % 2 else LINEAR for i in range(num_layers))
        keys.pass_over("block_size", "shared_moe_mode", "attn_type_list")
        moe = read_experts(keys, config, count_keys=("num_local_experts",), num_chosen=2, normalises=True)
        part = ExpertsPart(moe=moe, routing=Routing(moe.num_chosen, moe.normalises), **EXPERTS)
        N, H = config.num_heads, config.head_dim
        of_lightning = state_layer(recurrent_state(N, H, H, N))
        config = config.with_experts(part).with_caches([of_lightning if kind == LINEAR else None for kind in kinds])
        return config.extended(
            MiniMaxConfig,
            factors={
                LINEAR: _factors(keys, "linear_attn", "linear_attention"),
                FULL: _factors(keys, "full_attn", "full_attention"),
                "mlp": _factors(keys, "mlp", "mlp"),
            },
        )


def _factors(keys: ConfigKeys, name: str, old_name: str) -> Factors:
    old = (keys.number(f"layernorm_{old_name}_{part}", 1.0) for part in ("alpha", "beta"))
    alpha, beta = (
        keys.number(f"{name}_{part}_factor", default) for part, default in zip(("alpha", "beta"), old, strict=True)
    )
    return alpha, beta
