"""Experts of a few tokens on plain multiply-adds: two launches, in which each pair reads its expert's rows once.

The first computes the gated activations of all pairs, one pair's outputs in a program. The second computes outputs of
one token from all its experts, with their weighted sum and the residual. Its weights do not depend on the first, so
they are on their way while the first one drains; the ids are older than both.

Shapes: T tokens, S chosen for each, P = T S pairs, D model, F width of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.moe import Experts, has_gates
from octavo_kernels.triton.activation import activation_of
from octavo_kernels.triton.launch import after_predecessor, launch, prefetch_lines
from octavo_kernels.triton.linear.gemv import column_chunk, finish_rows, row_starts, weight_chunk


@dataclass(frozen=True)
class ExpertGemvConfig:
    """Tiling parameters."""

    gate_up_rows: int = 8
    """Weight rows of a program of the first launch, half of them gates; a power of two from 2 on."""
    gate_up_columns: int = 1024
    """Columns at a time, a power of two."""
    down_rows: int = 2
    """Weight rows of each expert for a program of the second launch, a power of two."""
    down_columns: int = 512
    """Columns at a time, of each expert; a power of two."""
    warps: int = 4
    prefetch: bool = True
    """Whether the second launch brings its weights into the cache while the first one runs."""


@triton.jit
def expert_gate_up_kernel(
    x_ptr: tl.tensor, ids_ptr: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor, out_ptr: tl.tensor,
    F: tl.tensor, pairs_a_row: tl.tensor, D: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_D: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, EVEN_F: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """OUTPUTS gated activations of a pair that has an expert; a chunk of columns is loaded while one is summed."""
    CHUNKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    GATED: tl.constexpr = ACTIVATION != "squared_relu"
    PARTS: tl.constexpr = 2 if GATED else 1
    pair, start = tl.program_id(0), tl.program_id(1) * OUTPUTS
    starts = row_starts(start, F, D, OUTPUTS, GATED, EVEN_F)
    after_predecessor(PDL)
    expert = tl.load(ids_ptr + pair)
    if expert >= 0:
        rows = weight_ptr + expert * PARTS * F * D + starts
        x_row = x_ptr + (pair // pairs_a_row).to(tl.int64) * D
        weights = weight_chunk(rows, 0, True, D, BLOCK_D)
        acc = tl.zeros([PARTS * OUTPUTS, BLOCK_D], tl.float32)
        for c in tl.static_range(CHUNKS):
            following = weights
            if c + 1 < CHUNKS:
                following = weight_chunk(rows, c + 1, True, D, BLOCK_D)
            acc += weights.to(tl.float32) * column_chunk(x_row, c, D, BLOCK_D)[None, :]
            weights = following
        own_bias = bias_ptr
        if bias_ptr is not None:
            own_bias = bias_ptr + expert * PARTS * F
        own_out = out_ptr + pair.to(tl.int64) * F
        finish_rows(tl.sum(acc, 1), 0.0, start, F, own_bias, own_out, OUTPUTS, ACTIVATION, EVEN_F, ALPHA, LIMIT)


@triton.jit
def expert_down_kernel(
    gated_ptr: tl.tensor, ids_ptr: tl.tensor, share_ptr: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor,
    residual_ptr: tl.tensor, out_ptr: tl.tensor, D: tl.tensor, F: tl.constexpr, CHOSEN: tl.constexpr,
    ARE_SOME: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_F: tl.constexpr, EVEN_D: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """OUTPUTS of a token: the residual plus the weighted sum of its experts' results, in the order of their choice.

    With ARE_SOME ids may be negative; in place of such an expert another one of the token is prefetched.
    """
    CHUNKS: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    EXPERTS: tl.constexpr = triton.next_power_of_2(CHOSEN)
    t, start = tl.program_id(0), tl.program_id(1) * OUTPUTS
    s = tl.arange(0, EXPERTS)
    is_chosen = s < CHOSEN
    pair = t * CHOSEN + tl.minimum(s, CHOSEN - 1)
    expert = tl.load(ids_ptr + pair)
    if ARE_SOME:
        is_chosen &= expert >= 0
        expert = tl.maximum(tl.where(is_chosen, expert, tl.max(expert, 0)), 0)
    starts = row_starts(start, D, F, OUTPUTS, False, EVEN_D)
    rows = weight_ptr + (expert * D * F)[:, None, None] + starts[None, :, :]
    is_there = is_chosen[:, None, None]
    weights = _weights(rows, 0, is_there, F, BLOCK_F)
    if PDL and PREFETCH and CHUNKS > 1:
        prefetch_lines(tl.reshape(rows + BLOCK_F, [EXPERTS * OUTPUTS, 1]), F - BLOCK_F)
    after_predecessor(PDL)
    acc = tl.zeros([EXPERTS, OUTPUTS, BLOCK_F], tl.float32)
    for c in tl.static_range(CHUNKS):
        following = weights
        if c + 1 < CHUNKS:
            following = _weights(rows, c + 1, is_there, F, BLOCK_F)
        gated_rows = gated_ptr + pair.to(tl.int64)[:, None, None] * F
        gated = _weights(gated_rows, c, is_there, F, BLOCK_F)
        acc += weights.to(tl.float32) * gated.to(tl.float32)
        weights = following
    y = tl.sum(acc, 2)
    n = start + tl.arange(0, OUTPUTS)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + (expert * D)[:, None] + tl.minimum(n, D - 1)[None, :]).to(tl.float32)
    share = tl.load(share_ptr + pair)
    y = tl.sum(tl.where(is_chosen[:, None], y * share[:, None], 0.0), 0)
    at = t.to(tl.int64) * D + n
    if residual_ptr is not None:
        y += tl.load(residual_ptr + at, mask=n < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=n < D)


@triton.jit
def _weights(
    rows: tl.tensor, chunk: tl.tensor, is_there: tl.tensor, F: tl.constexpr, BLOCK_F: tl.constexpr
) -> tl.tensor:
    """Columns ``chunk`` of rows [EXPERTS, 1 or OUTPUTS, 1], 0 where there is none."""
    k = chunk * BLOCK_F + tl.arange(0, BLOCK_F)[None, None, :]
    return tl.load(rows + k, mask=is_there & (k < F), other=0.0)


def moe_gemv(
    x_TD: Tensor, ids_TS: Tensor, shares_TS: Tensor, experts: Experts, residual_TD: Tensor | None,
    config: ExpertGemvConfig,
) -> Tensor:  # fmt: skip
    """``ops.moe`` for any number of rows, each of which reads its experts for itself; all arguments are contiguous."""
    (T, D), S, F = x_TD.shape, ids_TS.shape[1], experts.down.shape[2]
    gated_PF = x_TD.new_empty(T * S, F)
    outputs = config.gate_up_rows // (2 if has_gates(experts.activation) else 1)
    launch(
        expert_gate_up_kernel, (T * S, triton.cdiv(F, outputs)),
        *(x_TD, ids_TS, experts.gate_up, experts.gate_up_bias, gated_PF, F, S), D=D, OUTPUTS=outputs,
        BLOCK_D=min(config.gate_up_columns, triton.next_power_of_2(D)), **activation_of(experts.activation),
        EVEN_F=F % outputs == 0, num_warps=config.warps,
    )  # fmt: skip
    out_TD = torch.empty_like(x_TD) if residual_TD is None else residual_TD
    launch(
        expert_down_kernel, (T, triton.cdiv(D, config.down_rows)),
        *(gated_PF, ids_TS, shares_TS, experts.down, experts.down_bias, residual_TD, out_TD, D), F=F, CHOSEN=S,
        ARE_SOME=experts.num_routed > 0, OUTPUTS=config.down_rows,
        BLOCK_F=min(config.down_columns, triton.next_power_of_2(F)), EVEN_D=D % config.down_rows == 0,
        PREFETCH=config.prefetch, num_warps=config.warps,
    )  # fmt: skip
    return out_TD
