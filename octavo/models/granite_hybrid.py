"""Granite 4 (IBM, 2025) with layers of Mamba-2, with experts or without; and Bamba (IBM, 2025), without factors."""

from __future__ import annotations

from typing import Any

from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import NO_WINDOWS, Decoder, read_decoder
from octavo.models.falcon_h1 import NAMES
from octavo.models.granite import with_experts, with_factors
from octavo.models.hybrid import LINEAR, MambaConfig, MambaLayer, layer_kinds, read_bamba_sizes
from octavo.models.model_config import FULL
from octavo.models.parts import DecoderConfig, Names

OLD_NAMES = {"mamba": LINEAR, "attention": FULL}
GRANITE = Names(ups=("shared_mlp.input_linear",), down="shared_mlp.output_linear")


def with_mamba(keys: ConfigKeys, config: DecoderConfig, kinds: tuple[str, ...]) -> MambaConfig:
    """With Mamba-2 in layers of the kind ``LINEAR``."""
    mamba = read_bamba_sizes(keys, config.hidden_size)
    config = config.with_caches([mamba.cache if kind == LINEAR else None for kind in kinds])
    return config.extended(MambaConfig, mamba=mamba)


class GraniteMoeHybridForCausalLM(Decoder):
    layer_class = MambaLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        num_layers, size = keys.size("num_hidden_layers"), keys.size("shared_intermediate_size", 1024)
        names = GRANITE
        if keys.flag("has_separate_gates"):  # as in GGUF files
            names = names._replace(ups=("shared_mlp.gate_proj", "shared_mlp.up_proj"))
        has_experts = bool(keys.get("num_local_experts", 8))
        inner: dict[str, Any] = dict(keys.values)
        if not has_experts:
            inner["intermediate_size"] = size
        config = read_decoder(keys.over(inner), max_len, windows=NO_WINDOWS, ffn_size=size, names=names)
        config = with_factors(keys, config)
        if has_experts:
            config = with_experts(keys, config, size)
        keys.get("num_experts_per_tok")
        positions = keys.get("position_embedding_type")
        if positions not in (None, "rope", "nope"):
            raise wrong("position_embedding_type", positions, "rope, nope or absent")
        if positions != "rope":
            config = config.without_rope()
        listed = keys.get("layer_types") or keys.get("layers_block_type") or [LINEAR] * num_layers
        kinds = [OLD_NAMES.get(str(kind), kind) for kind in listed]
        allowed = (LINEAR, FULL)
        return with_mamba(
            keys, config, layer_kinds(ConfigKeys({"layer_types": kinds}), "layer_types", allowed, num_layers)
        )


class BambaForCausalLM(Decoder):
    layer_class = MambaLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        num_layers = keys.size("num_hidden_layers")
        config = read_decoder(keys, max_len, eps=1e-5, rotary=0.5, windows=NO_WINDOWS, names=NAMES)
        attends = keys.get("attn_layer_indices", [])
        if not isinstance(attends, list | tuple) or not all(type(i) is int for i in attends):
            raise wrong("attn_layer_indices", attends, "a list of layer numbers")
        keys.pass_over("num_logits_to_keep", "z_loss_coefficient", "layers_block_type", "layer_types")
        return with_mamba(keys, config, tuple(FULL if i in attends else LINEAR for i in range(num_layers)))
