"""Nemotron-H (arXiv 2504.03624) and Nemotron 3 (NVIDIA, 2025): each layer is Mamba-2, attention without positions, a
feed-forward layer or a mixture of experts, whose activation is the square of ReLU.

Shapes: T tokens of the step, D model, X experts, F the width of an expert.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from octavo.layers.attention import attention
from octavo.layers.experts import Mixture
from octavo.layers.linear import Linear
from octavo.layers.mlp import MLP, squared_relu
from octavo.layers.moe import ExpertRouter
from octavo.layers.norm import RMSNorm
from octavo.models.config import FULL
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.hybrid import (
    LINEAR,
    HybridConfig,
    HybridForCausalLM,
    MambaSizes,
    layer_kinds,
    load_mamba2,
    of_llama,
    read_limits,
)
from octavo.models.layer_cache import LayerCacheSpec, state_layer
from octavo.models.llama import LlamaLayer, read_llama
from octavo.models.loader import ExpertShape, WeightLoader
from octavo.models.moe import MoESettings, read_experts
from octavo.ops.attention import LayerCache, PagedRows
from octavo.ops.collective import Collective
from octavo.ops.moe import Routing, SquaredReLU

DENSE, SPARSE = "mlp", "moe"
LETTERS = {"M": LINEAR, "*": FULL, "-": DENSE, "E": SPARSE}
OLD_NAMES = {"mamba": LINEAR, "attention": FULL}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NemotronHConfig(HybridConfig):
    mamba: MambaSizes
    latent_size: int
    """Width of the inputs and outputs of experts; 0: that of the model."""
    groups: tuple[int, int]
    """Groups of experts, and of those that a token may use."""
    share_scale: float
    mtp_kinds: tuple[str, ...]
    """Kinds of the layers of multi-token prediction."""

    def with_mtp(self) -> NemotronHConfig:
        """Those of ``mtp_kinds``."""
        kinds, caches = (*self.kinds, *self.mtp_kinds), {FULL: LayerCacheSpec(self.num_kv_heads, self.head_dim)}
        moe = self.moe
        if moe is not None:
            moe = dataclasses.replace(moe, is_sparse=tuple(kind == SPARSE for kind in kinds))
        return dataclasses.replace(
            self,
            num_layers=len(kinds),
            kinds=kinds,
            caches=(*self.caches, *(caches.get(kind, state_layer()) for kind in self.mtp_kinds)),
            windows=(*self.windows, *[0] * len(self.mtp_kinds)) if self.windows else (),
            moe=moe,
        )


class LatentMoE:
    """``x + from_latent(experts(to_latent(h))) + shared(h)`` with ``h = norm(x)``; the maps may be absent."""

    def __init__(
        self,
        router: ExpertRouter,
        experts: Mixture,
        shared: MLP,
        latent: tuple[Linear, Linear] | None,
        collective: Collective,
    ) -> None:
        self.router, self.experts, self.shared = router, experts, shared
        self.latent, self.collective = latent, collective

    def __call__(self, x_TD: Tensor) -> Tensor:
        h_TD, ids_TS, shares_TS = self.router(x_TD)
        inputs = h_TD if self.latent is None else self.latent[0](h_TD)
        sum_TD = self.experts(inputs, ids_TS, shares_TS)
        sum_TD = sum_TD if self.latent is None else self.latent[1](sum_TD)
        return self.collective.all_reduce(self.shared(sum_TD, of=h_TD), residual_TD=x_TD)


class NemotronHLayer(LlamaLayer):
    """One of the four parts with its norm; adds to the residual stream."""

    def __init__(self, config: NemotronHConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        D, name, self.kind = config.hidden_size, f"{prefix}.mixer", config.kinds[index]
        self.input_norm = norm = weights.norm(f"{prefix}.norm", D, config.norm_eps)
        self.feed: Callable[[Tensor], Tensor] | None = None
        if self.kind == LINEAR:
            self.mamba = load_mamba2(weights, name, config.mamba, D, norm, config.norm_eps)
            self.o_proj = weights.row(f"{name}.out_proj", D, config.mamba.inner, config.mamba.has_bias)
        elif self.kind == FULL:
            self.heads = self.head_layout(config, weights, name, index)
            self.qkv_proj = self.qkv(config, weights, name)
            self.o_proj = weights.row(f"{name}.o_proj", D, self.heads.sizes[0], config.output_bias)
            self.heads = weights.own_heads(self.heads)
        elif self.kind == DENSE:
            self.feed = _mlp(weights, name, D, config.dense_size, config.mlp_bias, norm)
        else:
            assert config.moe is not None
            self.feed = _mixture(config, config.moe, weights, name, norm)

    def __call__(self, x_TD: Tensor, angles: Any, cache: LayerCache, rows: PagedRows) -> Tensor:
        if self.feed is not None:
            return self.feed(rows.pick(x_TD, x_TD)[1])
        if self.kind == LINEAR:
            mixed = self.mamba(x_TD, cache, rows)
        else:
            mixed = attention(self.qkv_proj(x_TD, norm=self.input_norm), self.heads, None, None, cache, rows)
        mixed, x_TD = rows.pick(mixed, x_TD)
        return self.o_proj(mixed, residual=x_TD)


def _mlp(
    weights: WeightLoader, name: str, hidden_size: int, size: int, has_bias: bool, norm: RMSNorm | None = None
) -> MLP:
    """``down(relu(up(x))^2)``"""
    up = weights.column(f"{name}.up_proj", size, hidden_size, has_bias)
    load_down = weights.partial_row if norm is None else weights.row
    return MLP(norm, up, load_down(f"{name}.down_proj", hidden_size, size, has_bias), squared_relu, None)


def _mixture(config: NemotronHConfig, moe: MoESettings, weights: WeightLoader, name: str, norm: RMSNorm) -> LatentMoE:
    D, X, L, has_bias = config.hidden_size, moe.num_experts, config.latent_size, config.mlp_bias
    if has_bias:
        raise wrong("mlp_bias", True, "false, as layers_block_type has layers with experts")
    routing = Routing(
        moe.num_chosen,
        moe.normalises,
        "sigmoid",
        config.share_scale,
        config.groups,
        correction_X=weights.exact(f"{name}.gate.e_score_correction_bias", X),
    )
    router = ExpertRouter(norm, weights.router(f"{name}.gate", X, D), routing)
    experts = weights.experts(f"{name}.experts", ExpertShape(X, L or D, moe.expert_size, SquaredReLU()))
    shared = _mlp(weights, f"{name}.shared_experts", D, moe.shared_size, has_bias)
    latent = None
    if L:
        down, up = f"{name}.fc1_latent_proj", f"{name}.fc2_latent_proj"
        latent = weights.replicated(down, L, D), weights.replicated(up, D, L)
    return LatentMoE(router, experts, shared, latent, weights.collective)


def _kinds(keys: ConfigKeys) -> tuple[str, ...]:
    listed = keys.get("layers_block_type") or keys.get("layer_types")
    return _listed("layers_block_type", keys.get("hybrid_override_pattern"), listed, (LINEAR, FULL, DENSE, SPARSE))


def _mtp_kinds(keys: ConfigKeys) -> tuple[str, ...]:
    """States of drafts that are rejected could not be taken back, so that there are none."""
    name = "mtp_layers_block_type"
    pattern, listed = keys.get("mtp_hybrid_override_pattern"), keys.get(name)
    if pattern is None and listed is None:
        return (FULL, SPARSE)
    return _listed(name, pattern, listed, (FULL, DENSE, SPARSE))


def _listed(name: str, pattern: Any, listed: Any, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Kinds of layers, as a list or as a word of letters."""
    if listed is None and isinstance(pattern, str) and set(pattern) <= set(LETTERS):
        listed = [LETTERS[letter] for letter in pattern]
    if not isinstance(listed, list | tuple):
        raise wrong(name, listed, "a list of the kinds of the layers")
    kinds = [OLD_NAMES.get(str(kind), kind) for kind in listed]
    return layer_kinds(ConfigKeys({name: kinds}), name, allowed, len(kinds))


