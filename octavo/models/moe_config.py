"""The configuration of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.model_config import ACTIVATIONS, ModelConfig
from octavo.ops.linear.linear import Activation
from octavo.ops.moe import CappedSwish, ClampedSwish, Routing, SoftcappedSwish


@dataclass(frozen=True, kw_only=True)
class MoESettings:
    """Sizes and routing of the experts."""

    num_experts: int
    num_chosen: int
    """Experts selected for each token."""
    activation: Activation | ClampedSwish | CappedSwish | SoftcappedSwish
    expert_size: int
    """Width of one expert."""
    dense_size: int
    """Width of a feed-forward layer without experts."""
    is_sparse: tuple[bool, ...]
    """Whether each layer has experts."""
    normalises: bool
    """Whether the routing weights of a token are normalised to sum to 1."""
    shared_size: int = 0
    """Width of the shared expert, which all tokens use in addition; 0: none."""

    @property
    def widest(self) -> int:
        """Total width of the experts that a token uses, or the width of a dense feed-forward layer if larger."""
        return max(self.num_chosen * self.expert_size + self.shared_size, self.dense_size)


def read_experts(
    keys: ConfigKeys,
    config: ModelConfig,
    *,
    count_keys: tuple[str, ...],
    num_chosen: int,
    normalises: bool,
    expert_size: int | None = None,
    is_sparse: tuple[bool, ...] = (),
    shared_size: int = 0,
    chosen_key: str = "num_experts_per_tok",
    activation: Activation | ClampedSwish | SoftcappedSwish | None = None,
    dense_size: int | None = None,
) -> MoESettings:
    """Read the expert settings; ``is_sparse`` marks the layers with experts (default: all).

    ``count_keys`` are the possible keys for the number of experts; other defaults are the family's. Experts and layers
    without any are as wide as ``config`` says, with the activation of ``hidden_act``, unless given.
    """
    count_key = next((key for key in count_keys if keys.get(key) is not None), count_keys[0])
    num_experts, chosen = keys.size(count_key), keys.size(chosen_key, num_chosen)
    if chosen > num_experts:
        raise wrong(chosen_key, chosen, f"at most {count_key}, {num_experts}")
    return MoESettings(
        num_experts=num_experts,
        num_chosen=chosen,
        activation=keys.choice("hidden_act", ACTIVATIONS, "silu") if activation is None else activation,
        expert_size=expert_size or config.ffn_size,
        dense_size=dense_size or config.ffn_size,
        is_sparse=is_sparse or (True,) * config.num_layers,
        normalises=normalises,
        shared_size=shared_size,
    )


def read_dense_first(keys: ConfigKeys, num_layers: int, first: int) -> tuple[bool, ...]:
    """Whether each layer has experts: by ``mlp_layer_types``, or all but the ``first``."""
    types = keys.choices("mlp_layer_types", ("dense", "sparse"), num_layers)
    return tuple(i >= first if types is None else types[i] == "sparse" for i in range(num_layers))


def read_sigmoid_routing(
    keys: ConfigKeys, moe: MoESettings, *, groups: int = 1, chosen_groups: int = 1, scale: float = 1.0
) -> Routing:
    """Routing by sigmoids with a correction for the selection, within groups of experts (DeepSeek-V3)."""
    count, chosen = keys.size("n_group", groups), keys.size("topk_group", chosen_groups)
    if moe.num_experts % count or chosen > count or (count > 1 and moe.num_experts < 2 * count):
        raise wrong("n_group", count, f"a divisor of the {moe.num_experts} experts and at least topk_group")
    factor = keys.number("routed_scaling_factor", scale)
    return Routing(moe.num_chosen, moe.normalises, "sigmoid", factor, (count, chosen))
