"""Dots 3 Note (Dots Studio), its text part: latent attention of two kinds, to what an indexer chose and to a window.

Layers with windows have heads, latents and rotary embeddings of other sizes. The latent and what queries are projected
from are multiplied by the square root of how much narrower than the model they are; the rotated key is normalised.

Shapes: T tokens of the step, L latent, R rotated part of a head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from octavo import ops
from octavo.layers.attention_inputs import StepAngles
from octavo.layers.norm import RMSNorm
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.deepseek import DeepseekConfig, read_latent, with_experts
from octavo.models.deepseek_sparse import INDEXED, DeepseekV32ForCausalLM, SparseConfig, SparseLayer, read_sparse
from octavo.models.loader import WeightLoader
from octavo.models.model_config import FULL, SLIDING, layer_windows
from octavo.models.parts import DecoderConfig, ExpertsPart, GatePart
from octavo.models.rope_keys import half_split_rows, ropes_by_kind
from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.attention.choose_keys import ChosenKeys

DEFAULTS: dict[str, Any] = {
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-5,
}
LOCAL = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}
"""Of layers with windows, where published configurations do not say more."""


SAME: dict[str, tuple[Any, ...]] = {
    "apply_mla_qkv_lora_rescale": (True,),
    "attention_gate_type": ("headwise",),
    "final_norm": ("RMSNorm",),
    "k_rope_only_layernorm": (True,),
    "moe_gating_fp32": (False,),
    "normalization": ("RMSNorm",),
    "rope_scaling": (),
    "swa_attention_gate_type": ("headwise",),
    "use_dynamic_rsf": (False,),
}
"""Keys of published configurations that say what the architecture does anyway."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dots3Config(SparseConfig):
    local: DeepseekConfig
    """That of layers with windows alone, for the sizes of their attention."""

    @property
    def has_stages(self) -> bool:
        return True

    def of_layer(self, index: int) -> SparseConfig:
        """With the sizes of this layer's attention."""
        if not self.layers[index].attention.rope:
            return self
        names = ("num_heads", "query_rank", "latent_size", "plain_size", "rotated_size", "value_size")
        return dataclasses.replace(self, **{name: getattr(self.local, name) for name in names})


