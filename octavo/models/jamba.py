"""Jamba (arXiv 2403.19887): Mamba with normed parts in most layers, attention without positions in every few, and
experts in every other layer."""

from __future__ import annotations

from typing import Any

from octavo.models.config_keys import ONE_ACTIVATION, ConfigKeys, wrong
from octavo.models.decoder import NO_WINDOWS, Decoder, read_decoder
from octavo.models.falcon_h1 import NAMES
from octavo.models.hybrid import MambaConfig, MambaLayer, ScanSizes, read_rank
from octavo.models.moe_config import read_experts
from octavo.models.parts import DecoderConfig, ExpertsPart
from octavo.ops.moe import Routing

EXPERTS: dict[str, Any] = {
    "router": "feed_forward.router",
    "experts": "feed_forward.experts",
    "stacked": ("gate_up_proj", "down_proj"),
}
UNUSED = (
    "use_mamba_kernels",
    "use_mambapy",
    "use_associative_scan",
    "num_logits_to_keep",
    "calc_logits_for_entire_prompt",
)
"""Keys of other implementations."""


def _every(keys: ConfigKeys, name: str, period: int, offset: int, num_layers: int) -> tuple[bool, ...]:
    """For each layer, whether it is one of every so many."""
    period, offset = keys.size(f"{name}_period", period), keys.size(f"{name}_offset", offset, low=0)
    if offset >= period:
        raise wrong(f"{name}_offset", offset, f"less than {name}_period, {period}")
    return tuple(i % period == offset for i in range(num_layers))


class JambaForCausalLM(Decoder):
    layer_class = MambaLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        config = read_decoder(keys, max_len, windows=NO_WINDOWS, has_bias=False, mlp_bias=False, names=NAMES)
        config = config.without_rope()
        keys.must_be(ONE_ACTIVATION)
        attends = _every(keys, "attn_layer", 8, 4, config.num_layers)
        keys.pass_over(*UNUSED)
        if not keys.flag("mamba_inner_layernorms", True):
            raise wrong("mamba_inner_layernorms", False, "true")
        D = config.hidden_size
        mamba = ScanSizes(
            inner=keys.size("mamba_expand", 2) * D,
            state_size=keys.size("mamba_d_state", 16),
            rank=read_rank(keys, "mamba_dt_rank", D),
            width=keys.size("mamba_d_conv", 4, low=2),
            has_conv_bias=keys.flag("mamba_conv_bias", True),
            has_bias=keys.flag("mamba_proj_bias"),
            norms=("dt_layernorm", "b_layernorm", "c_layernorm"),
            norm_eps=config.norm_eps,
        )
        counts = ("num_experts", "num_local_experts")
        is_sparse = _every(keys, "expert_layer", 2, 1, config.num_layers)
        keys.pass_over("num_experts_per_tok")  # means nothing without experts
        if keys.size(counts[0], keys.get(counts[1])) > 1:
            moe = read_experts(keys, config, count_keys=counts, num_chosen=2, normalises=False, is_sparse=is_sparse)
            routing = Routing(moe.num_chosen, moe.normalises)
            config = config.with_experts(ExpertsPart(moe=moe, routing=routing, **EXPERTS))
        config = config.with_caches([None if attends_here else mamba.cache for attends_here in attends])
        return config.extended(MambaConfig, mamba=mamba)
