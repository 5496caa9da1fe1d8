"""Step 3.5 (StepFun): gates of heads, more heads in layers with windows, experts whose activations may be limited.

Layers with windows and those without have rotary embeddings of their own. Norms multiply by one plus their weights.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from octavo.models.afmoe import with_heads_of_layers
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.model_config import FULL, SLIDING
from octavo.models.moe_config import read_experts
from octavo.models.olmo import with_local_rope
from octavo.models.parts import DecoderConfig, ExpertsPart, GatePart, HeadNorm, NormPart
from octavo.ops.moe import CappedSwish, Routing

OTHER_NAMES = {
    "num_key_value_heads": "num_attention_groups",
    "num_experts_per_tok": "moe_top_k",
    "share_expert_dim": "share_expert_dims",
}
"""Keys of transformers, and those that published configurations have in their place."""
UNUSED = (
    *("att_impl_type", "max_seq_len", "moe_every_n_layer", "moe_layer_offset", "mtp_layer_types"),
    *("mtp_mlp_layer_types", "need_fp32_gate", "num_nextn_predict_layers", "per_layer_config", "use_qk_norm"),
)
"""Keys that change nothing, or that others say again."""


def _of_layers(keys: ConfigKeys, key: str) -> list[Any] | None:
    """A list with a value for each layer, behind which there may be those of MTP layers; ``None`` if absent."""
    values, count = keys.get(key), keys.size("num_hidden_layers")
    if values is not None and (not isinstance(values, list | tuple) or len(values) < count):
        raise wrong(key, values, f"a list of {count} or more, a value for each layer")
    return None if values is None else list(values[:count])


def _ropes(keys: ConfigKeys, types: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    """Rotary keys of layers without windows, and of those with; only the former may be scaled."""
    given, theta = keys.child("rope_parameters") or ConfigKeys({}), keys.get("rope_theta", 10_000.0)
    thetas = _of_layers(keys, "rope_theta") if isinstance(theta, list | tuple) else [theta] * len(types)
    lists = {"rope_theta": thetas, "partial_rotary_factor": _of_layers(keys, "partial_rotary_factors")}
    found = []
    for kind in (FULL, SLIDING):
        own: dict[str, Any] = {"rope_theta": 10_000.0}
        for key, values in lists.items():
            of_kind = [value for i, value in enumerate(values or ()) if types[i] == kind]
            if any(value != of_kind[0] for value in of_kind):
                raise wrong(key, values, f"the same in all layers of {kind}")
            own |= {key: of_kind[0]} if of_kind else {}
        found.append({**own, **(given.child(kind) or ConfigKeys({})).values})
    keys.must_be({"yarn_only_types": ([FULL],)})
    return {**found[0], **(keys.child("rope_scaling") or ConfigKeys({})).values}, found[1]


def _is_sparse(keys: ConfigKeys, count: int) -> tuple[bool, ...]:
    """Whether each layer has experts."""
    kinds, listed = _of_layers(keys, "mlp_layer_types"), keys.get("moe_layers_enum")
    if kinds is not None:
        if any(kind not in ("sparse", "dense") for kind in kinds):
            raise wrong("mlp_layer_types", kinds, "a list of sparse and dense")
        return tuple(kind == "sparse" for kind in kinds)
    if listed is None:
        return tuple(i >= 3 for i in range(count))
    items = listed.split(",") if isinstance(listed, str) else listed
    if not isinstance(items, list | tuple) or not all(str(item).strip().isdecimal() for item in items):
        raise wrong("moe_layers_enum", listed, "a list of the layers with experts")
    sparse = {str(item).strip() for item in items}
    return tuple(str(i) in sparse for i in range(count))


def _limits(keys: ConfigKeys, key: str, count: int) -> list[float]:
    """The limit of each layer's activations; 0: none."""
    limits = [limit or 0 for limit in _of_layers(keys, key) or [0] * count]
    if not all(type(limit) in (int, float) and 0 <= limit < 1e30 for limit in limits):
        raise wrong(key, limits, "a list of numbers, 0 or more")
    return [float(limit) for limit in limits]


