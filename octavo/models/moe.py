"""The configuration of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models.keys import ConfigKeys, wrong
from octavo.ops.linear import Activation
from octavo.ops.moe import ClampedSwish


@dataclass(frozen=True, kw_only=True)
class MoESettings:
    """How a token passes through experts."""

    num_experts: int
    num_chosen: int
    """Experts for each token."""
    activation: Activation | ClampedSwish
    expert_size: int
    """Width of one expert."""
    dense_size: int
    """Width of a feed-forward layer without experts."""
    is_sparse: tuple[bool, ...]
    """Whether each layer has experts."""
    normalises: bool
    """Whether the shares of a token's experts are made to sum to 1."""
    shared_size: int = 0
    """Width of what all tokens pass through in addition to the experts; 0: there is no such thing."""

    @property
    def widest(self) -> int:
        """Width of all experts together that a token passes through, or of the feed-forward layers without experts."""
        return max(self.num_chosen * self.expert_size + self.shared_size, self.dense_size)


def read_experts(
    keys: ConfigKeys,
    num_layers: int,
    dense_size: int,
    activation: Activation | ClampedSwish,
    *,
    count_keys: tuple[str, ...],
    num_chosen: int,
    expert_size: int,
    normalises: bool,
    is_sparse: tuple[bool, ...] = (),
    shared_size: int = 0,
) -> MoESettings:
    """Experts in every layer, unless ``is_sparse`` says where; defaults are the family's.

    ``count_keys`` are the names that the number of experts may have.
    """
    count_key = next((key for key in count_keys if keys.get(key) is not None), count_keys[0])
    num_experts, chosen = keys.size(count_key), keys.size("num_experts_per_tok", num_chosen)
    if chosen > num_experts:
        raise wrong("num_experts_per_tok", chosen, f"at most {count_key}, {num_experts}")
    return MoESettings(
        num_experts=num_experts,
        num_chosen=chosen,
        activation=activation,
        expert_size=expert_size,
        dense_size=dense_size,
        is_sparse=is_sparse or (True,) * num_layers,
        normalises=normalises,
        shared_size=shared_size,
    )
