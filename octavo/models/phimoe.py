"""Phi-3.5-MoE (arXiv 2404.14219): LayerNorms, biases everywhere, and two experts chosen one after the other.

The second expert is chosen without the first, and each one's share is a softmax over the logits that are within a
bound of the largest (SparseMixer, arXiv 2310.00811).

Shapes: T tokens, D model, X experts.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from octavo.layers.moe import ExpertRouter, MoE
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.decoder_layer import DecoderLayer, FeedForward
from octavo.models.loader import WeightLoader
from octavo.models.mixtral import EXPERTS
from octavo.models.model_config import FULL, SLIDING
from octavo.models.moe_config import read_experts
from octavo.models.parts import DecoderConfig, ExpertsPart, NormPart
from octavo.models.rope_keys import rope_values
from octavo.ops.moe import Routing


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhimoeConfig(DecoderConfig):
    jitter: float
    """Half the bound within which logits count, relative to the larger absolute value."""


class SparseMixer(ExpertRouter):
    """Chooses two experts."""

    takes_given = False

    def __init__(self, router: ExpertRouter, jitter: float) -> None:
        super().__init__(router.norm, router.weight_XD, router.routing)
        self.jitter = jitter

    def select(self, x_TD: Tensor, given_TS: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        assert given_TS is None, "its shares are of the order in which it chooses"
        h_TD = x_TD if self.norm is None else self.norm(x_TD)
        logits_TX = torch.nn.functional.linear(h_TD.float(), self.weight_XD.float())
        left_TX, ids, shares = logits_TX, [], []
        for _ in range(self.routing.num_chosen):
            best_T1, chosen_T1 = left_TX.max(dim=-1, keepdim=True)
            bound_TX = logits_TX.abs().maximum(best_T1)
            is_far_TX = (best_T1 - logits_TX) / bound_TX > 2 * self.jitter
            near_TX = left_TX.masked_fill(is_far_TX, float("-inf"))
            ids.append(chosen_T1)
            shares.append(near_TX.softmax(dim=-1).gather(1, chosen_T1))
            left_TX = left_TX.scatter(1, chosen_T1, float("-inf"))
        return h_TD, torch.cat(ids, dim=1), torch.cat(shares, dim=1)


class PhimoeLayer(DecoderLayer):
    def feed_forward(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> FeedForward:
        moe = super().feed_forward(config, weights, prefix, index)
        assert isinstance(moe, MoE)
        assert isinstance(config, PhimoeConfig)
        moe.router = SparseMixer(moe.router, config.jitter)
        return moe


class PhimoeForCausalLM(Decoder):
    layer_class = PhimoeLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        window = keys.get("sliding_window")
        kinds = [FULL if window is None else SLIDING] * keys.size("num_hidden_layers")
        config = read_decoder(
            keys,
            max_len,
            eps=1e-5,
            theta=1e6,
            rope=phi_rope(keys),
            windows=(kinds, None if window is None else keys.size("sliding_window")),
            norm=NormPart(is_layer_norm=True),
            mlp_bias=False,
        )
        keys.get("input_jitter_noise")
        moe = read_experts(keys, config, count_keys=("num_local_experts",), num_chosen=2, normalises=False)
        if moe.num_chosen != 2:
            raise wrong("num_experts_per_tok", moe.num_chosen, "2, which SparseMixer chooses")
        part = ExpertsPart(moe=moe, routing=Routing(moe.num_chosen), **EXPERTS)
        config = dataclasses.replace(config.with_experts(part), has_head_bias=keys.flag("lm_head_bias"))
        has_jitter = keys.get("router_jitter_noise", 0.01) != 0
        jitter = keys.number("router_jitter_noise", 0.01) if has_jitter else 0.0
        return config.extended(PhimoeConfig, jitter=jitter)


def phi_rope(keys: ConfigKeys) -> dict[str, object]:
    """Rotary keys, with the scales of cosines and sines under the names that all families have."""
    given = rope_values(keys)
    scales = {kind: given.pop(f"{kind}_mscale", None) for kind in ("short", "long")}
    return {**given, **{f"{kind}_attention_factor": scale for kind, scale in scales.items() if scale is not None}}
