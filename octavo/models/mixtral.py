"""Mixtral (arXiv 2401.04088): Mistral with a mixture of experts in every layer, by default two per token."""

from __future__ import annotations

from typing import Any

from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import Decoder
from octavo.models.mistral import read_mistral
from octavo.models.moe_config import read_experts
from octavo.models.parts import DecoderConfig, ExpertsPart
from octavo.ops.moe import Routing

EXPERTS: dict[str, Any] = {
    "router": "block_sparse_moe.gate",
    "experts": "block_sparse_moe.experts",
    "projections": ("w1", "w3", "w2"),
}
"""Names in ``ExpertsPart``, which other families have, too."""


class MixtralForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        config = read_mistral(keys, max_len, eps=1e-5, theta=1e6)
        moe = read_experts(keys, config, count_keys=("num_local_experts",), num_chosen=2, normalises=True)
        return config.with_experts(ExpertsPart(moe=moe, routing=Routing(moe.num_chosen, moe.normalises), **EXPERTS))
