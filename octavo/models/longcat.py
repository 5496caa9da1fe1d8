"""LongCat-Flash (Meituan, arXiv 2509.01322): latent attention and a dense feed-forward layer twice in each layer, and
experts beside the second half of it. Some experts give what they get, and compute nothing.

Here each half is a layer. The first gives two streams side by side: the residual stream, and what the experts made,
which the second adds at its end.

Shapes: T tokens of the step, D model, X experts, Z of them that compute nothing, F the width of an expert.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from octavo.layers.attention_inputs import StepAngles
from octavo.layers.experts import Mixture
from octavo.layers.mlp import MLP
from octavo.layers.moe import ExpertRouter
from octavo.layers.output_mlp import output_mlp
from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import Decoder
from octavo.models.deepseek import DeepseekConfig, DeepseekLayer, read_latent
from octavo.models.loader import ExpertShape, WeightLoader
from octavo.models.moe_config import MoESettings, read_experts
from octavo.models.parts import Names
from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.collective import Collective
from octavo.ops.moe import Routing

KEYS = {
    "intermediate_size": "ffn_hidden_size",
    "num_experts_per_tok": "moe_topk",
    "moe_intermediate_size": "expert_ffn_hidden_size",
}
"""Usual keys, and those of the family."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongcatConfig(DeepseekConfig):
    moe: MoESettings
    num_zero: int
    """Experts that compute nothing, behind the others."""
    routing: Routing
    latent_factor: float
    """Of normed latents."""

    @property
    def has_stages(self) -> bool:
        return False  # halves of a layer have names in common

    @property
    def num_stored_layers(self) -> int:
        return self.num_layers // 2

    @property
    def mixtures(self) -> tuple[MoESettings, ...]:
        return (self.moe,)


class ZeroExperts:
    """``experts(h)``, and ``h`` times the shares of the experts that compute nothing."""

    def __init__(self, router: ExpertRouter, experts: Mixture, num_experts: int, collective: Collective) -> None:
        self.router, self.experts, self.num_experts, self.collective = router, experts, num_experts, collective

    def __call__(self, h_TD: Tensor) -> Tensor:
        _, ids_TS, shares_TS = self.router(h_TD)
        is_zero_TS = ids_TS >= self.num_experts
        kept_T1 = shares_TS.masked_fill(~is_zero_TS, 0.0).sum(dim=1, keepdim=True)
        own_TD = self.experts(h_TD, ids_TS.masked_fill(is_zero_TS, -1), shares_TS)
        return self.collective.all_reduce(own_TD, residual_TD=(h_TD * kept_T1).to(h_TD.dtype))


class LongcatLayer(DeepseekLayer):
    def __init__(self, config: LongcatConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        half, layer, eps = index % 2, f"{config.names.layers}.{index // 2}", config.stream_eps
        self.is_first, norm = half == 0, f"post_attention_layernorm.{half}"
        names = Names(
            before_attention=f"input_layernorm.{half}",
            output=f"self_attn.{half}.o_proj",
            before_mlp=None if self.is_first else norm,  # the experts have the same input
            ups=(f"mlps.{half}.gate_proj", f"mlps.{half}.up_proj"),
            down=f"mlps.{half}.down_proj",
        )
        super().__init__(dataclasses.replace(config, names=names), weights, layer, index)
        latent = self.latent_heads
        norm_L = (latent.norm_L.float() * config.latent_factor).to(latent.norm_L.dtype)
        self.latent_heads = latent._replace(norm_L=norm_L)
        if self.is_first:
            self.mlp_norm = weights.norm(f"{layer}.{norm}", config.hidden_size, eps)
            self.moe = _load_experts(config, weights, f"{layer}.mlp")

    def __call__(self, x_TD: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        if self.is_first:
            assert isinstance(self.mlp, MLP)
            x_TD = self.o_proj(self.mix(x_TD, step, cache, rows), residual=x_TD)
            h_TD = self.mlp_norm(x_TD)
            added_TD = self.moe(h_TD)
            return torch.cat((self.mlp(x_TD, of=h_TD), added_TD), dim=1)
        x_TD, added_TD = (part.contiguous() for part in x_TD.chunk(2, dim=1))
        mixed_TN, x_RD = rows.pick(self.mix(x_TD, step, cache, rows), x_TD)
        added_RD = rows.pick(added_TD, x_TD)[0]
        return output_mlp(self.o_proj, self.mlp, mixed_TN, x_RD) + added_RD


def _load_experts(config: LongcatConfig, weights: WeightLoader, name: str) -> ZeroExperts:
    D, X, Z, F = config.hidden_size, config.moe.num_experts, config.num_zero, config.moe.expert_size
    routing = config.routing._replace(correction_X=weights.exact(f"{name}.router.e_score_correction_bias", X + Z))
    router = ExpertRouter(None, weights.router(f"{name}.router.classifier", X + Z, D), routing)
    weights.tensors.leave_out(*(f"{name}.experts.{i}." for i in range(X, X + Z)))  # transformers writes halves of them
    experts = weights.experts(f"{name}.experts", ExpertShape(X, D, F, config.moe.activation, num_zero=Z))
    return ZeroExperts(router, experts, X, weights.collective)


class LongcatFlashForCausalLM(Decoder):
    layer_class: Any = LongcatLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> LongcatConfig:
        num_layers, given = keys.size("num_layers", 28), {own: keys.get(other) for own, other in KEYS.items()}
        values = {own: value for own, value in given.items() if value is not None}
        values |= {"num_hidden_layers": 2 * num_layers, "q_lora_rank": keys.get("q_lora_rank", 1536)}
        inner = keys.over({**keys.values, **values})
        keys.must_be({"attention_method": ("MLA",), "router_bias": (False,), "zero_expert_type": ("identity",)})
        keys.must_be({"norm_topk_prob": (False,)})
        keys.pass_over("num_nextn_predict_layers", "qk_head_dim", "router_dtype", "num_hidden_layers")
        config = read_latent(inner, max_len)
        moe = read_experts(
            inner,
            config,
            count_keys=("n_routed_experts", "num_local_experts"),
            num_chosen=12,
            normalises=False,
            expert_size=inner.size("moe_intermediate_size", 2048),
        )
        D = config.hidden_size
        scales = {rank: keys.flag(f"mla_scale_{rank}_lora", True) for rank in ("q", "kv")}
        query_factor = (D / config.query_rank) ** 0.5 if scales["q"] and config.query_rank else 1.0
        latent_factor = (D / config.latent_size) ** 0.5 if scales["kv"] else 1.0
        scale = config.layers[0].attention.scale * query_factor
        return dataclasses.replace(config.with_attention(scale=scale), ffn_size=moe.widest).extended(
            LongcatConfig,
            moe=moe,
            num_zero=keys.size("zero_expert_num", 0, low=0),
            routing=Routing(moe.num_chosen, scale=keys.number("routed_scaling_factor", 1.0)),
            latent_factor=latent_factor,
        )

    def __init__(self, config: LongcatConfig, weights: WeightLoader) -> None:
        super().__init__(config, weights)
        weights.tensors.leave_out("model.mtp.")
