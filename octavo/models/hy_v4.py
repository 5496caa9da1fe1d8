"""Hy4 (Tencent): latent attention to what an indexer chose, with sinks and gates, over several residual streams.

Before each part of a layer a token's streams are summed with weights of its own, and its result is added to each stream
as often as other such weights say ("independent hyper-connections": those of arXiv 2512.24880, without mixing streams).

Shapes: T tokens of the step, R rows whose logits are needed, D model, S streams, X = S D, N heads.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from octavo import ops
from octavo.layers.attention_inputs import StepAngles
from octavo.layers.mlp import MLP
from octavo.layers.moe import MoE, SharedExpert
from octavo.models.config_keys import ONE_ACTIVATION, ConfigKeys
from octavo.models.decoder_layer import FeedForward
from octavo.models.deepseek import read_deepseek
from octavo.models.deepseek_sparse import DeepseekV32ForCausalLM, SparseConfig, SparseLayer, read_owners, read_sparse
from octavo.models.loader import WeightLoader
from octavo.models.parts import DecoderConfig, ExpertsPart, GatePart
from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.elementwise import sigmoid
from octavo.ops.hyper_connections import in_parts
from octavo.ops.moe import CappedSwish
from octavo.quant.stored.shard import Section


@dataclasses.dataclass(frozen=True, kw_only=True)
class HYV4Config(SparseConfig):
    num_streams: int
    magnitude: float
    """Factor of how much of a part's result each stream gets."""
    stream_weight_eps: float

    @property
    def has_stages(self) -> bool:
        return False  # between layers are all streams