def _mixtures(keys: ConfigKeys, config: DecoderConfig) -> list[ExpertsPart | None]:
    """The experts of each layer; ``None`` for one without."""
    count, size = config.num_layers, keys.size("moe_intermediate_size", 1280)
    moe = read_experts(
        keys,
        config,
        count_keys=("n_routed_experts", "moe_num_experts"),
        num_chosen=8,
        normalises=True,
        expert_size=size,
        is_sparse=_is_sparse(keys, count),
        shared_size=keys.size("share_expert_dim", 1280),
    )
    routing = Routing(moe.num_chosen, True, "sigmoid", keys.number("moe_router_scaling_factor", 1.0))
    names = ("gate_proj", "up_proj")
    part = ExpertsPart(
        moe=moe,
        routing=routing,
        router="moe.gate",
        correction="moe.router_bias" if keys.flag("use_moe_router_bias", True) else None,
        experts="moe",
        stacked=(*(f"{name}.weight" for name in names), "down_proj.weight"),
        shared=tuple(f"share_expert.{name}" for name in names),
        shared_down="share_expert.down_proj",
        shared_has_bias=keys.flag("mlp_bias"),
    )
    if keys.flag("has_separate_experts"):  # as in GGUF files
        part = dataclasses.replace(part, experts="moe.experts", stacked=None)
    limits, shared_limits = (_limits(keys, key, count) for key in ("swiglu_limits", "swiglu_limits_shared"))
    found: list[ExpertsPart | None] = []
    for i, (limit, of_shared) in enumerate(zip(limits, shared_limits, strict=True)):
        if not moe.is_sparse[i] and of_shared:
            raise wrong("swiglu_limits_shared", of_shared, f"0 for layer {i}, which has no experts")
        own = dataclasses.replace(moe, activation=CappedSwish(limit)) if limit else moe
        own_part = dataclasses.replace(part, moe=own, shared_activation=CappedSwish(of_shared) if of_shared else "silu")
        found.append(own_part if moe.is_sparse[i] else None)
    return found


class Step3p5ForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        """Keys are those of transformers, or those of published configurations."""
        given = {own: keys.get(other) for own, other in OTHER_NAMES.items() if keys.get(other) is not None}
        keys = keys.over({**keys.values, **given})
        kinds = _of_layers(keys, "layer_types") or [FULL] * keys.size("num_hidden_layers")
        types = tuple(kinds)
        if any(kind not in (FULL, SLIDING) for kind in types):
            raise wrong("layer_types", kinds, f"a list of {FULL} and {SLIDING}")
        keys.must_be({"use_moe": (True,), "sink": (False,), "zero_centered": (True,), "use_rope_layers": ([],)})
        keys.must_be({"norm_expert_weight": (True,)})
        keys.choice("hidden_act", {"silu": None}, "silu")
        keys.choice("moe_router_activation", {"sigmoid": None}, "sigmoid")
        keys.pass_over(*UNUSED)
        full, local = _ropes(keys, types)
        offset = 0.0 if keys.flag("norms_include_one") else 1.0
        config = read_decoder(
            keys,
            max_len,
            eps=1e-5,
            head_dim=128,
            rotary=1.0,
            rope=full,
            windows=(types, None if SLIDING not in types else keys.size("sliding_window", 512)),
            norm=NormPart(offset=offset),
        )
        keys.pass_over("sliding_window")
        config = with_local_rope(config, local, types, max_len, rotary=1.0)
        mixtures = _mixtures(keys, config)
        gate = GatePart("self_attn.g_proj", is_of_head=True) if keys.flag("use_head_wise_attn_gate", True) else None
        scale = keys.number("query_pre_attn_scalar", config.head_dim) ** -0.5
        config = config.with_attention(head_norm=HeadNorm(offset=offset), gate=gate, scale=scale)
        more = _heads_with_windows(keys, config)
        counts = [more if kind == SLIDING else config.num_heads for kind in types]
        config = with_heads_of_layers(config, counts, "num_sliding_attention_heads")
        return config.with_mlps(lambda i: mixtures[i])


def _heads_with_windows(keys: ConfigKeys, config: DecoderConfig) -> int:
    """The number of query heads of layers with windows."""
    other = keys.child("attention_other_setting") or ConfigKeys({})
    other.must_be({"attention_type": (SLIDING,), "num_attention_groups": (config.num_kv_heads,)})
    other.must_be(dict.fromkeys(("head_dim", "true_head_dim"), (config.head_dim,)))
    return keys.size("num_sliding_attention_heads", other.size("num_attention_heads", config.num_heads))
