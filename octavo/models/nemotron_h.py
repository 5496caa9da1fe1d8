"""Nemotron-H (arXiv 2504.03624) and Nemotron 3 (NVIDIA, 2025): each layer is Mamba-2, attention without positions, a
feed-forward layer or a mixture of experts, whose activation is the square of ReLU.

Shapes: T tokens of the step, D model, X experts, F the width of an expert.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from torch import Tensor

from octavo import ops
from octavo.layers.attention_inputs import StepAngles
from octavo.layers.experts import Mixture
from octavo.layers.linear import Linear
from octavo.layers.mlp import MLP, squared_relu
from octavo.layers.moe import ExpertRouter
from octavo.layers.norm import Norm
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import NO_WINDOWS, Decoder, read_decoder
from octavo.models.decoder_layer import FeedForward, no_feed_forward
from octavo.models.hybrid import LINEAR, MambaConfig, MambaLayer, MambaSizes, layer_kinds, read_limits
from octavo.models.layer_cache import state_layer
from octavo.models.loader import ExpertShape, WeightLoader
from octavo.models.model_config import FULL
from octavo.models.moe_config import read_experts
from octavo.models.parts import DecoderConfig, ExpertsPart, LayerPart, Names
from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.collective import Collective
from octavo.ops.moe import Routing, SquaredReLU

DENSE, SPARSE = "mlp", "moe"
LETTERS = {"M": LINEAR, "*": FULL, "-": DENSE, "E": SPARSE}
OLD_NAMES = {"mamba": LINEAR, "attention": FULL}
NAMES = Names(
    embedding="backbone.embeddings",
    layers="backbone.layers",
    norm="backbone.norm_f",
    queries=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    output="mixer.o_proj",
    before_attention="norm",
    before_mlp="norm",
    ups=("mixer.up_proj",),
    down="mixer.down_proj",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NemotronHConfig(MambaConfig):
    kinds: tuple[str, ...]
    """Of the layers, and behind them of ``mtp_layers``."""
    latent_size: int
    """Width of the inputs and outputs of experts; 0: that of the model."""
    mtp_layers: tuple[LayerPart, ...]
    """Those of multi-token prediction."""

    def with_mtp(self) -> Self:
        layers = (*self.layers, *self.mtp_layers)
        windows = (*self.windows, *[0] * len(self.mtp_layers)) if self.windows else ()
        return dataclasses.replace(self, num_layers=len(layers), layers=layers, windows=windows)


@dataclasses.dataclass(eq=False)
class LatentMoE:
    """``x + from_latent(experts(to_latent(h))) + shared(h)`` with ``h = norm(x)``; the maps may be absent."""

    router: ExpertRouter
    experts: Mixture
    shared: MLP
    latent: tuple[Linear, Linear] | None
    collective: Collective

    def __call__(self, x_TD: Tensor) -> Tensor:
        h_TD, ids_TS, shares_TS = self.router(x_TD)
        inputs = h_TD if self.latent is None else self.latent[0](h_TD)
        sum_TD = self.experts(inputs, ids_TS, shares_TS)
        sum_TD = sum_TD if self.latent is None else self.latent[1](sum_TD)
        sum_TD = self.shared(sum_TD, of=h_TD)
        if self.collective.size == 1:
            return ops.add_scaled(sum_TD, 1.0, x_TD)
        return self.collective.all_reduce(sum_TD, residual_TD=x_TD)


class NemotronHLayer(MambaLayer):
    """One of the four parts with its norm; adds to the residual stream."""

    mamba = "mixer"

    def load_mixer(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        assert isinstance(config, NemotronHConfig)
        self.kind = config.kinds[index]
        if self.kind in (LINEAR, FULL):
            super().load_mixer(config, weights, prefix, index)

    def feed_forward(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> FeedForward:
        if self.kind in (LINEAR, FULL):
            return no_feed_forward
        return super().feed_forward(config, weights, prefix, index)

    def mixture(
        self, config: DecoderConfig, part: ExpertsPart, weights: WeightLoader, prefix: str, before: Norm | None
    ) -> LatentMoE:
        assert isinstance(config, NemotronHConfig)
        D, L, moe, name = config.hidden_size, config.latent_size, part.moe, f"{prefix}.mixer"
        X, F, shared = moe.num_experts, moe.shared_size, f"{name}.shared_experts"
        correction_X = weights.exact(f"{name}.gate.e_score_correction_bias", X)
        routing = part.routing._replace(correction_X=correction_X)
        latent = None
        if L:
            down, up = f"{name}.fc1_latent_proj", f"{name}.fc2_latent_proj"
            latent = weights.replicated(down, L, D), weights.replicated(up, D, L)
        up_proj, down_proj = weights.column(f"{shared}.up_proj", F, D), weights.partial_row(f"{shared}.down_proj", D, F)
        return LatentMoE(
            ExpertRouter(before, weights.router(f"{name}.gate", X, D), routing),
            weights.experts(f"{name}.experts", ExpertShape(X, L or D, moe.expert_size, SquaredReLU())),
            MLP(None, up_proj, down_proj, squared_relu, None),
            latent,
            weights.collective,
        )

    def __call__(self, x_TD: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        if self.kind in (LINEAR, FULL):
            return super().__call__(x_TD, step, cache, rows)
        return self.mlp(rows.pick(x_TD, x_TD)[1])


def _kinds(keys: ConfigKeys) -> tuple[str, ...]:
    listed = keys.get("layers_block_type") or keys.get("layer_types")
    return _listed("layers_block_type", keys.get("hybrid_override_pattern"), listed, (LINEAR, FULL, DENSE, SPARSE))


def _mtp_kinds(keys: ConfigKeys) -> tuple[str, ...]:
    """States of drafts that are rejected could not be taken back, so that there are none."""
    name = "mtp_layers_block_type"
    pattern, listed = keys.get("mtp_hybrid_override_pattern"), keys.get(name)
    if pattern is None and listed is None:
        return (FULL, SPARSE)
    return _listed(name, pattern, listed, (FULL, DENSE, SPARSE))


def _listed(name: str, pattern: Any, listed: Any, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Kinds of layers, as a list or as a word of letters."""
    if listed is None and isinstance(pattern, str) and set(pattern) <= set(LETTERS):
        listed = [LETTERS[letter] for letter in pattern]
    if not isinstance(listed, list | tuple):
        raise wrong(name, listed, "a list of the kinds of the layers")
    kinds = [OLD_NAMES.get(str(kind), kind) for kind in listed]
    return layer_kinds(ConfigKeys({name: kinds}), name, allowed, len(kinds))