class Streams:
    """How the streams of a token are summed for a part of a layer, and what each gets of its result."""

    def __init__(self, config: HYV4Config, weights: WeightLoader, name: str, num_scales: int) -> None:
        self.num_streams, self.eps, self.magnitude = config.num_streams, config.stream_weight_eps, config.magnitude
        count, width = num_scales * config.num_streams, config.num_streams * config.hidden_size
        self.weight_MX = weights.exact(f"{name}_fn", count, width)
        self.base_M = weights.exact(f"{name}_base", count)
        self.scale_M = weights.exact(f"{name}_scale", num_scales).repeat_interleave(config.num_streams)
        self.ones_X, self.norm_eps = torch.ones_like(self.weight_MX[0]), config.norm_eps

    def __call__(self, x_TX: Tensor) -> tuple[Tensor, ...]:
        """The weighted sum [T, D], and what the part's result is multiplied by for each stream, float32 [T, S]."""
        return in_parts(self._of_rows, x_TX)

    def _of_rows(self, x_TX: Tensor) -> tuple[Tensor, Tensor]:
        S, wide_TX = self.num_streams, x_TX.float()
        given_TM = ops.linear(ops.rms_norm(wide_TX, self.ones_X, self.norm_eps), self.weight_MX)
        weights_TM = sigmoid(given_TM * self.scale_M + self.base_M)
        before_TS, after_TS = weights_TM[:, :S] + self.eps, weights_TM[:, S:] * self.magnitude + self.eps
        sum_TD = (before_TS.unsqueeze(2) * wide_TX.view(len(x_TX), S, x_TX.shape[1] // S)).sum(dim=1)
        return sum_TD.to(x_TX.dtype), after_TS


def added(y_TD: Tensor, x_TX: Tensor, after_TS: Tensor) -> Tensor:
    """The next streams, with a part's result."""
    return in_parts(_added_rows, y_TD, x_TX, after_TS)[0]


def _added_rows(y_TD: Tensor, x_TX: Tensor, after_TS: Tensor) -> tuple[Tensor]:
    of_each_TX = (after_TS.unsqueeze(2) * y_TD.float().unsqueeze(1)).flatten(1)
    return ((of_each_TX + x_TX.float()).to(x_TX.dtype),)


def _alone(y_TD: Tensor, x_TD: Tensor) -> Tensor:
    """What a feed-forward layer gives: its input is no stream."""
    return y_TD


class HYV4Layer(SparseLayer):
    """Streams are side by side, [T, S D]."""

    def __init__(self, config: HYV4Config, weights: WeightLoader, prefix: str, index: int) -> None:
        super().__init__(config, weights, prefix, index)
        assert isinstance(self.mlp, MLP | MoE)
        self.mlp.after = _alone
        self.around_attention, self.around_mlp = (
            Streams(config, weights, f"{prefix}.hc_pre.hc_{part}_layer.hc", 2) for part in ("attn", "mlp")
        )

    def load_mixer(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        super().load_mixer(config, weights, prefix, index)
        N = config.num_heads
        sinks_N = weights.exact_part(f"{prefix}.self_attn.learnable_sink_param", Section(N, N))
        self.latent_heads = self.latent_heads._replace(sinks_N=sinks_N)

    def feed_forward(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> FeedForward:
        ups = _stored_names(weights, prefix, config.names.ups)
        return super().feed_forward(
            dataclasses.replace(config, names=config.names._replace(ups=ups)), weights, prefix, index
        )

    def shared_expert(
        self, config: DecoderConfig, part: ExpertsPart, weights: WeightLoader, prefix: str
    ) -> SharedExpert:
        part = dataclasses.replace(part, shared=_stored_names(weights, prefix, part.shared))
        return super().shared_expert(config, part, weights, prefix)

    def __call__(self, x_TX: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        sum_TD, after_TS = self.around_attention(x_TX)
        mixed_TN, x_RX = rows.pick(self.mix(sum_TD, step, cache, rows), x_TX)
        after_RS = rows.pick(after_TS, x_TX)[0]
        x_RX = added(self.o_proj(mixed_TN), x_RX, after_RS)
        sum_RD, after_RS = self.around_mlp(x_RX)
        return added(self.mlp(sum_RD), x_RX, after_RS)


def _stored_names(weights: WeightLoader, prefix: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """These, or those that the library writes, to which all gates are alike."""
    others = tuple(name.replace("gate_proj", "linear_gate") for name in names)
    return others if weights.tensors.has_module(f"{prefix}.{others[0]}") else names


class HYV4ForCausalLM(DeepseekV32ForCausalLM):
    layer_class: Any = HYV4Layer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> HYV4Config:
        defaults: dict[str, Any] = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
        defaults |= {"routed_scaling_factor": 2.827, "q_lora_rank": 1536, "v_head_dim": 256, "rms_norm_eps": 1e-5}
        given = {key: value for key, value in keys.values.items() if value is not None}
        own = keys.over({**defaults, "rope_interleave": False, **given})
        own.must_be({"rope_interleave": (False,), **ONE_ACTIVATION})
        own.pass_over("learnable_sink_init")
        config = read_deepseek(own, max_len, "sigmoid", stacked=("gate_up_proj", "down_proj"), shared_activation="silu")
        limit, parts = own.number("swiglu_limit", 10.0), [part.mlp for part in config.layers]
        config = config.with_mlps(lambda i: _limited(parts[i], limit))
        config = config.with_attention(gate=GatePart("self_attn.linear_gate"), value_dim=config.value_size)
        has_own = read_owners(own, config.num_layers, [i == 0 or i % 4 == 1 for i in range(config.num_layers)])
        more = {"rotates_last": True, "eps": config.norm_eps}
        return read_sparse(own, config, 16, has_own=has_own, **more).extended(
            HYV4Config,
            num_streams=own.size("hc_mult", 4),
            magnitude=own.number("hc_magnitude", 2.0),
            stream_weight_eps=own.number("hc_eps", 1e-6),
        )

    def __init__(self, config: HYV4Config, weights: WeightLoader) -> None:
        super().__init__(config, weights)
        self.num_streams = config.num_streams
        self.last_streams = Streams(config, weights, "model.hc_pre.hc_head.hc_head", 1)
        weights.tensors.leave_out("model.mtp_layers.")

    @staticmethod
    def own_name(name: str) -> str:
        """That of a weight in published checkpoints; the library writes others for a model without a head."""
        end = name.removeprefix("hc_head.hc_pre.hc_head_")
        return name if end == name else f"hc_pre.hc_head.hc_head_{end}"

    def embedded(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        return super().embedded(token_ids_T, positions_T).repeat(1, self.num_streams)

    def merged(self, x_RX: Tensor) -> Tensor:
        return self.last_streams(x_RX)[0]


def _limited(part: Any, limit: float) -> Any:
    """A layer's experts with gates and ups that are limited; ``None`` for a dense layer."""
    if not isinstance(part, ExpertsPart):
        return None
    activation = CappedSwish(limit, limit / (1 + math.exp(-limit)))
    return dataclasses.replace(part, moe=dataclasses.replace(part.moe, activation=activation))