class NemotronHForCausalLM(HybridForCausalLM):
    layer_class = NemotronHLayer
    names = ("backbone.embeddings", "backbone.layers", "backbone.norm_f", "lm_head")

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> NemotronHConfig:
        kinds = _kinds(keys)
        eps = keys.number("layer_norm_epsilon", keys.number("norm_eps", 1e-5))
        plain = read_llama(
            keys, max_len, eps=eps, head_dim=128, windows=((FULL,) * len(kinds), None), num_layers=len(kinds)
        )
        if plain.num_layers != len(kinds):
            raise wrong("num_hidden_layers", plain.num_layers, f"the number of kinds of layers, {len(kinds)}")
        keys.choice("mlp_hidden_act", {"relu2": None}, "relu2")
        keys.choice("mamba_hidden_act", {"silu": None}, "silu")
        mamba = MambaSizes(
            num_heads=keys.size("mamba_num_heads", 128),
            head_dim=keys.size("mamba_head_dim", 64),
            num_groups=keys.size("n_groups", 8),
            state_size=keys.size("ssm_state_size", 128),
            width=keys.size("conv_kernel", 4, low=2),
            has_conv_bias=keys.flag("use_conv_bias", True),
            has_bias=keys.flag("use_bias"),
            limits=(keys.get("time_step_min", 0.001), read_limits(keys)[1]),
        )
        moe, mtp_kinds = None, _mtp_kinds(keys)
        if SPARSE in kinds or (keys.get("num_nextn_predict_layers") and SPARSE in mtp_kinds):
            moe = read_experts(
                keys,
                len(kinds),
                plain.ffn_size,
                plain.activation,
                count_keys=("n_routed_experts",),
                num_chosen=2,
                expert_size=keys.size("moe_intermediate_size", 7688),
                normalises=keys.flag("norm_topk_prob", True),
                is_sparse=tuple(kind == SPARSE for kind in kinds),
                shared_size=keys.size("moe_shared_expert_intermediate_size", 7688) * keys.size("n_shared_experts", 1),
            )
        for key in UNUSED:
            keys.get(key)
        of_attention = LayerCacheSpec(plain.num_kv_heads, plain.head_dim)
        caches = {LINEAR: mamba.cache, FULL: of_attention}
        fields = of_llama(plain) | {"moe": moe, "ffn_size": moe.widest if moe else plain.ffn_size}
        return NemotronHConfig(
            **fields,
            kinds=kinds,
            caches=tuple(caches.get(kind, state_layer()) for kind in kinds),
            has_rope=False,
            mamba=mamba,
            latent_size=keys.get("moe_latent_size", 0),
            groups=(keys.size("n_group", 1), keys.size("topk_group", 1)),
            share_scale=keys.number("routed_scaling_factor", 1.0),
            mtp_kinds=mtp_kinds,
        )


UNUSED = (
    "n_routed_experts",
    "n_shared_experts",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_overlap",
    "num_experts_per_tok",
    "norm_topk_prob",
    "num_logits_to_keep",
    "use_mamba_kernels",
    "expand",
    "time_step_max",
    "time_step_floor",
    "chunk_size",
    "mamba_proj_bias",
    "mamba_ssm_cache_dtype",
    "residual_in_fp32",
    "rescale_prenorm_residual",
    "num_nextn_predict_layers",
    "sliding_window",
    "hybrid_override_pattern",
    "layers_block_type",
    "layer_types",
)
"""Keys of experts where a model has none, of training, and of other implementations."""
