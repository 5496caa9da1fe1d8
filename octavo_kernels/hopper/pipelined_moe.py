"""Experts of packed groups by ``pipelined_gemm``: each expert's words are read once, for all tokens that chose it.

Shapes: T tokens, S chosen for each, P = T S pairs, K inputs, N outputs, D model, F width of an expert.

Copies take boxes of neighbouring rows, so rows of x are first put in the order of the experts' tiles. What the first
product writes is in this order, too, and the second one puts its results back in the order of pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.linear.grouped_linear import HALF, PackedGroups
from octavo.ops.moe import GroupedExperts, has_gates
from octavo_kernels.hopper.pipelined_configs import LEAST_ROWS, PipelinedConfig, expert_config
from octavo_kernels.triton.activation import activation_of
from octavo_kernels.triton.experts.expert_tiles import sort_into_tiles, tile_rows
from octavo_kernels.triton.experts.gather_rows import gather_rows
from octavo_kernels.triton.grouped.grouped_product import GroupedProduct
from octavo_kernels.triton.launch import is_invariant

MAX_ROWS, ROOM = 128, 5
"""A second tile of an expert costs less than rows that are not there: its words come from the second-level cache."""
FEW_TOKENS = 2
"""Sorting and gathering take as long as is saved by reading an expert once for both; but for weights with minima or
groups of 16, where the kernel for each pair has more to do for a group."""
MOST_ENTRIES = 1 << 28
"""Of the weights of several tokens' pairs, each with programs of its own: for more, sorting takes less than is lost by
small programs, and by experts that are read twice. Half of them where a group costs more."""


def expert_configs(
    x_TD: Tensor, ids_TS: Tensor, experts: GroupedExperts
) -> tuple[PipelinedConfig, PipelinedConfig] | None:
    """Of the first and the second product; ``None`` where other kernels are used: for experts without gates, if this
    one does not take these experts, if other rows may not affect in which order sums are added, and for so few
    tokens that they hardly share any experts."""
    block = tile_rows(ids_TS.numel(), experts.num_routed or experts.num_experts, MAX_ROWS, ROOM, LEAST_ROWS)
    if not has_gates(experts.activation) or is_invariant() or takes_pairs(ids_TS, experts):
        return None
    gate_up, down = (
        expert_config(_of_one(packed, experts.num_experts, is_gated, x_TD.dtype), block, x_TD.device)
        for packed, is_gated in ((experts.gate_up, True), (experts.down, False))
    )
    return None if gate_up is None or down is None else (gate_up, down)


def takes_pairs(ids_TS: Tensor, experts: GroupedExperts) -> bool:
    """Whether each pair has programs of its own: most have an expert for themselves, and read little."""
    num_tokens, num_pairs = len(ids_TS), ids_TS.numel()
    if num_tokens > 1 and 2 * num_pairs > (experts.num_routed or experts.num_experts):
        return False
    are_dear = experts.gate_up.minima_GN is not None or experts.gate_up.group == HALF
    entries = sum(packed.shape[0] * packed.shape[1] for packed in (experts.gate_up, experts.down))
    few, most = (1, MOST_ENTRIES // 2) if are_dear else (FEW_TOKENS, MOST_ENTRIES)
    return num_tokens <= few or num_pairs * entries <= most * experts.num_experts


def _of_one(packed: PackedGroups, num_experts: int, is_gated: bool, dtype: torch.dtype) -> GroupedProduct:
    return GroupedProduct.of(packed, is_gated, dtype)._replace(N=packed.shape[0] // num_experts)


def pipelined_moe(
    x_TD: Tensor,
    ids_TS: Tensor,
    shares_TS: Tensor,
    experts: GroupedExperts,
    configs: tuple[PipelinedConfig, PipelinedConfig],
    gated_PF: Tensor,
    parts_PD: Tensor,
) -> None:
    """Fill ``parts`` with the experts' results times their shares, in the order of pairs; ``gated`` is room."""
    from octavo_kernels.hopper.pipelined_gemm import pipelined_experts

    tiles = sort_into_tiles(ids_TS, experts.num_experts, configs[0].block_t)
    x_PD = gather_rows(x_TD, tiles.order_P, tiles.used)
    activation, plain = activation_of(experts.activation), activation_of(None)
    pipelined_experts(x_PD, experts.gate_up, experts.gate_up_bias, None, activation, gated_PF, tiles, configs[0])
    pipelined_experts(gated_PF, experts.down, experts.down_bias, shares_TS, plain, parts_PD, tiles, configs[1])
