"""ZAYA1 (Zyphra, 2025): attention behind two short convolutions (CCA, arXiv 2510.04476), and one expert for each token.

The first convolution is of each channel; the second mixes the channels of a head. The mean of a head's queries and keys
before them is added behind. Half of the values are those of the token before. A router sees what those of earlier
layers made of a token. The residual stream is kept in float32.

Shapes: T tokens of the step, R rows whose logits are needed, D model, N heads, K kv heads, H head dim, X experts, Z
numbers of a router, Q = (N + K) H channels of queries and keys, W width of both convolutions together.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from octavo import ops
from octavo.layers.attention_inputs import StepAngles
from octavo.layers.experts import Mixture
from octavo.layers.mlp import gelu
from octavo.layers.moe import ExpertRouter
from octavo.layers.norm import RMSNorm
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.decoder_layer import DecoderLayer, no_feed_forward
from octavo.models.layer_cache import LayerCacheSpec, conv_state
from octavo.models.linear_parts import MatrixRows
from octavo.models.loader import ExpertShape, WeightLoader
from octavo.models.model_config import FULL, SLIDING
from octavo.models.moe_config import MoESettings, read_experts
from octavo.models.olmo import with_local_rope
from octavo.models.parts import DecoderConfig
from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.moe import Routing
from octavo.quant.stored.shard import Section

KINDS = {"hybrid": FULL, "hybrid_sliding": SLIDING}
THETA = {"hybrid": 5e6, "hybrid_sliding": 1e4}
SMALLEST_SQUARE = 1e-30
"""Added to the mean square of a head, which otherwise may be all zeros."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZayaConfig(DecoderConfig):
    moe: MoESettings
    router_size: int
    widths: tuple[int, int]
    """Of the convolutions of channels and of heads."""

    @property
    def has_stages(self) -> bool:
        return False  # the routers' numbers go from layer to layer

    @property
    def stream_size(self) -> int:
        return 2 * (self.hidden_size + self.router_size)  # in float32

    @property
    def mixtures(self) -> tuple[MoESettings, ...]:
        return (self.moe,)


class ScaledSum:
    """``(y + b) * a + (x + d) * c``, with vectors a, b, c and d."""

    def __init__(self, weights: WeightLoader, name: str, size: int) -> None:
        parts = "hidden_states_scale", "hidden_states_bias", "residual_scale", "residual_bias"
        self.parts = [weights.exact(f"{name}.{part}", size) for part in parts]

    def __call__(self, y_TD: Tensor, x_TD: Tensor) -> Tensor:
        """A new tensor of x's type, float32."""
        scale_D, bias_D, kept_D, kept_bias_D = self.parts
        return (y_TD.float() + bias_D) * scale_D + (x_TD + kept_bias_D) * kept_D