class NemotronHForCausalLM(Decoder):
    layer_class = NemotronHLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        kinds, mtp_kinds = _kinds(keys), _mtp_kinds(keys)
        config = read_decoder(
            keys,
            max_len,
            eps=keys.number("layer_norm_epsilon", keys.number("norm_eps", 1e-5)),
            head_dim=128,
            activation_key="mlp_hidden_act",
            activation="relu2",
            activations={"relu2": squared_relu},
            windows=NO_WINDOWS,
            num_layers=len(kinds),
            names=NAMES,
        )
        if config.num_layers != len(kinds):
            raise wrong("num_hidden_layers", config.num_layers, f"the number of kinds of layers, {len(kinds)}")
        keys.pass_over("hidden_act", *UNUSED)
        keys.choice("mamba_hidden_act", {"silu": None}, "silu")
        mamba = MambaSizes(
            num_heads=keys.size("mamba_num_heads", 128),
            head_dim=keys.size("mamba_head_dim", 64),
            num_groups=keys.size("n_groups", 8),
            state_size=keys.size("ssm_state_size", 128),
            width=keys.size("conv_kernel", 4, low=2),
            has_conv_bias=keys.flag("use_conv_bias", True),
            has_bias=keys.flag("use_bias"),
            limits=(keys.get("time_step_min", 0.001), read_limits(keys)[1]),
        )
        config = config.without_rope()
        dense, experts = config.layers[0], config.layers[0]
        if SPARSE in kinds or (keys.get("num_nextn_predict_layers") and SPARSE in mtp_kinds):
            experts = dataclasses.replace(dense, mlp=_experts(keys, config, kinds))
            if keys.flag("mlp_bias"):
                raise wrong("mlp_bias", True, "false, as layers_block_type has layers with experts")
        parts = {
            LINEAR: dataclasses.replace(dense, cache=mamba.cache),
            FULL: dense,
            DENSE: dataclasses.replace(dense, cache=state_layer()),
            SPARSE: dataclasses.replace(experts, cache=state_layer()),
        }
        config = config.with_mlps(lambda i: parts[kinds[i]].mlp).with_caches([parts[kind].cache for kind in kinds])
        return config.extended(
            NemotronHConfig,
            kinds=(*kinds, *mtp_kinds),
            mamba=mamba,
            latent_size=keys.get("moe_latent_size", 0),
            mtp_layers=tuple(parts[kind] for kind in mtp_kinds),
        )


def _experts(keys: ConfigKeys, config: DecoderConfig, kinds: tuple[str, ...]) -> ExpertsPart:
    moe = read_experts(
        keys,
        config,
        count_keys=("n_routed_experts",),
        num_chosen=2,
        expert_size=keys.size("moe_intermediate_size", 7688),
        normalises=keys.flag("norm_topk_prob", True),
        is_sparse=tuple(kind == SPARSE for kind in kinds),
        shared_size=keys.size("moe_shared_expert_intermediate_size", 7688),
    )
    groups, scale = (keys.size("n_group", 1), keys.size("topk_group", 1)), keys.number("routed_scaling_factor", 1.0)
    return ExpertsPart(moe=moe, routing=Routing(moe.num_chosen, moe.normalises, "sigmoid", scale, groups))


UNUSED = (
    *("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("n_group", "topk_group", "routed_scaling_factor"),
    *("moe_shared_expert_overlap", "num_experts_per_tok", "norm_topk_prob", "num_logits_to_keep", "use_mamba_kernels"),
    *("expand", "time_step_max", "time_step_floor", "chunk_size", "mamba_proj_bias", "mamba_ssm_cache_dtype"),
    *("residual_in_fp32", "rescale_prenorm_residual", "num_nextn_predict_layers", "sliding_window"),
    *("hybrid_override_pattern", "layers_block_type", "layer_types"),
)
"""Keys of experts where a model has none, of training, and of other implementations."""
