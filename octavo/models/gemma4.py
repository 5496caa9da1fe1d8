"""The text part of Gemma 4 (Google): Gemma 3 with wider heads in full-attention layers, and what its sizes add.

The small ones give each layer an embedding of the token of its own, and share keys and values among the last layers;
the one with experts has a dense feed-forward layer beside them. Values are normalised, and may be the keys.

Shapes: T tokens of the step, R rows whose logits are needed, D model, L layers, P width of a layer's own embedding,
X experts, S experts selected per token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo import ops
from octavo.layers.attention_inputs import Angles, Preparation, StepAngles, WideValues
from octavo.layers.experts import Mixture
from octavo.layers.linear import Linear
from octavo.layers.mlp import MLP, gelu_tanh
from octavo.layers.moe import ExpertRouter
from octavo.layers.norm import RMSNorm
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import read_decoder
from octavo.models.decoder_layer import DecoderLayer, FeedForward
from octavo.models.gemma2 import NAMES, GemmaForCausalLM
from octavo.models.loader import ExpertShape, WeightLoader
from octavo.models.model_config import FULL, SLIDING, read_layer_types
from octavo.models.moe_config import MoESettings, read_experts
from octavo.models.parts import DecoderConfig, HeadNorm, MLPPart
from octavo.models.rope_keys import ropes_by_kind
from octavo.ops.attention.attention import HeadLayout, LayerCache, PagedRows
from octavo.ops.collective import Collective
from octavo.ops.moe import Routing

FULL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}
LOCAL_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(DecoderConfig):
    own_width: int
    """Width of a layer's own embedding, 0: there are none."""
    own_vocab_size: int
    pad_id: int
    is_full: tuple[bool, ...]
    """Whether each layer has full attention, and not that of a window."""
    values_are_keys: tuple[bool, ...]
    """Whether each layer's values are its keys before their norm."""
    experts: MoESettings | None
    """Of every layer, beside its dense feed-forward layer."""

    @property
    def has_stages(self) -> bool:
        return not self.own_width  # else layers have embeddings of the tokens

    @property
    def mixtures(self) -> tuple[MoESettings, ...]:
        return () if self.experts is None else (self.experts,)


class NormedValues:
    """Adds the keys as values where these are the same, and normalises value heads without a weight."""

    def __init__(self, heads: HeadLayout, eps: float, are_keys: bool, like: Tensor) -> None:
        self.heads, self.eps, self.are_keys = heads, eps, are_keys
        self.ones_H = torch.ones(heads.head_dim, dtype=like.dtype, device=like.device)

    def __call__(self, qkv_TW: Tensor, angles: Angles, step: StepAngles) -> tuple[Tensor, Angles]:
        q, k, v = self.heads.sizes
        if self.are_keys:
            qkv_TW = torch.cat((qkv_TW, qkv_TW[:, q : q + k]), dim=1)
        v_TW = qkv_TW[:, q + k :]
        normed = ops.rms_norm(v_TW.reshape(-1, self.heads.head_dim), self.ones_H, self.eps)
        v_TW.copy_(normed.reshape(len(qkv_TW), v))
        return qkv_TW, angles