class MixedHeads:
    """Queries, keys and values [T, (N + 2 K) H] of all ranks' heads, and of these the ones that this rank has.

    The convolution of channels is computed once for each place in the window of the second one, with its weights moved
    on by as many rows; and of the values it takes the token's own or those of the token before. Its bias is constant,
    so that the second convolution makes a bias of it.
    """

    def __init__(self, config: ZayaConfig, weights: WeightLoader, name: str) -> None:
        D, N, K, H = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = N, K, H
        inner, (first, second), self.channels = f"{name}.qkv_proj", config.widths, (N + K) * H
        rows = {"q_proj": N * H, "k_proj": K * H, "v_proj_current": K * H // 2, "v_proj_delayed": K * H // 2}
        parts = [MatrixRows(f"{inner}.{part}", [Section(count, 1)]) for part, count in rows.items()]
        self.projections = weights.fused(parts, D)
        of_channels_WQ = weights.conv([f"{inner}.conv_qk_depthwise"], [Section(self.channels, 1)], first)
        of_heads = weights.dense(f"{inner}.conv_qk_grouped.weight", self.channels, H, second)
        of_heads_NOIW = of_heads.view(N + K, H, H, second)
        width = first + second - 1
        taps = of_channels_WQ.new_zeros(width, second * self.channels + K * H)
        for w in range(second):
            taps[w : w + first, w * self.channels : (w + 1) * self.channels] = of_channels_WQ
        taps[-1, second * self.channels :][: K * H // 2] = 1
        taps[-2, second * self.channels :][K * H // 2 :] = 1
        self.taps_WC = taps
        self.weight_NOK = of_heads_NOIW.permute(0, 1, 3, 2).reshape(N + K, H, second * H).contiguous()
        bias_NI = weights.exact(f"{inner}.conv_qk_depthwise.bias", self.channels).view(N + K, H)
        moved_NO = torch.einsum("noiw,ni->no", of_heads_NOIW.float(), bias_NI)
        bias_Q = weights.exact(f"{inner}.conv_qk_grouped.bias", self.channels) + moved_NO.flatten()
        self.bias_Q = bias_Q.to(weights.form.dtype)
        self.ones_H = torch.ones(H, dtype=weights.form.dtype, device=weights.form.device)
        factors_K = weights.dense(f"{name}.qk_norm.temp", K)
        self.factors_Q = torch.cat((factors_K.new_ones(N * H), factors_K.repeat_interleave(H)))
        sections = [Section(N * H, N), Section(K * H, K), Section(K * H, K)]
        rows_W = torch.arange(sum(section.num_rows for section in sections))
        self.own_W = weights.own_part(name, rows_W, sections) if weights.collective.size > 1 else None

    def __call__(self, h_TD: Tensor, cache: LayerCache, rows: PagedRows) -> Tensor:
        N, K, H, Q, second = self.num_heads, self.num_kv_heads, self.head_dim, self.channels, self.second
        qkv_TW = self.projections(h_TD)
        qk_TQ = qkv_TW[:, :Q]
        (state,) = cache.states
        inputs_TC = ops.concat(*[qk_TQ] * second, qkv_TW[:, Q:])
        moved_TC = ops.causal_conv(inputs_TC, self.taps_WC, None, state, rows.states)
        *delayed, values_TV = moved_TC.split_with_sizes([Q] * second + [K * H], dim=1)
        by_head = torch.cat([part.view(-1, N + K, H) for part in delayed], dim=2)
        mixed_TQ = ops.head_linear(by_head, self.weight_NOK).flatten(1) + self.bias_Q + self._means(qk_TQ)
        normed_TQ = ops.rms_norm(mixed_TQ.view(-1, H), self.ones_H, SMALLEST_SQUARE).view_as(mixed_TQ)
        found_TW = ops.concat(normed_TQ * self.factors_Q, values_TV)
        return found_TW if self.own_W is None else found_TW[:, self.own_W].contiguous()

    @property
    def second(self) -> int:
        """The width of the convolution of heads."""
        return self.weight_NOK.shape[2] // self.head_dim

    def _means(self, qk_TQ: Tensor) -> Tensor:
        """The mean of each query head and its key head; and for each key head the mean of these."""
        N, K, H = self.num_heads, self.num_kv_heads, self.head_dim
        q_TKGH, k_TKH = qk_TQ[:, : N * H].view(-1, K, N // K, H), qk_TQ[:, N * H :].view(-1, K, H)
        of_queries = (q_TKGH + k_TKH.unsqueeze(2)) * 0.5
        of_keys = functools.reduce(operator.add, of_queries.unbind(2)) / (N // K)
        return torch.cat((of_queries.flatten(1), of_keys.flatten(1)), dim=1)


class CarriedExperts:
    """``experts(h)``, or nothing for tokens that choose the last, which is none.

    The router is a feed-forward layer of numbers [T, Z]: a map of h, and a share of those of the layer before.
    """

    def __init__(self, config: ZayaConfig, weights: WeightLoader, name: str, is_first: bool) -> None:
        D, Z, moe, gate = config.hidden_size, config.router_size, config.moe, f"{name}.gate"
        X, inner = moe.num_experts, f"{gate}.router_mlp"
        self.to_router = weights.replicated(f"{gate}.down_proj", Z, D, has_bias=True)
        self.carried_Z = None if is_first else weights.dense(f"{gate}.router_states_scale", Z)
        self.norm = weights.norm(f"{inner}.norm", Z, config.norm_eps)
        self.maps = [weights.replicated(f"{inner}.fc{i}", Z, Z, has_bias=True) for i in (1, 2)]
        routing = Routing(1, correction_X=weights.exact(f"{gate}.balancing_biases", X + 1))
        self.router = ExpertRouter(None, weights.router(f"{inner}.out_proj", X + 1, Z), routing)
        shape = ExpertShape(X, D, moe.expert_size, moe.activation, num_zero=1)
        order = torch.arange(2 * moe.expert_size).numpy()
        self.experts: Mixture = weights.stacked_experts(f"{name}.experts", shape, order)
        self.num_experts, self.collective = X, weights.collective

    def __call__(self, h_TD: Tensor, carried_TZ: Tensor) -> tuple[Tensor, Tensor]:
        """What is added [T, D], and the router's numbers for the next layer."""
        z_TZ = self.to_router(h_TD)
        if self.carried_Z is not None:
            z_TZ = z_TZ + carried_TZ.to(z_TZ.dtype) * self.carried_Z
        first, second = self.maps
        _, ids_T1, shares_T1 = self.router(gelu(second(gelu(first(z_TZ, norm=self.norm)))))
        ids_T1 = ids_T1.masked_fill(ids_T1 == self.num_experts, -1)
        return self.collective.all_reduce(self.experts(h_TD, ids_T1, shares_T1)), z_TZ


class ZayaLayer(DecoderLayer):
    """The residual stream has the routers' numbers behind it: [T, D + Z], float32."""

    def __init__(self, config: ZayaConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        super().__init__(config, weights, prefix, index)
        D, self.dtype = config.hidden_size, weights.form.dtype
        self.before_mlp = weights.norm(f"{prefix}.post_attention_layernorm", D, config.norm_eps)
        self.add_attended, self.add_experts = (
            ScaledSum(weights, f"{prefix}.post_{part}_residual_scale", D) for part in ("attention", "mlp")
        )
        self.of_experts = CarriedExperts(config, weights, f"{prefix}.mlp", index == 0)
        self.sizes = D, config.router_size

    def load_mixer(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        assert isinstance(config, ZayaConfig)
        part, name = self.part, f"{prefix}.self_attn"
        self.heads = weights.own_heads(self.head_layout(config, weights, prefix, part))
        self.mixed = MixedHeads(config, weights, name)
        self.o_proj = weights.row(f"{name}.o_proj", config.hidden_size, part.num_heads * part.head_dim)
        self.num_gates, self.preparations, self.wide_values = 0, [], None

    def feed_forward(self, *_: Any) -> Any:
        return no_feed_forward  # ``of_experts`` has another signature

    def __call__(self, x_TX: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        x_TD = x_TX[:, : self.sizes[0]].to(self.dtype).contiguous()
        assert isinstance(self.before_attention, RMSNorm)
        qkv_TW = self.mixed(self.before_attention(x_TD), cache, rows)
        attended_TN, x_RX = rows.pick(self.attend(qkv_TW, step, cache, rows), x_TX)
        x_RD, carried_RZ = x_RX.split_with_sizes(self.sizes, dim=1)
        x_RD = self.add_attended(self.o_proj(attended_TN), x_RD)
        added_RD, carried_RZ = self.of_experts(self.before_mlp(x_RD.to(self.dtype)), carried_RZ)
        return torch.cat((self.add_experts(added_RD, x_RD), carried_RZ.float()), dim=1)


class ZayaForCausalLM(Decoder):
    layer_class: Any = ZayaLayer
    config: ZayaConfig

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> ZayaConfig:
        num_layers = keys.size("num_hidden_layers", 40)
        kinds = keys.choices("layer_types", tuple(KINDS), num_layers) or ("hybrid",) * num_layers
        types = tuple(KINDS[kind] for kind in kinds)
        full, local = _ropes(keys)
        keys.must_be({"attention_bias": (False,), "num_experts_per_tok": (1,)})
        size = keys.size("moe_intermediate_size", 2048)
        window = keys.size("sliding_window") if SLIDING in types else None
        keys.pass_over("sliding_window")
        config = read_decoder(
            keys,
            max_len,
            tied=True,
            eps=1e-5,
            head_dim=128,
            ffn_size=size,
            rotary=1.0,
            rope=full,
            windows=(types, window),
            has_bias=False,
        )
        N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
        if K * H % 2:
            raise wrong("head_dim", H, f"such that {K} key heads have an even number of values")
        moe = read_experts(keys, config, count_keys=("num_experts",), num_chosen=1, normalises=False, expert_size=size)
        first, second = (keys.size(f"cca_time{i}", 2) for i in (0, 1))
        if first + second < 3:
            raise wrong("cca_time0", first, "such that it and cca_time1 make 3 at least")
        state = (conv_state(first + second - 1, second * (N + K) * H + K * H, 0),)
        caches = [LayerCacheSpec(K, H, part.attention.window, state=state) for part in config.layers]
        config = with_local_rope(config.with_caches(caches), local, types, max_len, rotary=1.0)
        return dataclasses.replace(config, has_head_bias=keys.flag("lm_head_bias")).extended(
            ZayaConfig, moe=moe, router_size=keys.size("router_hidden_size", 256), widths=(first, second)
        )

    def __init__(self, config: ZayaConfig, weights: WeightLoader) -> None:
        super().__init__(config, weights)
        name, D = "model.input_hidden_states", config.hidden_size
        self.bias_D, self.scale_D = (weights.exact(f"{name}_{part}", D) for part in ("bias", "scale"))
        self.dtype = weights.form.dtype

    def embedded(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        x_TD = (super().embedded(token_ids_T, positions_T).float() + self.bias_D) * self.scale_D
        return torch.nn.functional.pad(x_TD, (0, self.config.router_size))

    def merged(self, x_RX: Tensor) -> Tensor:
        return x_RX[:, : self.config.hidden_size].to(self.dtype).contiguous()


def _ropes(keys: ConfigKeys) -> list[dict[str, Any]]:
    """Rotary keys of layers without a window, and of those with one. Published files have a further ``rope_type``."""
    given = keys.get("rope_parameters") or {}
    both = {kind: part for kind, part in given.items() if kind != "rope_type"} if isinstance(given, Mapping) else given
    for kind, part in both.items() if isinstance(both, Mapping) else (("", both),):
        if kind not in KINDS or not isinstance(part, Mapping):
            raise wrong(f"rope_parameters.{kind}".rstrip("."), part, f"an object, under {' or '.join(KINDS)}")
    share = 1.0 if both else 0.5
    return [{"rope_theta": THETA[kind], "partial_rotary_factor": share, **both.get(kind, {})} for kind in KINDS]
