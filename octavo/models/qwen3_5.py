"""The text part of Qwen3.5, and of Qwen3.6, which is alike (Qwen team, 2026): Qwen3-Next with separate projections.

The smaller models are dense, the larger ones have experts in all layers.
"""

from __future__ import annotations

from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import Decoder
from octavo.models.linear_parts import MatrixRows
from octavo.models.loader import WeightLoader
from octavo.models.parts import DecoderConfig
from octavo.models.qwen3_next import DeltaSizes, Qwen3NextLayer, read_qwen3_next
from octavo.models.qwen_moe import with_qwen_experts
from octavo.quant.stored.shard import Section


class Qwen3_5Layer(Qwen3NextLayer):
    def projections(self, sizes: DeltaSizes, name: str, weights: WeightLoader) -> list[MatrixRows]:
        gates, heads = Section(sizes.values, sizes.num_key_heads), Section(sizes.num_heads, sizes.num_key_heads)
        parts = {"qkv": sizes.channels, "z": [gates], "b": [heads], "a": [heads]}
        return [MatrixRows(f"{name}.in_proj_{part}", sections) for part, sections in parts.items()]


class Qwen3_5ForCausalLM(Decoder):
    layer_class = Qwen3_5Layer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        return read_qwen3_next(keys, max_len)


class Qwen3_5MoeForCausalLM(Decoder):
    layer_class = Qwen3_5Layer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        config = read_qwen3_next(keys, max_len, ffn_size=keys.size("moe_intermediate_size", 512))
        return with_qwen_experts(keys, config, 8, normalises=True, shared_size=512)