class Dots3Layer(SparseLayer):
    def load_mixer(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        assert isinstance(config, Dots3Config)
        own = config.of_layer(index)
        super().load_mixer(own, weights, prefix, index)
        self.latent_size, R = own.latent_size, own.rotated_size
        norm = weights.norm(f"{prefix}.self_attn.k_rope_only_layernorm", R, config.norm_eps)
        self.rotated_norm = RMSNorm(norm.weight_D[half_split_rows(1, R, R)], norm.eps)
        norm_L = self.latent_heads.norm_L.float() * (config.hidden_size / self.latent_size) ** 0.5
        norm_L = norm_L.to(self.latent_heads.norm_L.dtype)
        self.latent_heads = self.latent_heads._replace(norm_L=norm_L, window=self.part.window)

    def latents(self, h_TD: Tensor) -> Tensor:
        latent_TL, rotated_TR = super().latents(h_TD).tensor_split([self.latent_size], dim=1)
        return ops.concat(latent_TL, self.rotated_norm(ops.concat(rotated_TR)))

    def chosen(
        self, h_TD: Tensor, q_TD: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows
    ) -> ChosenKeys | None:
        return None if self.indexer is None else super().chosen(h_TD, q_TD, step, cache, rows)


class Dots3NoteForCausalLM(DeepseekV32ForCausalLM):
    layer_class = Dots3Layer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> Dots3Config:
        given = {key: value for key, value in keys.values.items() if value is not None}
        own = keys.over({**DEFAULTS, **given, "mlp_layer_types": _feed_forward_types(keys)})
        own.must_be(SAME)
        types = _layer_types(own)
        main, local = _ropes(own, types)
        own = own.over({**own.values, "layer_types": None})
        if isinstance(own.get("moe_layer_freq"), list | tuple):
            own = own.over({**own.values, "moe_layer_freq": None})
        full = read_latent(own, max_len, main)
        config, windowed = full, read_latent(own.over({**own.values, **_local_sizes(own, types)}), max_len, local)
        slides = [kind == SLIDING for kind in types]
        window = own.size("sliding_window", own.size("sliding_window_size", 512))
        spans = layer_windows(types, window, max_len or full.max_position_embeddings)
        layers = [(windowed if slides[i] else full).layers[i] for i in range(len(types))]
        config = dataclasses.replace(full, layers=tuple(layers), ropes=(*full.ropes, *windowed.ropes), windows=spans)
        factors = [(full.hidden_size / (windowed if slid else full).query_rank) ** 0.5 for slid in slides]
        config = config.with_attention(
            gate=GatePart("self_attn.g_proj", is_of_head=True),
            rope=[int(slid) for slid in slides],
            scale=[part.attention.scale * factor for part, factor in zip(layers, factors, strict=True)],
            window=list(spans),
        )
        pairs = zip(layers, spans, strict=True)
        caches = [part.cache and dataclasses.replace(part.cache, window=span) for part, span in pairs]
        config = with_experts(own, config.with_caches(caches), "sigmoid", stacked=("gate_up_proj", "down_proj"))
        shared = own.size("moe_shared_expert_intermediate_size", own.size("shared_experts_intermediate_size", 1536))
        shared, parts = shared * own.size("n_shared_experts"), [part.mlp for part in config.layers]
        config = config.with_mlps(lambda i: _with_shared(parts[i], shared))
        has_own = tuple(kind == INDEXED for kind in types)
        sparse = read_sparse(own, config, 64, has_own=has_own, is_adjacent=True)
        return sparse.extended(Dots3Config, local=windowed, latent_eps=config.norm_eps)

    def __init__(self, config: Dots3Config, weights: WeightLoader) -> None:
        super().__init__(config, weights)
        weights.tensors.leave_out("model.mtp.")


def _feed_forward_types(keys: ConfigKeys) -> Any:
    """What ``mlp_layer_types`` says, or a list that has 1 for each layer with experts."""
    listed, count = keys.get("moe_layer_freq"), keys.size("num_hidden_layers")
    if keys.get("mlp_layer_types") is not None or not isinstance(listed, list | tuple):
        return keys.get("mlp_layer_types")
    if len(listed) != count or not all(value in (0, 1) for value in listed):
        raise wrong("moe_layer_freq", listed, f"1 or a list of {count}, each 0 or 1")
    first = keys.size("first_k_dense_replace", 1, low=0)
    return ["sparse" if i >= first and listed[i] else "dense" for i in range(count)]


def _layer_types(keys: ConfigKeys) -> tuple[str, ...]:
    """The type of each layer. Older configurations call attention to what an indexer chose full attention, too."""
    count, every = keys.size("num_hidden_layers"), keys.flag("use_sliding_window", True)
    types = keys.choices("layer_types", (INDEXED, FULL, SLIDING), count)
    is_older = keys.get("per_layer_config") is None
    if types is None:
        types = tuple(SLIDING if every and i > 1 and i % 4 != 1 else INDEXED for i in range(count))
    if is_older or keys.get("use_dsa") is not None:
        types = tuple(INDEXED if kind == FULL else kind for kind in types)
    keys.must_be({"use_dsa": (True,)})
    if FULL in types:
        raise wrong("layer_types", types, f"a list of {INDEXED} and {SLIDING}")
    return types


def _ropes(keys: ConfigKeys, types: Sequence[str]) -> list[dict[str, Any]]:
    """Rotary keys of layers without windows, and of those with."""
    thetas = keys.number("rope_theta", 8e7), keys.number("swa_rope_theta", 5e4)
    parts = ropes_by_kind(keys, (INDEXED, SLIDING)) or [dict(keys.get("rope_parameters") or {})] * 2
    return [{"rope_theta": theta, **part} for theta, part in zip(thetas, parts, strict=True)]


def _local_sizes(keys: ConfigKeys, types: Sequence[str]) -> dict[str, Any]:
    """The keys of layers with windows in place of the others'."""
    listed = keys.get("per_layer_config")
    if listed is None:
        sizes = {name: keys.size(f"swa_{name}", size) for name, size in LOCAL.items()}
        rest = sizes["head_dim"] - sizes["qk_nope_head_dim"]
        return {**sizes, "qk_rope_head_dim": keys.size("swa_qk_rope_head_dim", rest, low=0)}
    if not isinstance(listed, Mapping) or not all(str(key).isdecimal() for key in listed):
        raise wrong("per_layer_config", listed, "an object whose names are numbers of layers")
    numbered = {int(key): part for key, part in listed.items()}  # written as "02"
    by_layer = [numbered.get(i) or {} for i in range(len(types))]
    found = next((part for part, kind in zip(by_layer, types, strict=True) if kind == SLIDING), {})
    allowed = {*LOCAL, "qk_rope_head_dim"}
    for part, kind in zip(by_layer, types, strict=True):
        if part != (found if kind == SLIDING else {}) or not allowed.issuperset(part):
            raise wrong("per_layer_config", part, f"the same {', '.join(sorted(allowed))} in layers of {SLIDING} alone")
    return {key: value for key, value in found.items() if value is not None}


def _with_shared(part: Any, size: int) -> Any:
    """A layer's experts with a shared one of this width; ``None`` for a dense layer."""
    if not isinstance(part, ExpertsPart):
        return None
    return dataclasses.replace(part, moe=dataclasses.replace(part.moe, shared_size=size))