class ScaledRouter(ExpertRouter):
    """A router whose shares are multiplied by a number for each expert."""

    def __init__(self, norm: RMSNorm, weight_XD: Tensor, routing: Routing, scale_X: Tensor) -> None:
        super().__init__(norm, weight_XD, routing)
        self.scale_X = scale_X

    def select(self, x_TD: Tensor, given_TS: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        h_TD, ids_TS, shares_TS = super().select(x_TD, given_TS)
        return h_TD, ids_TS, shares_TS * self.scale_X[ids_TS]


class DenseAndExperts:
    """``x + after(dense(x) + after_experts(experts(before_experts(x))))``, where the router sees x itself."""

    def __init__(
        self,
        dense: MLP,
        router: ExpertRouter,
        experts: Mixture,
        norms: tuple[RMSNorm, RMSNorm, RMSNorm],
        ranks: Collective,
    ) -> None:
        self.dense, self.router, self.experts, self.ranks = dense, router, experts, ranks
        self.before_experts, self.after_experts, self.after = norms

    def __call__(self, x_TD: Tensor) -> Tensor:
        _, ids_TS, shares_TS = self.router(x_TD)
        y_TD = self.ranks.all_reduce(self.experts(self.before_experts(x_TD), ids_TS, shares_TS))
        return self.after(self.dense(self.after_experts(y_TD), of=x_TD), x_TD)


class Gemma4Layer(DecoderLayer):
    has_scalar = True

    def __init__(self, config: Gemma4Config, weights: WeightLoader, prefix: str, index: int) -> None:
        self.values_are_keys = config.values_are_keys[index]
        self.is_full = config.is_full[index]
        super().__init__(config, weights, prefix, index)
        self.index, D, P = index, config.hidden_size, config.own_width
        if self.heads.shares_cache:
            for name in ("k_proj", "v_proj", "k_norm", "v_norm"):  # which some checkpoints hold, unused
                weights.tensors.leave_out(f"{prefix}.self_attn.{name}.")
        self.scalar = weights.constant(weights.exact(f"{prefix}.layer_scalar", 1)) if self.has_scalar else 1.0
        if P:
            self.own_gate = weights.replicated(f"{prefix}.per_layer_input_gate", P, D)
            self.own_projection = weights.replicated(f"{prefix}.per_layer_projection", D, P)
            self.own_norm = weights.norm(f"{prefix}.post_per_layer_input_norm", D, config.norm_eps)
        self.has_own = bool(P)

    def head_weights(self, config: DecoderConfig, weights: WeightLoader, prefix: str, norm: HeadNorm) -> list[Tensor]:
        if self.part.shared_with is None:
            return super().head_weights(config, weights, prefix, norm)
        queries = weights.dense(f"{prefix}.self_attn.q_norm.weight", self.part.head_dim)
        return [queries, queries]  # there are no keys

    def qkv(self, config: DecoderConfig, weights: WeightLoader, prefix: str) -> Linear:
        names = [f"{prefix}.{name}" for name in config.names.queries]
        if self.values_are_keys:
            names = names[:2]
        return weights.qkv(
            names, self.heads, config.hidden_size, self.part.has_bias, has_values=not self.values_are_keys
        )

    def prepare(
        self, config: DecoderConfig, weights: WeightLoader, prefix: str
    ) -> tuple[list[Preparation], WideValues | None]:
        if self.heads.shares_cache:
            return [], None
        assert self.heads.q_norm_H is not None
        return [NormedValues(self.heads, config.norm_eps, self.values_are_keys, self.heads.q_norm_H)], None

    def feed_forward(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> FeedForward:
        mlp = super().feed_forward(config, weights, prefix, index)
        assert isinstance(config, Gemma4Config)
        assert isinstance(mlp, MLP)
        if (moe := config.experts) is None:
            return mlp
        D, X, eps = config.hidden_size, moe.num_experts, config.norm_eps
        scale_D = weights.exact(f"{prefix}.router.scale", D).clone().mul_(D**-0.5).to(weights.form.dtype)
        router = ScaledRouter(
            RMSNorm(scale_D, eps),
            weights.router(f"{prefix}.router.proj", X, D),
            Routing(moe.num_chosen, normalises=True),
            weights.exact(f"{prefix}.router.per_expert_scale", X),
        )
        shape = ExpertShape(X, D, moe.expert_size, moe.activation)
        name = f"{prefix}.experts"
        if weights.tensors.has(f"{name}.gate_up_proj"):
            order = torch.arange(2 * moe.expert_size).numpy()
            experts = weights.stacked_experts(name, shape, order)
        else:
            experts = weights.experts(name, shape)
        assert isinstance(mlp.after, RMSNorm)
        ends = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
        before, after_experts = (weights.norm(f"{prefix}.{end}", D, eps) for end in ends)
        norms = (before, after_experts, mlp.after)
        mlp.after = weights.norm(f"{prefix}.post_feedforward_layernorm_1", D, eps)
        return DenseAndExperts(mlp, router, experts, norms, weights.collective)

    def attend(self, qkv_TW: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        if rows.images is not None and self.is_full:
            rows = dataclasses.replace(rows, images=None)  # its images are causal like text
        return super().attend(qkv_TW, step, cache, rows)

    def __call__(self, x_TD: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        x_TD = super().__call__(x_TD, step, cache, rows)
        if self.has_own:
            x_TD = self.own_part(x_TD, step, rows, x_TD)
        return x_TD if self.scalar == 1.0 else x_TD.mul_(self.scalar)

    def own_part(self, x_RD: Tensor, step: StepAngles, rows: PagedRows, added_RD: Tensor | None = None) -> Tensor:
        """What the layer's own embedding of each token makes of ``x``, plus ``added``."""
        assert step.per_layer_TLP is not None
        own_TP = step.per_layer_TLP[:, self.index]
        if rows.logits_indices_R is not None:
            own_TP = own_TP[rows.logits_indices_R]
        return self.own_norm(self.own_projection(gelu_tanh(self.own_gate(x_RD)) * own_TP), added_RD)


class Gemma4ForCausalLM(GemmaForCausalLM):
    layer_class: type[DecoderLayer] = Gemma4Layer
    config: Gemma4Config
    own_width = 256
    """The default width of a layer's own embedding."""

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> Gemma4Config:
        if keys.get("use_bidirectional_attention") not in (None, False, "vision"):
            raise wrong("use_bidirectional_attention", keys.get("use_bidirectional_attention"), "null or vision")
        keys.must_be({"hidden_activation": ("gelu_pytorch_tanh",)})  # which experts and embeddings of layers have, too
        types = cls._types(keys)
        full, local = ropes_by_kind(keys, (FULL, SLIDING)) or ({}, {})
        full, local = full or FULL_ROPE, local or LOCAL_ROPE
        config = read_decoder(
            keys,
            max_len,
            tied=True,
            head_dim=256,
            activation_key="hidden_activation",
            activation="gelu_pytorch_tanh",
            rope=local,
            windows=(types, keys.size("sliding_window", 512)),
            mlp_bias=False,
            names=NAMES,
        )
        config = cls._with_attention(keys, config, types, full, max_len)
        num_shared = keys.size("num_kv_shared_layers", 0, low=0)
        moe = None
        if keys.flag("enable_moe_block"):
            moe = read_experts(
                keys,
                config,
                count_keys=("num_experts",),
                num_chosen=1,
                chosen_key="top_k_experts",
                expert_size=keys.size("moe_intermediate_size"),
                normalises=True,
                shared_size=config.ffn_size,
                activation="gelu_tanh",
            )
        if keys.flag("use_double_wide_mlp") and num_shared:
            first, plain = config.num_layers - num_shared, config.layers[0].mlp
            assert isinstance(plain, MLPPart)
            wide = dataclasses.replace(plain, size=2 * plain.size)
            config = config.with_mlps(lambda i: wide if i >= first else None)
        keys.pass_over("num_experts", "top_k_experts", "moe_intermediate_size")
        own_vocab, cap = keys.size("vocab_size_per_layer_input", 262_144), keys.get("final_logit_softcapping")
        return config.extended(
            Gemma4Config,
            ffn_size=max(config.ffn_size, moe.widest if moe else 0),
            embedding_scale=config.hidden_size**0.5,
            final_softcap=0.0 if cap is None else keys.number("final_logit_softcapping"),
            own_width=keys.size("hidden_size_per_layer_input", cls.own_width, low=0),
            own_vocab_size=own_vocab,
            is_full=tuple(kind == FULL for kind in types),
            pad_id=keys.get("pad_token_id") or 0,
            values_are_keys=tuple(keys.flag("attention_k_eq_v") and kind == FULL for kind in types),
            experts=moe,
        )

    @staticmethod
    def _types(keys: ConfigKeys) -> tuple[str, ...]:
        return (*read_layer_types(keys, lambda i: (i + 1) % 6)[:-1], FULL)

    @staticmethod
    def _with_attention(
        keys: ConfigKeys, config: DecoderConfig, types: tuple[str, ...], full: Mapping[str, Any], max_len: int | None
    ) -> DecoderConfig:
        """With the wider heads of full-attention layers, their rotary embedding, and shared keys and values."""
        width, count = keys.size("global_head_dim", 512), config.num_kv_heads
        if keys.get("num_global_key_value_heads") is not None and keys.flag("attention_k_eq_v"):
            count = keys.size("num_global_key_value_heads")
        own = keys.get("per_layer_config", {})
        if not isinstance(own, Mapping) or not all(i.isdecimal() and isinstance(own[i], Mapping) for i in own):
            raise wrong("per_layer_config", own, "an object whose keys are numbers of layers, of objects")
        by_layer = {int(i): part for i, part in own.items()}  # zeros may precede a number
        of_full = [by_layer.get(i, {}) for i, kind in enumerate(types) if kind == FULL] if own else [{}]
        if any(part != of_full[0] for part in of_full):
            raise wrong("per_layer_config", own, "the same for all full-attention layers")
        of = ConfigKeys(of_full[0])
        width, count = of.size("head_dim", width), of.size("num_key_value_heads", count)
        if config.num_heads % count:
            raise wrong("num_global_key_value_heads", count, f"a divisor of num_attention_heads, {config.num_heads}")
        rope = config.rope({"rope_theta": 1e6, **full}, max_len, width)
        config = dataclasses.replace(config, ropes=(*config.ropes, rope))
        first = config.num_layers - keys.size("num_kv_shared_layers", 0, low=0)
        shared: list[int | None] = [None] * config.num_layers
        for i in range(first, config.num_layers):
            kinds = [j for j in range(first) if types[j] == types[i]]
            if not kinds:
                raise wrong(
                    "num_kv_shared_layers", config.num_layers - first, "such that each kind of layer has its own"
                )
            shared[i] = kinds[-1]
        return config.with_attention(
            scale=1.0,
            head_norm=HeadNorm(),
            head_dim=[width if kind == FULL else config.head_dim for kind in types],
            num_kv_heads=[count if kind == FULL else config.num_kv_heads for kind in types],
            rope=[int(kind == FULL) for kind in types],
            shared_with=shared,
        )

    def __init__(self, config: Gemma4Config, weights: WeightLoader) -> None:
        super().__init__(config, weights)
        D, P, L = config.hidden_size, config.own_width, config.num_layers
        if P:
            self.own_table = weights.embedding("model.embed_tokens_per_layer", config.own_vocab_size, L * P)
            self.own_map = weights.replicated("model.per_layer_model_projection", L * P, D)
            self.own_norm = weights.norm("model.per_layer_projection_norm", P, config.norm_eps)

    def step(self, token_ids_T: Tensor, positions_T: Tensor, x_TD: Tensor, rows: PagedRows) -> StepAngles:
        step, P, L = super().step(token_ids_T, positions_T, x_TD, rows), self.config.own_width, self.config.num_layers
        if not P:
            return step
        if rows.images is not None:  # which have those of padding
            token_ids_T = torch.where(rows.images.slots_T < 0, token_ids_T, self.config.pad_id)
        mapped = self.own_norm((self.own_map(x_TD) * self.config.hidden_size**-0.5).view(-1, P)).view(-1, L, P)
        own_TLP = self.own_table(token_ids_T).view(-1, L, P) * P**0.5
        return step._replace(per_layer_TLP=(mapped + own_TLP) * 2**-0.5)


class Gemma4UnifiedForCausalLM(Gemma4ForCausalLM):
    """The 12B model, whose layers have no embeddings of their own."""

    own_width = 0
